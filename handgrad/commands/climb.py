"""handgrad climb: the reader writes GPT-2's operations, step by step; each is graded, and then they train a model."""

import json
import shutil
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

from handgrad.commands.plot import MARGIN, curves
from handgrad.errors import NumericsError, UsageError
from handgrad.names import check_choice, nearest_name
from handgrad.reports.reading import read_runs
from handgrad.tools import climb

PROGRESS = "progress.json"  # when the climb began; by step the number of checks, and when it was right first


def run(parsed: Namespace) -> int:
    folder, action = Path(parsed.dir), parsed.action or "way"
    check_choice("the action", action, ("start", "check", "run", "way"))
    if action == "start":
        if not parsed.what:
            raise UsageError("start needs a folder: `handgrad climb start DIR`")
        climb.start(folder := Path(parsed.what))
        (folder / PROGRESS).write_text(json.dumps({"started": time.time(), "steps": {}}))
        print(f"{len(climb.STEPS)} steps lie in {parsed.what}: `cd {parsed.what}`, read README.md, `handgrad climb check`")
        return 0
    try:
        progress = json.loads((folder / PROGRESS).read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        raise UsageError(f"expected a climb in {folder.absolute()}; `handgrad climb start DIR` begins one") from None
    if action == "way":
        print("\n".join(way(progress)))
    else:
        check(folder, progress, parsed.what) if action == "check" else train(folder, parsed.steps)
    return 0


def check(folder: Path, progress: dict[str, Any], asked: str | None) -> None:
    """Grades a step, by default the first that is not right yet, and notes it in the folder."""
    steps, begun = climb.STEPS, time.perf_counter()
    rest = [step for step in steps if "right" not in progress["steps"].get(step, {})]
    names = {name: step for step in steps for name in (str(int(step[:2])), step[3:], step, f"{step}.py")}
    if asked and asked not in names:
        raise UsageError(f"expected a step from 1 to {len(steps)}, found {asked!r}{nearest_name(asked, names)}")
    step = names[asked] if asked else [*rest, steps[-1]][0]
    try:
        verdicts = climb.grade(folder, step)
    except UsageError as error:
        raise UsageError(f"step {int(step[:2])}: {error}") from None
    row = progress["steps"].setdefault(step, {"checks": 0})
    row["checks"] += 1
    wrong = [f"{output} {words}" for output, words in verdicts.items() if words != climb.RIGHT]
    if not wrong:
        row.setdefault("right", time.time())
    (folder / PROGRESS).write_text(json.dumps(progress))
    title = f"step {int(step[:2])}, {step[3:]}, beside the reference, in {time.perf_counter() - begun:.1f} s"
    print("\n".join([title, *(f"  {output}: {words}" for output, words in verdicts.items())]))
    if wrong:
        raise NumericsError(f"step {int(step[:2])}: {wrong[0]}; hints are in {step}.md")
    following = [other for other in rest if other != step]
    print(f"right; next is {following[0]}.md" if following else "right, as all are; `handgrad climb run` trains by them")


def way(progress: dict[str, Any]) -> list[str]:
    """A line for each step: whether it is right, the minutes since the last one was, the number of checks."""
    rows, before, lines = progress["steps"], progress["started"], []
    for step in climb.STEPS:
        right, checks = rows.get(step, {}).get("right"), rows.get(step, {}).get("checks", 0)
        times = f"{f'{(right - before) / 60:.1f} min' if right else '':>10}{f'{checks} x checked' if checks else '':>14}"
        before = max(before, right or before)
        lines.append(f"[{'x' if right else ' '}] {int(step[:2]):>2} {step[3:].replace('_', ' '):<22}{times}".rstrip())
    return [*lines, f"{sum('right' in row for row in rows.values())} right; `handgrad climb run` trains by them"]


def train(folder: Path, number: int) -> None:
    """Trains with the reference and with the reader's operations; draws both losses."""
    from handgrad.tools import climb_run  # with all that trains, which a check need not wait for

    runs = read_runs(climb_run.train_both(folder, steps := climb_run.written(folder), number))
    yours = f"yours: {', '.join(step[3:] for step in steps) or 'none yet'}; all others are the package's"
    print("\n".join(["", *curves(runs, max(20, shutil.get_terminal_size().columns - MARGIN - 1)), yours]))
    print(f"the losses of a step differ by at most {abs(runs[0].steps.loss - runs[1].steps.loss).max():.2g} nats")
