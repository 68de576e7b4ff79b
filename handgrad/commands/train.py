"""handgrad train: trains, or goes on training, the run in --out."""

import os
import shlex
from collections.abc import Sequence
from pathlib import Path

from handgrad.commands.arguments import Parser, add_run_arguments, run_config
from handgrad.parallel.launchers import find_rank_info
from handgrad.report.page import write_report
from handgrad.run.start import train


def run(arguments: Sequence[str]) -> int:
    parser = Parser("handgrad train", description="Trains a GPT-2, or goes on where the run in --out stopped.")
    add_run_arguments(parser)
    parser.add_argument("--allow-changes", action="store_true", help="resume although config or data changed (logged)")
    parsed = parser.parse(arguments)
    config = run_config(parsed)
    train(config, allow_changes=parsed.allow_changes)
    if find_rank_info(os.environ).rank:
        return 0  # the first rank speaks
    print(f"report     {write_report([Path(config.out)], Path(config.out) / 'report.html')}")
    run_folder = shlex.quote(config.out)
    print(f"next       handgrad sample {run_folder}   or   handgrad evaluate {run_folder}")
    return 0
