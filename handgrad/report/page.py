"""The report: one self-contained HTML page about one run or several, and its plots as PNG files beside it."""

from collections.abc import Callable, Sequence
from pathlib import Path

from handgrad.errors import HandgradError, UsageError, storage_errors
from handgrad.files import write_bytes_durably
from handgrad.report import sections
from handgrad.report.drawing import LARGE, SMALL, inline_svg, png
from handgrad.report.plots import Plot, choose_plots
from handgrad.report.runs import Run, read_runs
from handgrad.report.sections import folded, per_run, section, text
from handgrad.report.style import style_sheet
from handgrad.run_files import REPORT_FILE


def write_report(runs: Sequence[Path], out: Path, leave_out: Callable[[HandgradError], object] | None = None) -> Path:
    """Writes the page `out` (.html) about the run folders `runs`, and `<stem>_<plot>.png` beside it; returns `out`.

    The same run folders give the same bytes. A folder without a run to report on goes to `leave_out` (see `read_runs`), or
    raises its `DataError`.
    """
    if not runs:
        raise UsageError("a report needs at least one run folder: `handgrad report RUN...`")
    if out.suffix.lower() not in (".html", ".htm"):
        raise UsageError(f"a report is an .html file, found --out {out}; try --out {out / REPORT_FILE}")
    read = read_runs(runs, leave_out)
    plots = choose_plots(read)
    files = {out.with_name(f"{out.stem}_{plot.name}.png"): png(plot, read) for plot in plots}
    # A sample may hold half a surrogate pair, which UTF-8 cannot.
    files[out] = page(read, plots).encode("utf-8", errors="replace")
    for path, content in files.items():
        with storage_errors(f"writing {path}"):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_bytes_durably(path, content)  # the old report stays until the new one is complete
    return out


def page(runs: Sequence[Run], plots: Sequence[Plot]) -> str:
    """The whole page. It loads nothing: style and plots are inline, and its own policy forbids the rest."""
    several = len(runs) > 1
    title = " · ".join(run.name for run in runs) if len(runs) <= 4 else f"{len(runs)} runs compared"

    def figures(name: str) -> str:
        drawn = "\n".join(figure(plot, runs) for plot in plots if plot.section == name)
        return f'<div class="plots">\n{drawn}\n</div>' if drawn else ""

    validations = per_run(runs, sections.validations)
    body = [
        f"<h1>{text(title)}</h1>",
        "" if several else sections.description(runs[0]),
        per_run(runs, sections.warnings),
        sections.comparison(runs) if several else sections.tiles(runs[0]),
        section("Curves", figures("Curves")),
        section("Tasks", per_run(runs, sections.tasks), figures("Tasks")),
        section("fp8", per_run(runs, sections.fp8), figures("fp8")),
        section("Ranks", per_run(runs, sections.ranks)),
        section("Samples", per_run(runs, sections.samples)),
        section("What to do next", per_run(runs, sections.commands)),
        section("Memory", per_run(runs, sections.memory)),
        section("History", per_run(runs, sections.history)),
        section(
            "Details",
            folded("The runs in words", per_run(runs, sections.description)) if several else "",
            folded("Validations", validations) if validations else "",
            folded("Settings", per_run(runs, sections.settings)),
        ),
        f"<footer>Written by handgrad {text(runs[0].start.handgrad)} from config.toml and metrics.jsonl.</footer>",
    ]
    head = f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{text(title)} – handgrad</title>
<style>{style_sheet()}</style>
</head>
<body>
<main>"""
    return "\n".join([head, *filter(None, body), "</main>", "</body>", "</html>", ""])


def figure(plot: Plot, runs: Sequence[Run]) -> str:
    """A plot with its caption; a wide one comes in two sizes, of which the style sheet shows the fitting one."""
    sizes = (LARGE, SMALL) if plot.wide else (SMALL,)
    drawings = "\n".join(inline_svg(plot, runs, size) for size in sizes)
    kind = ' class="wide"' if plot.wide else ""
    return f"<figure{kind}>\n{drawings}\n<figcaption>{text(plot.caption)}</figcaption>\n</figure>"
