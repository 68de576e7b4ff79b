"""The faults of tests/faults/rows.toml that need a GPU, and with two GPUs those of ranks: played, checked, recorded.

    python -m benchmarks.gpu_faults benchmarks/results/h200-faults.json
    python -m benchmarks.gpu_faults FILE --device cpu    the same on two processes of a CPU, where no kernel has a cache

Each row's run is started with its fault, which must fire; it must end as the row says, and the same command afterwards must
give the bits of the run that nobody disturbed. Ends with 1 if a row fails; two minutes or so.
"""

import argparse
import dataclasses
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from benchmarks.record import write_record
from handgrad.data.prepare import PrepareOptions, prepare
from handgrad.storage import checkpoint
from tests.conftest import write_text
from tests.distributed.runs import Launcher, Started, arguments, same_run, saved_steps
from tests.test_runs import records

STEPS = 8
LIMIT_SECONDS = 120.0  # for a run to end
GPU = {"channels": 128, "sequence_length": 64, "tokens_per_step": 1024, "precision": "bf16"}
NOWHERE = "/proc/1/no-cache"  # where nobody can make a folder


@dataclasses.dataclass
class Stage:
    """The data, the folders and the processes with which the rows are played."""

    launcher: Launcher
    data: Path
    folder: Path
    device: str
    undisturbed: Path
    count: int = 0

    def command(self, run: Path, **settings: object) -> list[str]:
        kind = {"device": self.device, **(GPU if self.device == "cuda" else {})}
        return arguments(self.data, run, **{"steps": STEPS, **kind, **settings})

    def new_run(self) -> Path:
        self.count += 1
        return self.folder / str(self.count) / "run"

    def start(self, run: Path, fault: str, codes: list[int | None], ranks: int = 1, **settings: object) -> Started:
        """A start with a fault that fires on the rank that it names, and ends with these codes (None: is left behind)."""
        started = self.launcher.start(ranks, self.command(run, **settings), fault)
        left = [rank for rank, code in enumerate(codes) if code is None]
        if left:
            started.see_fault()
        found = started.wait(LIMIT_SECONDS, without=left)
        fires = [] if fault == "none" else [int(fault.split(":")[1])]
        assert found == codes, f"exit codes {found}, expected {codes}\n{started.errors}"
        assert [rank for rank, fired in enumerate(started.fired) if fired] == fires, f"fired: {started.fired}"
        return started

    def goes_on(self, run: Path, ranks: int = 1, **settings: object) -> None:
        self.start(run, "none", [0] * ranks, ranks, **settings)
        same_run(self.undisturbed, run, STEPS)


def told(started: Started) -> str:
    """The line for the user."""
    lines = [line for rank in started.ranks for line in rank.told]
    assert lines, started.errors
    return lines[0].removeprefix("handgrad: ")


def stopped(stage: Stage) -> str:
    run = stage.new_run()
    started = stage.start(run, "signal:0:5", [75])
    assert saved_steps(run) == [4, 6]
    stage.goes_on(run)
    return told(started)


def resumed_twice(stage: Stage) -> str:
    run = stage.new_run()
    stage.start(run, "signal:0:2", [75])
    stage.start(run, "kill-step:0:6", [-9])
    assert saved_steps(run) == [3, 4]
    stage.goes_on(run)
    return "stopped after step 3, killed in step 7, the same bits"


def not_finite(stage: Stage) -> str:
    run = stage.new_run()
    started = stage.start(run, "poison:0:5", [76], max_skips=3)
    (first, *_) = (record["text"] for record in records(run, ("event",)) if "made no update" in record["text"])
    assert "loss is nan; non-finite gradients at" in first and saved_steps(run) == [4]
    weights = safetensors.torch.load_file(checkpoint.folder_of(run / "checkpoints", 4) / checkpoint.WEIGHTS_FILE)
    assert all(tensor.isfinite().all() for tensor in weights.values())
    stage.goes_on(run, max_skips=3)
    return told(started)


def cache(stage: Stage) -> str:
    """Files of the compiled kernels cut to half: the lists of files, the descriptions, the code; and no folder for them."""
    said, environment = [], stage.launcher.environment
    usual, own = dict(environment), stage.folder / "kernels"
    try:
        for pattern in ("__grp__*.json", "[!_]*.json", "*.cubin"):
            environment["TRITON_CACHE_DIR"] = str(own)
            shutil.rmtree(own, ignore_errors=True)
            stage.goes_on(stage.new_run())
            files = list(own.rglob(pattern))
            assert files, "no kernel was compiled"
            for path in files:
                path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
            said.append(f"{len(files)} {pattern} cut to half: {ends_well(stage)}")
        environment["TRITON_CACHE_DIR"] = NOWHERE
        said.append(f"no folder for them: {ends_well(stage)}")
    finally:
        environment.clear()
        environment.update(usual)
    return "; ".join(said)


def ends_well(stage: Stage) -> str:
    """A start that trains with the same bits, or ends with one line."""
    run = stage.new_run()
    started = stage.launcher.start(1, stage.command(run))
    (code,) = started.wait(LIMIT_SECONDS)
    if code == 0:
        same_run(stage.undisturbed, run, STEPS)
        return "the same bits"
    assert started.ranks[0].told and "Traceback" not in started.errors, f"exit code {code}: {started.errors[-2000:]}"
    (line,) = started.ranks[0].told
    return f"exit code {code}: {line}"


