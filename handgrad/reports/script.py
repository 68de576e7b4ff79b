"""The page's script: hover values, the choice of the x axis, sortable tables, renewal of a live page."""

import base64
import functools
import hashlib
import json
from collections.abc import Sequence
from html import escape
from importlib import resources

from handgrad.reports.curves import thin
from handgrad.reports.drawing import brief
from handgrad.reports.results import wall_clock
from handgrad.reports.runs import Run

CLOCK_POINTS = 200  # per run: between them the script interpolates


@functools.cache
def script(*, live: bool) -> str:
    """page.js, and of a live page live.js after it, without the spaces at the beginning of their lines."""
    folder = resources.files("handgrad.reports")
    names = ("page.js", "live.js") if live else ("page.js",)
    source = "\n".join(folder.joinpath(name).read_text(encoding="utf-8") for name in names)
    return "\n".join(line.strip() for line in source.splitlines() if line.strip())


def script_hash(content: str) -> str:
    """The source of a content policy that allows this script and no other."""
    return f"sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}"


def attribute(content: str) -> str:
    """`content` as the quoted value of an HTML attribute; JSON's own quotes stay short."""
    return "'" + escape(content, quote=False).replace("'", "&#39;") + "'"


def tokens_axis(run: Run) -> int | list[list[int]]:
    """The tokens of a step; of a run with a batch schedule, steps and the tokens seen by then."""
    batch = run.start.batch
    if len(batch.stages) == 1:
        return run.start.tokens_per_step
    steps = [*(stage.first_step for stage in batch.stages[1:]), batch.stages[-1].first_step + 1]
    return [steps, [batch.tokens_before(step) for step in steps]]


def axis_choice(runs: Sequence[Run]) -> str:
    """Buttons for the x axis, which show where the script runs, with the tokens and seconds at the steps of each run."""
    known = []
    for run in runs:
        seconds, picked = wall_clock(run), thin(len(run.steps.step), CLOCK_POINTS)
        clock = [[brief(float(value)) for value in values[picked]] for values in (run.steps.step, seconds)]
        known.append({"tokens": tokens_axis(run), "clock": clock if seconds[-1] > 0 else None})
    buttons = "".join(f'<button data-axis="{axis}">{axis}</button>' for axis in ("steps", "tokens", "time"))
    values = attribute(json.dumps(known, separators=(",", ":")))
    return f'<p class="axes" hidden data-runs={values}>Curves by {buttons}</p>'
