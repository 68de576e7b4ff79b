"""handgrad train: trains the run in --out, or resumes it."""

import os
import shlex
from argparse import Namespace
from pathlib import Path

from handgrad.parallel.launchers import find_rank_info
from handgrad.report.page import write_report
from handgrad.run.start import open_run
from handgrad.run_files import REPORT_FILE


def run(parsed: Namespace) -> int:
    config = parsed.run_config
    with open_run(config, allow_changes=parsed.allow_changes) as run:
        run.begin()
        run.advance(config.steps)
    if find_rank_info(os.environ).rank:
        return 0  # rank 0 logs
    print(f"report     {write_report([Path(config.out)], Path(config.out) / REPORT_FILE)}")
    run_folder = shlex.quote(config.out)
    print(f"next       handgrad sample {run_folder}   or   handgrad evaluate {run_folder}")
    return 0