def assert_fails(stage: Stage) -> str:
    run = stage.new_run()
    started = stage.launcher.start(1, stage.command(run), "assert:0:5")
    (code,) = started.wait(LIMIT_SECONDS)
    assert code not in (0, None) and started.fired == [True] and "assert" in started.errors, started.errors
    assert saved_steps(run) == [4], "saved after the assert"
    stage.goes_on(run)
    return f"exit code {code}, step 4 stays the newest checkpoint"


def twice_the_same(stage: Stage) -> str:
    stage.goes_on(stage.new_run())
    return "the same bits"


def killed_rank(stage: Stage) -> str:
    run = stage.new_run()
    started = stage.start(run, "kill:1:5", [75, -9], 2)
    assert saved_steps(run) == [4]
    stage.goes_on(run, 2)
    return told(started)


def frozen_rank(stage: Stage) -> str:
    run = stage.new_run()
    started = stage.start(run, "freeze:1:5", [75, None], 2)
    assert "lost rank 1: no heartbeat for" in told(started) and (run / "stacks" / "rank_0000.txt").exists()
    stage.goes_on(run, 2)
    return told(started)


def skipped_collective(stage: Stage) -> str:
    run = stage.new_run()
    started = stage.start(run, "skip:1:5", [76, 76], 2, check_ranks_every=1)
    assert "rank 0 at step 5" in told(started) and "rank 1 at step 5" in told(started) and saved_steps(run) == [4]
    stage.goes_on(run, 2, check_ranks_every=1)
    return told(started)


def slow_rank(stage: Stage) -> str:
    run = stage.new_run()
    settings = {"log_every": 4, "steps": 32}  # a rank is named after three windows of eight steps
    stage.start(run, "sleep:1:0", [0, 0], 2, **settings)
    named = [record["text"] for record in records(run, ("event",)) if "is slow" in record["text"]]
    assert len(named) == 1 and "rank 1 is slow" in named[0], named
    control = stage.new_run()
    stage.start(control, "none", [0, 0], 2, **settings)
    wrong = [record["text"] for record in records(control, ("event",)) if "is slow" in record["text"]]
    assert not wrong or stage.device == "cpu", f"named without a fault: {wrong}"
    return named[0]


def flipped_weight(stage: Stage) -> str:
    run = stage.new_run()
    settings = {"zero": 1, "check_ranks_every": 1, "save_every": 3, "async_save": False}  # step 7 waits for no save
    started = stage.start(run, "flip:1:5", [76, 76], 2, **settings)
    # Weights that every rank holds whole are compared when they are saved; others in the step that uses them.
    late, early = "in step 7 the ranks used different weights", "step 6 is not saved: the ranks hold different weights"
    found = saved_steps(run), told(started)
    assert (found[0] == [3] and early in found[1]) or (found[0] == [3, 6] and late in found[1]), found
    stage.goes_on(run, 2, **settings)
    return told(started)


ONE_GPU: dict[int, Callable[[Stage], str]] = {
    15: stopped,
    17: resumed_twice,
    36: not_finite,
    43: cache,
    44: assert_fails,
    45: twice_the_same,
}
TWO_GPUS = {29: killed_rank, 30: frozen_rank, 31: skipped_collective, 33: slow_rank, 34: flipped_weight}
NEEDS_KERNELS = (43, 44)


def play(stage: Stage, rows: dict[int, Callable[[Stage], str]]) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for number, act in rows.items():
        start = time.perf_counter()
        try:
            outcome, said = "passed", act(stage)
        except Exception as error:  # whatever ends a row is its outcome: it fails, and the rows after it are played
            traceback.print_exception(error)
            outcome, said = "failed", " ".join(str(error).split())[:500]
        seconds = round(time.perf_counter() - start, 1)
        said = said.replace(str(stage.folder), "~")
        found[str(number)] = {"outcome": outcome, "seconds": seconds, "said": said}
        print(f"row {number:>2} {outcome} in {seconds:.1f} s: {said}", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", help="the record")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--row", type=int, action="append", help="only this row")
    given = parser.parse_args()
    folder = Path(tempfile.mkdtemp())
    launcher = Launcher(folder)  # before this process touches the device
    begun = time.perf_counter()
    try:
        prepare(PrepareOptions(str(write_text(folder / "text.txt")), folder / "bytes", tokenizer="bytes", workers=1))
        stage = Stage(launcher, folder / "bytes", folder, given.device, folder / "undisturbed" / "run")
        stage.start(stage.undisturbed, "none", [0])
        gpus = torch.cuda.device_count() if given.device == "cuda" else 2
        rows = {**ONE_GPU, **(TWO_GPUS if gpus > 1 else {})}
        chosen = {n: act for n, act in rows.items() if not given.row or n in given.row}
        if given.device == "cpu":
            chosen = {n: act for n, act in chosen.items() if n not in NEEDS_KERNELS}
        found = play(stage, chosen)
    finally:
        launcher.close()
        shutil.rmtree(folder, ignore_errors=True)
    seconds = round(time.perf_counter() - begun, 1)
    write_record(given.out, torch.device(given.device), gpus=gpus, seconds=seconds, rows=found)
    sys.exit(any(row["outcome"] != "passed" for row in found.values()))


if __name__ == "__main__":
    main()
