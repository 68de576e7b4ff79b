"""An audited run beside the same run without: the time of a step, and of a verification beside its segment's.

    python -m benchmarks.audit_cost d12 --out h200-audit-124m.json         one GPU, or a CPU
    python -m benchmarks.audit_cost d48 --ranks 2                          a run of two GPUs, which one verifies
    python -m benchmarks.audit_cost demo --device cpu                      to try it

A run of the preset on random tokens makes its steps in turns, with a link for each step and without; both share machine,
memory and state. Then it saves, makes a segment of audited steps, and saves again; one process verifies that segment.
`--keep DIR` leaves the chain there: two machines' are compared by `handgrad diff DIR DIR`.
"""

import argparse
import dataclasses
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.saves import arguments, asked_preset, publish, timed, write_tokens
from handgrad.joins.parallel.launchers import find_rank_info
from handgrad.joins.parallel.local import run_ranks
from handgrad.machine import devices
from handgrad.memory.rows import count_parameters
from handgrad.run.loop import Run
from handgrad.run.open import open_run
from handgrad.settings.config import RunConfig, check
from handgrad.storage.run_files import AUDIT_FILE
from handgrad.tools.record import open_record
from handgrad.tools.verify import Span, check_machine, replay

WARM_UP_STEPS = 3
NEVER = "save_every eval_every sample_every sample_tokens gpu_every keep_checkpoints"  # all 0
OFF = 1 << 62  # steps between two digests: more than any run has
FIGURES = "figures.json"


def config_of(asked: argparse.Namespace, folder: Path, ranks: int) -> RunConfig:
    """A run with a link for every step, and nothing else due."""
    config = asked_preset(asked, folder)
    step = asked.tokens_per_step or config.tokens_per_step
    settings = {"tokens_per_step": step, "lanes": ranks, "steps": 10**6, "audit_every": 1}
    return check(dataclasses.replace(config, **settings, **dict.fromkeys(NEVER.split(), 0)))


def switch(run: Run, *, audited: bool) -> None:
    """Turns the digests and the links of the following steps on or off."""
    digest = run.training.digest
    assert digest is not None
    digest.every = run.audit.every = 1 if audited else OFF


def turns(run: Run, rounds: int, steps: int) -> dict[str, Any]:
    """Milliseconds of a step by turn, and the medians."""
    found: dict[bool, list[float]] = {True: [], False: []}
    timed(run, WARM_UP_STEPS)
    for turn in range(2 * rounds):
        audited = turn % 4 in (0, 3)  # on off off on: a drift weighs on both alike
        switch(run, audited=audited)
        times = timed(run, steps)
        found[audited].append(1e3 * (times[-1] - times[0]) / steps)
    switch(run, audited=True)
    on, off = (statistics.median(found[audited]) for audited in (True, False))
    return {
        "milliseconds_per_step": off,
        "milliseconds_per_audited_step": on,
        "cost": on / off - 1,
        "turns": {"without": found[False], "with": found[True]},
    }


def segment(run: Run, steps: int) -> dict[str, Any]:
    """Makes a segment between two checkpoints; its seconds without the saves'."""
    run.save()
    run.saves.wait()
    first, times = run.completed, timed(run, steps)
    run.save()
    run.saves.wait()
    return {"first": first, "last": run.completed, "segment_seconds": times[-1] - times[0]}


def verification(folder: Path, first: int, last: int, data: str) -> dict[str, Any]:
    """The time of one process for the segment, from the start to the last comparison."""
    begun = time.perf_counter()
    record, span = open_record(folder / "run"), Span(first, last)
    check_machine(record, [span], {"data": data}, allow_changes=False)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        links, checkpoints = replay(record, span, {"data": data}, Path(scratch), writes=True)
    return {"verification_seconds": time.perf_counter() - begun, "equal_links": links, "equal_checkpoints": checkpoints}


def train(asked: argparse.Namespace, folder: Path) -> None:
    info = find_rank_info(os.environ)
    config = config_of(asked, folder, info.size)
    steps = WARM_UP_STEPS + 2 * asked.rounds * asked.steps + asked.segment
    write_tokens(Path(config.data), (steps + 2) * config.tokens_per_step + 1, info.rank)
    with open_run(config, console="nothing") as run:
        run.begin()
        figures = {"parameters": count_parameters(run.design.parameters), **turns(run, asked.rounds, asked.steps)}
        figures |= {"tokens_per_step": config.tokens_per_step, **segment(run, asked.segment)}
        if run.ranks.is_rank_0:
            (folder / FIGURES).write_text(json.dumps(figures))


def parse() -> argparse.Namespace:
    parser = arguments(__doc__, "demo", "the preset's")
    parser.add_argument("--rounds", type=int, default=6, help="turns with, and as many without")
    parser.add_argument("--steps", type=int, default=5, help="of a turn")
    parser.add_argument("--segment", type=int, default=20, help="steps to verify")
    parser.add_argument("--keep", default="", help="a folder for the chain")
    return parser.parse_args()


def main() -> int:
    asked, info = parse(), find_rank_info(os.environ)
    if info.size > 1:  # a rank, whose launcher has made the folder
        train(asked, Path(asked.folder))
        return 0
    with tempfile.TemporaryDirectory(prefix="handgrad-audit-", dir=asked.folder or None) as made:
        folder = Path(made)
        if asked.ranks > 1:
            command = [sys.executable, "-m", "benchmarks.audit_cost", *sys.argv[1:], "--folder", made]
            if code := run_ranks(command, asked.ranks, os.environ, 60):
                return code
        else:
            train(asked, folder)
        figures = json.loads((folder / FIGURES).read_text())
        figures |= verification(folder, figures["first"], figures["last"], str(folder / "data"))
        figures["verification_times_segment"] = figures["verification_seconds"] / figures["segment_seconds"]
        if asked.keep:
            Path(asked.keep).mkdir(parents=True, exist_ok=True)
            shutil.copy(folder / "run" / AUDIT_FILE, asked.keep)
        publish(asked, __doc__, devices.resolve_device(asked.device or "auto"), figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
