"""handgrad train: trains the run in --out, or resumes it."""

import os
import shlex
from argparse import Namespace
from pathlib import Path

from handgrad.parallel.launchers import find_place
from handgrad.report.page import write_report
from handgrad.run.start import train
from handgrad.run_files import REPORT_FILE


def run(parsed: Namespace) -> int:
    config = parsed.run_config
    train(config, allow_changes=parsed.allow_changes)
    if find_place(os.environ).rank:
        return 0  # rank 0 logs
    print(f"report     {write_report([Path(config.out)], Path(config.out) / REPORT_FILE)}")
    run_folder = shlex.quote(config.out)
    print(f"next       handgrad sample {run_folder}   or   handgrad evaluate {run_folder}")
    return 0
