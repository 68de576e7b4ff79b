"""Several GPUs of one machine against the same number alone: handgrad, the cost of its order, torch's data parallelism.

    torchrun --standalone --nproc-per-node=4 -m benchmarks.scaling --model d12 --micro-batch 64 --out scaling.json

All contenders make the same optimizer steps of `--tokens-per-step` tokens:

    alone           every GPU makes whole steps for itself, all at once: the reference for linear scaling
    together        handgrad on all GPUs; together-8: with as many thread blocks for collectives beside kernels
    no-exchange     the same, but every collective returns at once, which leaves the kernels (its numbers mean nothing)
    reduce-scatter  the same, with NCCL's own sum instead of the exchange and the fixed tree: the cost of the order
    ddp, fsdp       the torch.compile twin under DistributedDataParallel and FSDP2
"""

import argparse
import dataclasses
import datetime
import math
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.contenders import Settings, Steps, Tokens, TwinSteps, tokens_of
from benchmarks.distributed_twin import DdpTrainer, FsdpTrainer
from benchmarks.record import free_memory, write_record
from handgrad.joins.parallel.gradient_sync import GradientSync
from handgrad.joins.parallel.launchers import find_rank_info
from handgrad.joins.parallel.ranks import Ranks
from handgrad.joins.parallel.rendezvous import Timeouts, join, new_overlapped_group
from handgrad.machine import devices
from handgrad.machine.power import Sampler
from handgrad.run.assemble import assemble
from handgrad.run.resolve import resolve, with_tuned_gemms
from handgrad.settings import presets
from handgrad.settings.config import RunConfig, check
from handgrad.tools.recorder import read_trace

CONTENDERS = ("alone", "together", "no-exchange", "reduce-scatter", "ddp", "fsdp")
WARM_UP_STEPS = 3
WARM_UP_SECONDS = 4.0  # clocks fall within a second of load


class Done:
    """A collective with nothing to do."""

    def wait(self) -> None:
        pass


class SilentRanks(Ranks):
    """Ranks that send nothing."""

    def all_to_all(self, *exchange: Any, overlapped: bool = False) -> Any:
        return Done()

    def all_gather(self, *parts: Any, overlapped: bool = False) -> Any:
        return Done()


def reduce_scatter(sync: GradientSync) -> Callable[[str], None]:
    """`sync.send_gradients`, but NCCL adds, in whatever order it likes."""

    def send(name: str) -> None:
        bucket, ranks = sync.by_name[name], sync.ranks
        with sync.on_side_stream():
            group = ranks.overlapped_group if sync.overlaps_kernels(bucket) else None
            owned = sync.gradients[bucket.owned(ranks.rank, ranks.size)]
            dist.reduce_scatter_tensor(owned, sync.gradients[bucket.flat], group=group)

    return send


class HandgradSteps(Steps):
    """handgrad's steps on these ranks."""

    def __init__(self, config: RunConfig, tokens: Tokens, device: torch.device, ranks: Ranks, *, sums_by_nccl: bool):
        silent = isinstance(ranks, SilentRanks)
        checks = 0 if silent or sums_by_nccl else config.check_ranks_every  # ranks differ
        config = dataclasses.replace(config, lanes=ranks.size, check_ranks_every=checks)
        config = with_tuned_gemms(check(config), device)
        place = {"rank": ranks.rank, "ranks": ranks.size, "device": device}
        training = assemble(resolve(config, tokens.vocab_size, **place), tokens.source, ranks)
        super().__init__(training.stepper)
        self.design = training.design
        if sums_by_nccl and training.sync is not None:
            training.sync.send_gradients = reduce_scatter(training.sync)  # type: ignore[method-assign]


def make(name: str, config: RunConfig, tokens: Tokens, device: torch.device, ranks: Ranks) -> HandgradSteps | TwinSteps:
    if name in ("ddp", "fsdp"):
        trainer = (DdpTrainer if name == "ddp" else FsdpTrainer)(config, config.shape(tokens.vocab_size), device)
        return TwinSteps(trainer, tokens.source, ranks.rank, ranks.size)
    group = ranks
    if name == "alone":
        group = Ranks()
    elif name == "no-exchange":
        group = SilentRanks(ranks.rank, ranks.size)
    elif name.startswith("together-"):
        limit = datetime.timedelta(seconds=600)
        group = dataclasses.replace(
            ranks, overlapped_group=new_overlapped_group(limit, int(name.removeprefix("together-")))
        )
    return HandgradSteps(config, tokens, device, group, sums_by_nccl=name == "reduce-scatter")


def timed(made: HandgradSteps | TwinSteps, steps: int, ranks: Ranks, device: torch.device) -> float:
    """Seconds of `steps` steps, from the common start of all ranks to the end of the last."""
    devices.synchronize(device)
    ranks.barrier("a turn begins")
    start = time.perf_counter()
    made.turn(lambda launched: launched < steps)
    devices.synchronize(device)
    ranks.barrier("a turn ends")
    return time.perf_counter() - start


