"""Saves behind training, beside saves that training waits for: how long it stands still, how much slower it is meanwhile.

    python -m benchmarks.saves d12                                             one GPU, or a CPU
    python -m benchmarks.saves d48 --ranks 4                                   as many GPUs; under torchrun without --ranks
    python -m benchmarks.saves tiny --device cpu --channels 512 --ranks 2      processes of a CPU

A run of the preset on random tokens makes some steps without a save. Then the state is saved twice: once while training
stands still, once behind it, with steps until the second checkpoint stands, and some more without a save. The tensors of
the two checkpoints must be equal, byte for byte.
"""

import argparse
import dataclasses
import math
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from benchmarks.record import write_record
from benchmarks.run_record import lines_of
from handgrad.data.llmc_header import TOKENS, make_header
from handgrad.joins.parallel.launchers import find_rank_info
from handgrad.joins.parallel.local import run_ranks
from handgrad.memory.rows import count_parameters
from handgrad.run.loop import Run
from handgrad.run.open import open_run
from handgrad.run.saves import Saves
from handgrad.settings import presets
from handgrad.settings.config import RunConfig, check
from handgrad.storage import checkpoint
from handgrad.storage.checkpoint import Checkpoint, open_tensors
from handgrad.storage.manifest import read_manifest

EVERY_SECONDS = 120.0  # between saves, for the loss of throughput
WARM_UP_STEPS = 3
VOCABULARY = 50257
NEVER = "save_every eval_every sample_every sample_tokens check_ranks_every gpu_every keep_checkpoints"  # all 0


def write_tokens(folder: Path, tokens: int, rank: int) -> None:
    """A shard of random tokens; every rank writes the same one."""
    folder.mkdir(parents=True, exist_ok=True)
    content = np.random.default_rng(0).integers(VOCABULARY, size=tokens, dtype=np.uint16)
    mine = folder / f"{rank}.part"
    mine.write_bytes(make_header({0: TOKENS, 1: 1, 2: tokens}) + content.tobytes())
    mine.replace(folder / "random_train_000000.bin")


def asked_preset(asked: argparse.Namespace, folder: Path) -> RunConfig:
    """The preset with the settings that were asked for, its data and its run in a folder."""
    names = ("device", "micro_batch", "channels", "precision")
    given = {name: value for name in names if (value := getattr(asked, name, None))}
    return dataclasses.replace(presets.preset(asked.preset), data=str(folder / "data"), out=str(folder / "run"), **given)


def config_of(asked: argparse.Namespace, folder: Path, ranks: int) -> RunConfig:
    """A run with a step of one micro-batch a rank unless more are asked for, and nothing due."""
    config = asked_preset(asked, folder)
    step = asked.tokens_per_step or config.micro_batch * config.sequence_length * ranks
    return check(dataclasses.replace(config, tokens_per_step=step, steps=10**6, **dict.fromkeys(NEVER.split(), 0)))


def timed(run: Run, steps: int) -> list[float]:
    """The time at the end of each of so many further steps, by `time.perf_counter`, after that of their beginning."""
    times = [time.perf_counter()]
    run.advance(run.completed + steps, lambda step, result: times.append(time.perf_counter()))
    return times


def waiting_saves(run: Run, folder: Path) -> Saves:
    """Saves of the same run in another folder, during which training stands still."""
    elsewhere: Any = SimpleNamespace(path=run.folder.path, checkpoints=folder, resumed=None)
    files = run.saves.extra_files
    return Saves(run.config, elsewhere, run.ranks, run.log, run.saves.check, None, files, lambda folder, manifest: None)


def measure(run: Run, steps: int, still: Path) -> dict[str, Any]:
    """The figures of a run that has begun; rank 0's are whole."""
    timed(run, WARM_UP_STEPS)
    before = timed(run, steps)
    saves, begun = waiting_saves(run, still), time.perf_counter()
    saves.save(run.training, run.completed, 0.0, run.manifest())
    seconds_still = time.perf_counter() - begun
    step, step_seconds = run.completed, (before[-1] - before[0]) / steps
    many = run.ranks.from_rank_0(lambda: steps + math.ceil(1.1 * seconds_still / step_seconds), "the number of steps")
    begun = time.perf_counter()
    run.save()
    pause = time.perf_counter() - begun
    during = timed(run, many)
    after = timed(run, steps)
    seconds = [line["seconds"] for line in lines_of(run.folder.path)["save"] if line["step"] == step][-1]
    whole = max([at for at in during if at - begun < seconds], during[:2], key=len)
    tokens = run.config.tokens_per_step
    alone = 2 * steps * tokens / (before[-1] - before[0] + after[-1] - after[0])
    beside = (len(whole) - 1) * tokens / (whole[-1] - whole[0])
    slower = 1 - beside / alone
    return {
        "parameters": count_parameters(run.design.parameters),
        "copy_bytes_per_rank": run.saves.copy.size_bytes if run.saves.copy else 0,
        "tokens_per_second": alone,
        "tokens_per_second_while_written": beside,
        "steps_while_written": len(whole) - 1,
        "pause_ms": 1e3 * pause,
        "pause_ms_waiting": 1e3 * seconds_still,
        "seconds_until_committed": seconds,
        "loss_at_every_2_minutes": (pause + seconds * slower) / EVERY_SECONDS,
        "loss_at_every_2_minutes_waiting": seconds_still / (EVERY_SECONDS + seconds_still),
        "step": step,
    }


