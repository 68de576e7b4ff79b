"""handgrad climb: the reader writes GPT-2's operations, step by step; each is graded, and then they train a model."""

import shutil
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

from handgrad.errors import NumericsError, UsageError
from handgrad.names import check_choice, nearest_name
from handgrad.tools import climb

MOST = 16  # steps; those after them are for readers who go on


def run(parsed: Namespace) -> int:
    folder, action = Path(parsed.dir), parsed.action or "way"
    check_choice("the action", action, ("start", "check", "run", "way"))
    if action == "start":
        if not parsed.what:
            raise UsageError("start needs a folder: `handgrad climb start DIR`")
        climb.start(Path(parsed.what))
        print(f"{len(climb.steps())} steps lie in {parsed.what}. Read README.md there, then:")
        print(
            f"  cd {parsed.what}\n  handgrad climb check   # grades the next step\n  handgrad climb         # the way so far"
        )
        return 0
    progress = climb.read_progress(folder)
    if action == "check":
        return check(folder, progress, parsed.what)
    if action == "run":
        return train(folder, parsed.steps)
    print("\n".join(way(progress)))
    return 0


def check(folder: Path, progress: dict[str, Any], asked: str | None) -> int:
    """Grades a step, by default the first that is not right yet, and notes it in the folder."""
    steps, begun = climb.steps(), time.perf_counter()
    rest = [step for step in steps if "right" not in progress["steps"].get(step, {})]
    step = chosen(asked, steps) if asked else [*rest, steps[-1]][0]
    number, name = int(step[:2]), step.partition("_")[2]
    try:
        verdicts = climb.grade(folder, step)
    except UsageError as error:
        raise UsageError(f"step {number}: {error}") from None
    row = progress["steps"].setdefault(step, {"checks": 0})
    row["checks"] += 1
    wrong = [f"{output} {words}" for output, words in verdicts.items() if words != climb.RIGHT]
    if not wrong:
        row.setdefault("right", time.time())
    climb.write_progress(folder, progress)
    print(f"step {number}, {name}, beside the reference, in {time.perf_counter() - begun:.1f} s")
    print("\n".join(f"  {output}: {words}" for output, words in verdicts.items()))
    if wrong:
        raise NumericsError(f"step {number}: {wrong[0]}; hints are in {step}.md")
    following = [other for other in rest if other != step]
    print(f"right; next is {following[0]}.md" if following else "right; that was the last step")
    return 0


def chosen(asked: str, steps: list[str]) -> str:
    """The step by its number, its name or its file."""
    word = Path(asked).stem
    for step in steps:
        if word in (step, step.partition("_")[2]) or (word.isdecimal() and int(word) == int(step[:2])):
            return step
    raise UsageError(f"expected a step from 1 to {len(steps)}, found {asked!r}{nearest_name(word, steps)}")


def way(progress: dict[str, Any]) -> list[str]:
    """A line for each step: whether it is right, the minutes since the last one was, the number of checks."""
    rows, before, lines = progress["steps"], progress["started"], []
    for step in climb.steps():
        row = rows.get(step, {"checks": 0})
        right, checks = row.get("right"), f"{row['checks']} checks" if row["checks"] else ""
        minutes = f"{(right - before) / 60:.1f} min" if right else ""
        before = max(before, right or before)
        lines += ["    for those who go on:"] * (int(step[:2]) == MOST + 1)
        name = step.partition("_")[2].replace("_", " ")
        lines.append(f"[{'x' if right else ' '}] {int(step[:2]):>2} {name:<22}{minutes:>10}  {checks}".rstrip())
    return [
        *lines,
        f"{sum('right' in row for row in rows.values())} right; `handgrad climb run` trains with what is written",
    ]


def train(folder: Path, number: int) -> int:
    """Trains with the reference and with the reader's operations; draws both losses."""
    from handgrad.commands.plot import MARGIN, curves
    from handgrad.reports.reading import read_runs
    from handgrad.tools import climb_run

    mine = climb_run.written(folder)
    runs = read_runs(climb_run.train_both(folder, mine, number))
    print("\n" + "\n".join(curves(runs, max(20, shutil.get_terminal_size().columns - MARGIN - 1))))
    print(f"yours: {', '.join(step.partition('_')[2] for step in mine) or 'none yet'}; the package's: all others")
    largest = max(abs(a - b) for a, b in zip(*(run.steps.loss for run in runs), strict=True))
    print(f"largest difference of a step's loss: {largest:.2g} nats")
    return 0
