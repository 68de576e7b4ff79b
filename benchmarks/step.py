"""One optimizer step of a whole GPT-2, handgrad beside its PyTorch twin, alternating.

Every contender runs in a process of its own, so its peak memory is its own. The contenders make single steps by turns, so
other load on the machine affects all of them alike.

    python -m benchmarks.step        (or: handgrad bench step)
"""

import dataclasses
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from statistics import median

import torch

from benchmarks.record import ROOT, write_record
from benchmarks.twin import Twin, optimizer_of, twin_step
from handgrad import devices, presets
from handgrad.config import RunConfig
from handgrad.models import architecture, parameter_table
from handgrad.run.assemble import allocate, bind
from handgrad.run.resolve import resolve

VOCABULARY = 50257
CPU = torch.device("cpu")

# name: (kind, precision, True if the twin's AdamW is the fused one)
CONTENDERS = {
    "handgrad fp32": ("handgrad", "fp32", True),
    "handgrad bf16": ("handgrad", "bf16", True),
    "torch eager fp32, AdamW as it comes": ("twin", "fp32", False),
    "torch eager fp32, fused AdamW": ("twin", "fp32", True),
    "torch eager bf16 autocast, fused AdamW": ("twin", "bf16", True),
}
PEER = "torch eager fp32, AdamW as it comes"
BEST_PEER = "torch eager fp32, fused AdamW"


class SameBatch:
    """A feed whose batch is already in place: reading data is not what is measured here."""

    def fill(self, first_sample: int) -> None:
        pass


def step_of(kind: str, config: RunConfig, fused: bool) -> Callable[[int], float]:
    """Returns a function that makes step n and returns its loss. All contenders start from the same weights and batch."""
    shape = config.shape(VOCABULARY)
    generator = torch.Generator().manual_seed(0)
    size = (config.micro_batch, config.sequence_length)
    tokens, targets = (torch.randint(VOCABULARY, size, generator=generator) for _ in range(2))
    if kind == "handgrad":
        state, scaling = allocate(resolve(config, VOCABULARY, device=CPU))
        state.activations.tokens.copy_(tokens)
        state.activations.targets.copy_(targets)
        stepper = bind(state, scaling, feed=SameBatch()).step
        return lambda step: stepper.step(step).loss
    twin = Twin(shape)
    with torch.no_grad():  # GPT-2's initial scales; the exact numbers do not affect the speed
        for row in parameter_table(shape):
            if row.init.kind == "normal":
                twin.parameter_of(row).normal_(0, row.std)
    optimizer = optimizer_of(twin, config, fused=fused)
    batch = [(tokens, targets)]
    return lambda step: twin_step(twin, optimizer, config, batch, step, autocast=config.precision == "bf16")[0]


def contend(name: str, model: str, micro_batch: int, sequence_length: int) -> None:
    """A contender's process: answers each line on stdin with one line of JSON."""
    kind, precision, fused = CONTENDERS[name]
    config = dataclasses.replace(
        RunConfig(**presets.model(model)),
        micro_batch=micro_batch,
        sequence_length=sequence_length,
        tokens_per_step=micro_batch * sequence_length,
        precision=precision,
        learning_rate=1e-4,
    )
    step_function = step_of(kind, config, fused)
    for step, _ in enumerate(sys.stdin):
        start = time.perf_counter()
        loss = step_function(step)
        seconds = time.perf_counter() - start
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        print(json.dumps({"seconds": seconds, "loss": loss, "peak_bytes": peak}), flush=True)


def compare(model: str, micro_batch: int, sequence_length: int, rounds: int, out: str) -> None:
    """Alternates between all contenders and prints the table; writes it to `out` if that is not empty."""
    setting = [model, str(micro_batch), str(sequence_length)]
    pipe = subprocess.PIPE
    processes = {
        name: subprocess.Popen(
            [sys.executable, "-m", "benchmarks.step", name, *setting], stdin=pipe, stdout=pipe, text=True, cwd=ROOT
        )
        for name in CONTENDERS
    }
    turns: dict[str, list[dict[str, float]]] = {name: [] for name in CONTENDERS}
    for turn in range(rounds + 2):  # the first two are warm-up
        for name, process in processes.items():
            assert process.stdin is not None and process.stdout is not None
            process.stdin.write("step\n")
            process.stdin.flush()
            turns[name].append(json.loads(process.stdout.readline()))
        print(f"turn {turn + 1} of {rounds + 2}", file=sys.stderr)
    for process in processes.values():
        assert process.stdin is not None
        process.stdin.close()
        process.wait()

    shape = RunConfig(**presets.model(model), sequence_length=sequence_length).shape(VOCABULARY)
    tokens = micro_batch * sequence_length
    figures = {}
    for name, measured in turns.items():
        seconds = median(t["seconds"] for t in measured[2:])
        figures[name] = {
            "seconds_per_step": round(seconds, 4),
            "fastest_seconds": round(min(t["seconds"] for t in measured[2:]), 4),
            "tokens_per_second": round(tokens / seconds, 1),
            "gflop_per_second": round(tokens / seconds * architecture(shape).flops_per_token(shape) / 1e9, 1),
            "peak_gib": round(measured[-1]["peak_bytes"] / 2**30, 3),
        }
    for row in figures.values():
        row["times_torch_eager_fp32"] = round(figures[PEER]["seconds_per_step"] / row["seconds_per_step"], 2)
        row["times_torch_fused_fp32"] = round(figures[BEST_PEER]["seconds_per_step"] / row["seconds_per_step"], 2)
    print(
        f"\n{model}, {micro_batch} samples of {sequence_length} tokens, {devices.describe(CPU)}, median of {rounds} turns\n"
    )
    print(f"{'':<40}{'s/step':>8}{'tok/s':>8}{'GFLOP/s':>9}{'x eager':>9}{'x fused':>9}{'peak GiB':>10}")
    for name, row in figures.items():
        print(
            f"{name:<40}{row['seconds_per_step']:>8.3f}{row['tokens_per_second']:>8.0f}{row['gflop_per_second']:>9.0f}"
            f"{row['times_torch_eager_fp32']:>9.2f}{row['times_torch_fused_fp32']:>9.2f}{row['peak_gib']:>10.2f}"
        )
    if out:
        settings = {"model": model, "micro_batch": micro_batch, "sequence_length": sequence_length, "rounds": rounds}
        write_record(out, CPU, settings=settings, figures=figures)


if __name__ == "__main__":
    contend(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