def check_equal(one: Path, other: Path) -> int:
    """Raises `AssertionError` unless two checkpoints hold the same tensors; returns how many."""
    places = [Checkpoint(folder, read_manifest(folder)).file_of_tensor for folder in (one, other)]
    assert places[0].keys() == places[1].keys(), f"{one} and {other} hold other tensors"
    for name, path in places[0].items():
        with open_tensors(path) as first, open_tensors(places[1][name]) as second:
            pair = first.get_tensor(name), second.get_tensor(name)
        same = pair[0].dtype == pair[1].dtype and torch.equal(*(tensor.view(torch.uint8) for tensor in pair))
        assert same, f"{name} of {one} and of {other} differ"
    return len(places[0])


def arguments(description: str | None, preset: str, step: str) -> argparse.ArgumentParser:
    """The arguments about a run. `step`: its tokens by default, in words."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("preset", nargs="?", default=preset, help=f"{', '.join(presets.PRESETS)} (default: {preset})")
    parser.add_argument("--device", default="")
    parser.add_argument("--ranks", type=int, default=1, help="processes of the run")
    parser.add_argument("--micro-batch", type=int, default=0)
    parser.add_argument("--precision", default="")
    parser.add_argument("--tokens-per-step", type=int, default=0, help=f"(default: {step})")
    parser.add_argument("--folder", default="", help="with room for two checkpoints (default: the system's temporary one)")
    parser.add_argument("--out", default="", help="file for the figures")
    return parser


def parse() -> argparse.Namespace:
    parser = arguments(__doc__, "tiny", "one micro-batch a rank")
    parser.add_argument("--channels", type=int, default=0)
    parser.add_argument("--steps", type=int, default=10, help="without a save, before and after")
    return parser.parse_args()


def publish(asked: argparse.Namespace, description: str | None, device: torch.device, figures: dict[str, Any], **more: Any):
    """Prints the figures, and writes them to --out."""
    for name, value in figures.items():
        if not isinstance(value, dict):
            print(f"{name:<32} {value:>16,.6g}" if isinstance(value, float) else f"{name:<32} {value:>16,}")
    if asked.out:
        settings = {key: value for key, value in vars(asked).items() if key not in ("out", "folder", "keep")}
        method = (description or "").strip().splitlines()[0]
        write_record(asked.out, device, method=method, settings=settings, **more, figures=figures)


def main() -> int:
    asked, info = parse(), find_rank_info(os.environ)
    common = os.getppid() if info.size > 1 else os.getpid()  # ranks have one parent, their launcher
    folder = Path(asked.folder or tempfile.gettempdir()) / f"handgrad-saves-{common}"
    if asked.ranks > 1 and info.size == 1:
        return run_ranks([sys.executable, "-m", "benchmarks.saves", *sys.argv[1:]], asked.ranks, os.environ, 60)
    try:
        config = config_of(asked, folder, info.size)
        write_tokens(Path(config.data), 2 * config.tokens_per_step + 1, info.rank)
        with open_run(config, console="nothing") as run:
            run.begin()
            lines = [line for line in run.save_lines if run.ranks.is_rank_0]
            print(*lines, sep="\n", end="\n" if lines else "", flush=True)
            figures = measure(run, asked.steps, folder / "still")
            step, device, ranks = figures.pop("step"), run.design.device, run.ranks
            if ranks.is_rank_0:
                names = [checkpoint.folder_of(parent, step) for parent in (run.folder.checkpoints, folder / "still")]
                figures["equal_tensors"] = check_equal(*names)
                publish(asked, __doc__, device, figures, ranks=ranks.size)
    finally:
        if not info.rank:
            shutil.rmtree(folder, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