def turn(name: str, made: HandgradSteps | TwinSteps, config: RunConfig, seconds: float, ranks: Ranks, device) -> dict:
    """One contender's turn: warm-up, then `seconds` of steps; a row of figures, the same on every rank."""
    step_seconds = timed(made, WARM_UP_STEPS, ranks, device) / WARM_UP_STEPS
    step_seconds = ranks.from_rank_0(lambda: step_seconds, "a turn's length")
    warming = max(1, math.ceil(WARM_UP_SECONDS / step_seconds))  # slow ones: they compile, and record graphs
    step_seconds = timed(made, warming, ranks, device) / warming
    steps = ranks.from_rank_0(lambda: max(2, math.ceil(seconds / step_seconds)), "a turn's length")
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    with Sampler(device) as sampler:
        own = timed(made, steps, Ranks() if name == "alone" else ranks, device)
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
    watts = (sampler.summary or {}).get("watts") or {}
    clock = (sampler.summary or {}).get("sm_megahertz") or {}
    rows = ranks.all_gather_numbers([own, peak, watts.get("mean") or 0.0, clock.get("mean") or 0.0], "figures")
    rates = [steps * config.tokens_per_step / row[0] for row in rows]
    return {
        "tokens_per_second": sum(rates) if name == "alone" else rates[0],
        "tokens_per_second_by_gpu": rates if name == "alone" else None,
        "milliseconds_per_step": 1e3 * rows[0][0] / steps,
        "steps": steps,
        "planned_gib": made.design.plan.total_bytes / 2**30 if isinstance(made, HandgradSteps) else None,
        "allocated_gib": max(row[1] for row in rows) / 2**30,
        "mean_watts": sum(row[2] for row in rows) / len(rows),
        "mean_sm_megahertz": sum(row[3] for row in rows) / len(rows),
    }


def exposed(made: HandgradSteps, steps: int, path: Path | None) -> dict[str, float]:
    """From a trace of `steps` steps: the time of collectives, and of collectives without another kernel beside them, per
    step."""
    activity = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[activity.CUDA]) as profiler:
        made.turn(lambda launched: launched < steps)
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        target = path or Path(folder) / "trace.json.gz"
        profiler.export_chrome_trace(str(target))
        kernels = [e for e in read_trace(target) if e["cat"] in ("kernel", "gpu_memcpy", "gpu_memset")]
    talking = merged([(e["ts"], e["ts"] + e["dur"]) for e in kernels if "nccl" in e["name"].lower()])
    working = merged([(e["ts"], e["ts"] + e["dur"]) for e in kernels if "nccl" not in e["name"].lower()])
    both = sum(overlap(a, working) for a in talking)
    total = sum(b - a for a, b in talking)
    return {"collectives_ms_per_step": total / 1e3 / steps, "exposed_ms_per_step": (total - both) / 1e3 / steps}


def merged(intervals: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """The union of the intervals, without overlaps, in order."""
    found: list[tuple[float, float]] = []
    for start, end in sorted(intervals):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((start, end))
    return found


def overlap(one: tuple[float, float], others: Sequence[tuple[float, float]]) -> float:
    return sum(max(0.0, min(one[1], end) - max(one[0], start)) for start, end in others)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="d12")
    parser.add_argument("--micro-batch", type=int, default=64)
    parser.add_argument("--sequence-length", type=int, default=1024)
    parser.add_argument("--tokens-per-step", type=int, default=524288)
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--zero", type=int, default=1)
    parser.add_argument("--data", default="")
    parser.add_argument("--vocab-size", type=int, default=50257)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--turns", default=",".join(CONTENDERS), help="contenders in their order, possibly several times")
    parser.add_argument("--keep", action="store_true", help="keep all in memory instead of making each anew for its turn")
    parser.add_argument("--seconds", type=float, default=10.0, help="of a turn")
    parser.add_argument("--trace", default="", help="file for a trace of `together` on rank 0")
    parser.add_argument("--out", default="")
    asked = parser.parse_args()
    info = find_rank_info(os.environ)
    device = devices.resolve_device(asked.device, info.local_rank)
    settings = Settings(
        **{name: getattr(asked, name) for name in ("model", "micro_batch", "sequence_length", "precision", "data")},
        vocab_size=asked.vocab_size,
        device=device.type,
    )
    config = dataclasses.replace(settings.config(), tokens_per_step=asked.tokens_per_step, zero=asked.zero)
    config = check(dataclasses.replace(config, **presets.model(asked.model)))
    seconds = config.join_seconds, config.silence_seconds, config.stall_seconds
    ranks = join(info, device, Timeouts(*seconds, Path(asked.out or ".").parent / "stacks"))
    tokens, rows, held = tokens_of(settings), [], {}
    for name in asked.turns.split(","):
        begun = time.perf_counter()
        made = held.pop(name, None) or make(name, config, tokens, device, ranks)
        row: dict[str, Any] = {"contender": name, **turn(name, made, config, asked.seconds, ranks, device)}
        first = name == "together" and not any("exposed_ms_per_step" in r for r in rows)
        if first and device.type == "cuda" and isinstance(made, HandgradSteps):
            row |= exposed(made, 2, Path(asked.trace) if asked.trace and ranks.is_rank_0 else None)
        rows.append(row)
        if ranks.is_rank_0:
            shown = ", ".join(f"{key} {value:.6g}" for key, value in row.items() if isinstance(value, float | int))
            print(f"{name:<15} {shown} ({time.perf_counter() - begun:.0f} s)", flush=True)
        if asked.keep:
            held[name] = made
        del made
        free_memory(device)
    if ranks.is_rank_0:
        linear = max((row["tokens_per_second"] for row in rows if row["contender"] == "alone"), default=math.nan)
        for name in dict.fromkeys(row["contender"] for row in rows):
            mine = [row["tokens_per_second"] for row in rows if row["contender"] == name]
            print(f"{name:<15} {sum(mine) / len(mine):>12.0f} tok/s, {sum(mine) / len(mine) / linear:.4f} of linear")
        if asked.out:
            method = __doc__.strip().splitlines()[0]
            settings = {name: value for name, value in vars(asked).items() if name not in ("out", "trace")}
            write_record(asked.out, device, method=method, settings=settings, gpus=ranks.size, rows=rows)
    ranks.close()


if __name__ == "__main__":
    main()
