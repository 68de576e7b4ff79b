"""Whole steps of a Llama over rows of 1024 to 32,768 tokens, at every recompute level: tokens per second
and memory. handgrad alone; `benchmarks.llama_speed --sequence-length` has the peers.

A micro-batch is one row, an optimizer step one micro-batch, unless the options say otherwise. Weights are random. Losses
of a length must be equal at all levels, bit for bit, else the command ends with 1.

    python -m benchmarks.llama_context --out benchmarks/results/h200-llama-context.json
"""

import argparse
import dataclasses
import sys
import time
from typing import Any

import torch

from benchmarks.contenders import HandgradRun, Settings, tokens_of
from benchmarks.gpu_step import libraries
from benchmarks.llama_twin import SHAPES
from benchmarks.record import free_memory, keep_commit, rounded, run_main, write_record
from handgrad.errors import UsageError
from handgrad.machine import devices

WARM_UP_STEPS = 4  # one eager, one captured, two replayed; their losses are compared
GIB = 1 << 30


def measure(settings: Settings, seconds: float, peak: float | None) -> dict[str, Any]:
    """The figures of one length at one level, or the reason why there are none."""
    row: dict[str, Any] = {"length": settings.sequence_length, "recompute": settings.recompute}
    config, tokens, cuda = settings.config(), tokens_of(settings), settings.device == "cuda"
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    try:
        run = HandgradRun(config, tokens)
        row["plan_gib"] = run.state.design.plan.total_bytes / GIB
        row["losses"] = run.turn(lambda launched: launched < WARM_UP_STEPS)
        begun, first = time.perf_counter(), run.completed
        run.turn(lambda launched: time.perf_counter() - begun < seconds)
    except torch.OutOfMemoryError:
        return {**row, "failed": "out of memory"}
    elapsed = time.perf_counter() - begun
    rate = (run.completed - first) * config.tokens_per_step / elapsed
    shape = config.shape(tokens.vocab_size)
    flops = shape.flops_per_token
    return {
        **row,
        "tokens_per_second": rate,
        "milliseconds_per_step": 1e3 * config.tokens_per_step / rate,
        "flops_per_token": flops,
        "mfu": rate * flops / peak if peak else None,
        "allocated_gib": torch.cuda.max_memory_allocated() / GIB if cuda else None,
        "steps": run.completed - first,
    }


def line(row: dict[str, Any]) -> str:
    start = f"{row['length']:>7}{row['recompute']:>10}"
    if "failed" in row:
        return f"{start}  {row['failed']}"
    mfu, allocated = row["mfu"], row["allocated_gib"]
    return (
        f"{start}{row['tokens_per_second']:>10.0f}{'-' if mfu is None else format(mfu, '.1%'):>8}"
        f"{row['milliseconds_per_step']:>10.1f}{row['plan_gib']:>10.2f}"
        f"{'-' if allocated is None else format(allocated, '.2f'):>10}{row['losses'][-1]:>10.5f}"
    )


def unequal(rows: list[dict[str, Any]]) -> list[int]:
    """The lengths whose losses differ between levels."""
    found: dict[int, set[tuple[float, ...]]] = {}
    for row in rows:
        if "losses" in row:
            found.setdefault(row["length"], set()).add(tuple(row["losses"]))
    return [length for length, losses in found.items() if len(losses) > 1]


def parse(given: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="Llama-3.2-1B", help=", ".join(SHAPES))
    parser.add_argument("--lengths", default="1024,4096,16384,32768")
    parser.add_argument("--levels", default="0,1,2", help="of recompute")
    parser.add_argument("--micro-batch", type=int, default=1)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--seconds", type=float, default=3.0, help="of each row, after its first steps")
    parser.add_argument("--out", default="", help="file for the record")
    return parser.parse_args(given)


def main(given: list[str] | None = None) -> int:
    options = parse(given)
    if options.shape not in SHAPES:
        raise UsageError(f"unknown shape {options.shape!r}; known: {', '.join(SHAPES)}")
    keep_commit()
    device = devices.resolve_device(options.device)
    peak, rows = devices.peak_flops(device), list[dict[str, Any]]()
    common = Settings(
        model=options.shape,
        micro_batch=options.micro_batch,
        precision=options.precision,
        device=device.type,
        vocab_size=SHAPES[options.shape][0],
    )
    print(f"{options.shape}, {options.precision}, {devices.describe(device)}; memory in GiB\n")
    print(f"{'T':>7}{'recompute':>10}{'tok/s':>10}{'MFU':>8}{'ms/step':>10}{'plan':>10}{'allocated':>10}{'loss':>10}")
    for length in map(int, options.lengths.split(",")):
        for level in map(int, options.levels.split(",")):
            settings = dataclasses.replace(common, sequence_length=length, recompute=level)
            rows.append(measure(settings, options.seconds, peak))
            print(line(rows[-1]), flush=True)
            free_memory(device)
    if options.out:
        described = {key: value for key, value in vars(options).items() if key != "out"}
        made_up = tokens_of(common).words
        counted = {"tokens": made_up, "libraries": libraries(), "peak_flop_per_second": peak}
        write_record(options.out, device, settings=described, **counted, figures=rounded(rows))
    for length in (wrong := unequal(rows)):
        print(f"expected the same losses at every recompute level, found others at {length} tokens", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    run_main(main)
