"""The report: one self-contained HTML page about one run or several, and its plots as PNG files next to it."""

import base64
import functools
import hashlib
import json
from collections.abc import Callable, Sequence
from html import escape
from importlib import resources
from pathlib import Path
from typing import NamedTuple

from handgrad.errors import HandgradError, UsageError, storage_errors
from handgrad.files import write_bytes_durably
from handgrad.reports import comparing, sections
from handgrad.reports.drawing import LARGE, SMALL, brief, inline_svg, png
from handgrad.reports.plots import FEW_RUNS, PALETTE, Plot, choose_plots
from handgrad.reports.reading import read_runs
from handgrad.reports.results import Run, thin, wall_clock
from handgrad.reports.sections import folded, per_run, section, text
from handgrad.storage.run_files import REPORT_FILE

CLOCK_POINTS = 200  # per run: between them the script interpolates
MANY = "Every run has the same line in each plot, the one beside its name in the tables."


class Live(NamedTuple):
    """The state of watched runs: a version that changes with them, a line about them, and whether all have ended."""

    version: str
    status: str
    ended: bool


def write_report(runs: Sequence[Path], out: Path, leave_out: Callable[[HandgradError], object] | None = None) -> Path:
    """Writes the page `out` (.html) about the run folders `runs`, and `<stem>_<plot>.png` next to it; returns `out`.

    The same run folders give the same bytes. The error of a folder without a readable run goes to `leave_out` (see
    `read_runs`), or is raised."""
    if not runs:
        raise UsageError("a report needs at least one run folder: `handgrad report RUN...`")
    if out.suffix.lower() not in (".html", ".htm"):
        page_file = out.with_suffix(".html") if out.is_file() or (out.suffix and not out.is_dir()) else out / REPORT_FILE
        raise UsageError(f"a report is an .html file, found --out {out}; try --out {page_file}")
    read = read_runs(runs, leave_out)
    plots = choose_plots(read)
    files = {out.with_name(f"{out.stem}_{plot.name}.png"): png(plot, read) for plot in plots}
    # A sample may contain a lone surrogate, which UTF-8 cannot encode.
    files[out] = page(read, plots).encode("utf-8", errors="replace")
    for path, content in files.items():
        with storage_errors(f"writing {path}"):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_bytes_durably(path, content)  # the old report stays until the new one is complete
    return out


def page(runs: Sequence[Run], plots: Sequence[Plot], live: Live | None = None, notes: Sequence[str] = ()) -> str:
    """The whole page. It loads nothing: style, script and plots are inline, and its security policy forbids the rest.

    With `live` it updates itself from the server that it came from. `notes`: lines at the top."""
    several = len(runs) > 1
    title = " · ".join(run.name for run in runs) if len(runs) <= 4 else f"{len(runs)} runs compared"

    def figures(name: str) -> str:
        drawn = "\n".join(figure(plot, runs) for plot in plots if plot.section == name)
        return f'<div class="plots">\n{drawn}\n</div>' if drawn else ""

    validations = per_run(runs, sections.validations)
    body = [
        f"<h1>{text(title)}</h1>",
        *map(sections.faint, notes),
        "" if several else sections.description(runs[0]),
        per_run(runs, sections.warnings, fold=False),
        comparing.comparison(runs) if several else sections.tiles(runs[0]),
        section("Curves", axis_choice(runs), sections.faint(MANY) if len(runs) > FEW_RUNS else "", figures("Curves")),
        section("Tasks", sections.tasks(runs), figures("Tasks")),
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
    return document(title, body, live)


def document(title: str, body: Sequence[str], live: Live | None = None) -> str:
    """An HTML document. In a `live` one, each part of <main> is updated separately."""
    content = script(live=live is not None)
    digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    version = ""
    if live is not None:
        policy += "; connect-src 'self'"
        version = f' data-version="{text(live.version)}"'
        body = [f'<p class="live" role="status" data-ended="{live.ended:d}">{text(live.status)}</p>', *body]
    head = f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<title>{text(title)} – handgrad</title>
<style>{style_sheet()}</style>
</head>
<body{version}>
<main>"""
    return "\n".join([head, *filter(None, body), "</main>", f"<script>{content}</script>", "</body>", "</html>", ""])


def figure(plot: Plot, runs: Sequence[Run]) -> str:
    """A plot with its caption. A wide plot comes in two sizes; the style sheet shows the one that fits."""
    drawn = [inline_svg(plot, runs, size) for size in ((LARGE, SMALL) if plot.wide else (SMALL,))]
    drawings, values = "\n".join(svg for svg, _ in drawn), attribute(drawn[0][1])
    kind = ' class="wide"' if plot.wide else ""
    axis = "" if plot.name == "loss_by_tokens" else " data-by-step"
    caption = f"<figcaption>{text(plot.caption)}</figcaption>"
    return f"<figure{kind}{axis} data-series={values}>\n{drawings}\n{caption}\n</figure>"


def source(name: str) -> str:
    """The text of a file in this package."""
    return resources.files("handgrad.reports").joinpath(name).read_text(encoding="utf-8")


def style_sheet() -> str:
    """The whole CSS of the page. Paper always gets the light colours."""
    light, dark = ("".join(f"--{name}:{colors[i]};" for name, colors in PALETTE.items()) for i in range(2))
    return f"""
:root {{ color-scheme: light; {light} }}
@media screen and (prefers-color-scheme: dark) {{ :root {{ color-scheme: dark; {dark} }} }}

{source("page.css")}"""


@functools.cache
def script(*, live: bool) -> str:
    """page.js (hover values, choice of the x axis, sortable tables), in a live page live.js, without indentation."""
    lines = "\n".join(map(source, ("page.js", "live.js") if live else ("page.js",))).splitlines()
    return "\n".join(line.strip() for line in lines if line.strip())


def attribute(content: str) -> str:
    """`content` as the value of an HTML attribute in single quotes, so that JSON's double quotes need no escape."""
    return "'" + escape(content, quote=False).replace("'", "&#39;") + "'"


def tokens_axis(run: Run) -> int | list[list[int]]:
    """The tokens per step or, with a batch schedule, [steps, tokens seen by each of them]."""
    if len((batch := run.start.batch).stages) == 1:
        return run.start.tokens_per_step
    steps = [*(stage.first_step for stage in batch.stages[1:]), batch.stages[-1].first_step + 1]
    return [steps, [batch.tokens_before(step) for step in steps]]


def axis_choice(runs: Sequence[Run]) -> str:
    """Buttons for the x axis, with the tokens and seconds at the steps of each run; hidden unless the script runs."""
    known = []
    for index, run in enumerate(runs):
        seconds, picked = wall_clock(run), thin(len(run.steps.step), CLOCK_POINTS)
        clock = [[brief(float(value)) for value in values[picked]] for values in (run.steps.step, seconds)]
        times = clock if seconds[-1] > 0 else None
        known.append({"tokens": tokens_axis(run), "clock": times, "dash": sections.dash_array(index)})
    buttons = "".join(f'<button data-axis="{axis}">{axis}</button>' for axis in ("steps", "tokens", "time"))
    values = attribute(json.dumps(known, separators=(",", ":")))
    return f'<p class="axes" hidden data-runs={values}>Curves by {buttons}</p>'
