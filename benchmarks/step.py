"""One optimizer step of a whole GPT-2, handgrad beside its PyTorch twins, alternating.

Every contender runs in a process of its own, so its peak memory is its own. The contenders of a precision make single steps
by turns, so other load on the machine affects all of them alike. All start from the same weights and batch.

    python -m benchmarks.step        (or: handgrad bench step)
"""

import dataclasses
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from benchmarks.cpu_twin import CpuSwitches, twin_steps
from benchmarks.record import write_record
from benchmarks.same_batch import assemble_on_one_batch
from benchmarks.turns import Peer, alternate, answers, excuses, say
from handgrad.machine import devices
from handgrad.run.resolve import resolve
from handgrad.settings import presets
from handgrad.settings.config import RunConfig

VOCABULARY = 50257
CPU = torch.device("cpu")
WARM_UP = 3  # turns that do not count; a compiled twin compiles in the first


@dataclass(frozen=True)
class Contender:
    """handgrad, or a twin by these switches."""

    precision: str
    twin: CpuSwitches | None = None

    @property
    def environment(self) -> dict[str, str]:
        return {} if self.twin is None else self.twin.environment


AS_IT_COMES = CpuSwitches(fused=False)
ALL = CpuSwitches(onednn=True, kept_memory=True, compiled=True)
CONTENDERS = {
    "handgrad fp32": Contender("fp32"),
    "torch eager fp32, AdamW as it comes": Contender("fp32", AS_IT_COMES),
    "torch eager fp32, fused AdamW": Contender("fp32", CpuSwitches()),
    "torch eager fp32, fused AdamW, oneDNN": Contender("fp32", CpuSwitches(onednn=True)),
    "torch eager fp32, fused AdamW, oneDNN, kept memory": Contender("fp32", dataclasses.replace(ALL, compiled=False)),
    "torch compiled fp32, fused AdamW, kept memory": Contender("fp32", dataclasses.replace(ALL, onednn=False)),
    "torch compiled fp32, fused AdamW, oneDNN, kept memory": Contender("fp32", ALL),
    "handgrad bf16": Contender("bf16"),
    "torch eager bf16 autocast, AdamW as it comes": Contender("bf16", AS_IT_COMES),
    "torch eager bf16 autocast, fused AdamW": Contender("bf16", CpuSwitches()),
    "torch eager bf16 autocast, fused AdamW, kept memory": Contender("bf16", CpuSwitches(kept_memory=True)),
    "torch compiled bf16 autocast, fused AdamW, kept memory": Contender(
        "bf16", CpuSwitches(kept_memory=True, compiled=True)
    ),
}


def config_of(model: str, micro_batch: int, sequence_length: int, precision: str) -> RunConfig:
    return dataclasses.replace(
        RunConfig(**presets.model(model)),
        micro_batch=micro_batch,
        sequence_length=sequence_length,
        tokens_per_step=micro_batch * sequence_length,
        precision=precision,
        learning_rate=1e-4,
    )


def step_of(contender: Contender, config: RunConfig) -> Callable[[int], float]:
    """Returns a function that makes step n and returns its loss."""
    if contender.twin is None:
        training = assemble_on_one_batch(resolve(config, VOCABULARY, device=CPU), VOCABULARY)
        return lambda step: training.stepper.step(step).loss
    generator = torch.Generator().manual_seed(0)
    size = (config.micro_batch, config.sequence_length)
    tokens, targets = (torch.randint(VOCABULARY, size, generator=generator) for _ in range(2))  # handgrad's
    return twin_steps(config, VOCABULARY, contender.twin, (tokens, targets))


def contend(name: str, model: str, micro_batch: int, sequence_length: int) -> None:
    """A contender's process: answers each line on stdin with one line of JSON."""
    contender, pipe = CONTENDERS[name], answers()
    with excuses(pipe):
        step_function = step_of(contender, config_of(model, micro_batch, sequence_length, contender.precision))
        for step, _ in enumerate(sys.stdin):
            start = time.perf_counter()
            loss = step_function(step)
            seconds = time.perf_counter() - start
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
            say(pipe, {"seconds": seconds, "loss": loss, "peak_bytes": peak})


def command(name: str, setting: list[str]) -> list[str]:
    """The command line of a contender's process."""
    return [sys.executable, "-m", "benchmarks.step", name, *setting]


