"""handgrad report: a self-contained page about one run or several."""

import sys
from argparse import Namespace
from pathlib import Path

from handgrad.errors import HandgradError
from handgrad.reports.page import write_report
from handgrad.storage.run_files import REPORT_FILE


def run(parsed: Namespace) -> int:
    runs = [Path(folder) for folder in parsed.runs]
    default = runs[0] / REPORT_FILE if len(runs) == 1 and not runs[0].is_file() else Path(REPORT_FILE)
    print(write_report(runs, Path(parsed.out) if parsed.out else default, leave_out))
    return 0


def leave_out(error: HandgradError) -> None:
    print(f"left out   {error}", file=sys.stderr)
