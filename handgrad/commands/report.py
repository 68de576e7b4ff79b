"""handgrad report: a self-contained page about one run or several."""

from collections.abc import Sequence
from pathlib import Path

from handgrad.commands.arguments import Parser
from handgrad.report.page import write_report


def run(arguments: Sequence[str]) -> int:
    parser = Parser("handgrad report", description="Curves, samples, memory and settings of runs on one page.")
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run folders; several are overlaid")
    parser.add_argument(
        "--out",
        default="",
        metavar="FILE",
        help="the page, plots beside it (default: RUN/report.html)",
    )
    parsed = parser.parse(arguments)
    runs = [Path(folder) for folder in parsed.runs]
    default = runs[0] / "report.html" if len(runs) == 1 else Path("report.html")
    print(write_report(runs, Path(parsed.out) if parsed.out else default))
    return 0