def take_turns(names: list[str], setting: list[str], rounds: int) -> dict[str, dict[str, Any]]:
    """Alternates between these contenders; by name their `turns`, warm-up and all, or the reason why one `failed`."""
    peers = {name: Peer(name, command(name, setting), CONTENDERS[name].environment) for name in names}
    turns, failed = alternate(peers, WARM_UP + rounds)
    for peer in peers.values():
        peer.close()
    return {name: {"failed": failed[name]} if name in failed else {"turns": turns[name]} for name in names}


def figures_of(row: dict[str, Any], precision: str, tokens: int, flops_per_token: float) -> dict[str, Any]:
    """A contender's figures, from its turns."""
    if "failed" in row:
        return {"precision": precision, "failed": row["failed"]}
    counted = [turn["seconds"] for turn in row["turns"][WARM_UP:]]
    seconds = median(counted)
    return {
        "precision": precision,
        "seconds_per_step": round(seconds, 4),
        "fastest_seconds": round(min(counted), 4),
        "tokens_per_second": round(tokens / seconds, 1),
        "gflop_per_second": round(tokens / seconds * flops_per_token / 1e9, 1),
        "peak_gib": round(row["turns"][-1]["peak_bytes"] / 2**30, 3),
        "first_loss": round(row["turns"][0]["loss"], 6),
    }


def add_ratios(figures: dict[str, dict[str, Any]]) -> None:
    """Adds to each row how many times as fast it is as the fastest twin of its precision, and as the eager one as it
    comes."""
    for precision in {row["precision"] for row in figures.values()}:
        rows = {n: r for n, r in figures.items() if r["precision"] == precision and "failed" not in r}
        twins = {name: row for name, row in rows.items() if CONTENDERS[name].twin is not None}
        if not twins:
            continue
        best = min(twins, key=lambda name: twins[name]["seconds_per_step"])
        eager = [row for name, row in twins.items() if CONTENDERS[name].twin == AS_IT_COMES]
        for row in rows.values():
            row["times_best_twin"] = round(twins[best]["seconds_per_step"] / row["seconds_per_step"], 2)
            if eager:
                row["times_eager"] = round(eager[0]["seconds_per_step"] / row["seconds_per_step"], 2)
        twins[best]["best_twin"] = True


def table(figures: dict[str, dict[str, Any]]) -> list[str]:
    width = max(map(len, figures)) + 2
    lines = [f"{'':<{width}}{'s/step':>8}{'tok/s':>8}{'GFLOP/s':>9}{'x best':>8}{'x eager':>9}{'peak GiB':>10}"]
    for name, row in figures.items():
        if "failed" in row:
            lines.append(f"{name:<{width}}  failed: {row['failed']}")
            continue
        ratios = (f"{row[key]:.2f}" if key in row else "-" for key in ("times_best_twin", "times_eager"))
        lines.append(
            f"{name:<{width}}{row['seconds_per_step']:>8.3f}{row['tokens_per_second']:>8.0f}{row['gflop_per_second']:>9.0f}"
            f"{next(ratios):>8}{next(ratios):>9}{row['peak_gib']:>10.2f}"
        )
    return lines


def compare(model: str, micro_batch: int, sequence_length: int, rounds: int, out: str) -> None:
    """Alternates between the contenders of each precision and prints the table; writes it to `out` if that is not empty."""
    setting = [model, str(micro_batch), str(sequence_length)]
    shape = config_of(model, micro_batch, sequence_length, "fp32").shape(VOCABULARY)
    flops = shape.flops_per_token
    figures = {}
    for precision in dict.fromkeys(contender.precision for contender in CONTENDERS.values()):
        names = [name for name, contender in CONTENDERS.items() if contender.precision == precision]
        for name, row in take_turns(names, setting, rounds).items():
            figures[name] = figures_of(row, precision, micro_batch * sequence_length, flops)
    add_ratios(figures)
    machine = devices.describe(CPU)
    print(f"\n{model}, {micro_batch} samples of {sequence_length} tokens, {machine}, median of {rounds} turns")
    print("x best: times as fast as the fastest twin of its precision; x eager: as the eager one as it comes\n")
    print("\n".join(table(figures)))
    if out:
        settings = {"model": model, "micro_batch": micro_batch, "sequence_length": sequence_length, "rounds": rounds}
        write_record(out, CPU, settings=settings, figures=figures)


if __name__ == "__main__":
    contend(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
