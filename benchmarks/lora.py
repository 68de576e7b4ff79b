"""Adapters beside full finetuning: memory and time of a step, for the shapes of Llama models that people finetune.

The contenders of a shape, full finetuning, adapters, and adapters beside frozen weights in fp8, run in processes of their
own, each with its own peak of memory, and make steps by turns, so other load affects all alike. Weights are random: the
work is the same. `--rounds 0` prints the plans alone. `--cap` says which of them fit into so many GiB.

    python -m benchmarks.lora --device cuda --out benchmarks/results/NAME.json
    python -m benchmarks.lora --cap 8,16,24 --micro-batch 1 --recompute 2 --device cuda
    python -m benchmarks.lora --shapes tiny-llama --device cpu
"""

import argparse
import sys
from dataclasses import replace
from statistics import median
from typing import Any

import torch

from benchmarks.llama_twin import LARGE, SHAPES, sizes
from benchmarks.record import keep_commit, run_main, write_record
from benchmarks.same_batch import assemble_on_one_batch, timed_step
from benchmarks.turns import Peer, alternate, answers, excuses, memory, say
from handgrad.errors import UsageError
from handgrad.format import human_bytes
from handgrad.machine import devices
from handgrad.run.header import trained_parameters
from handgrad.run.resolve import resolve
from handgrad.settings.config import RunConfig, check
from handgrad.training.design import Design

WARM_UP = 2  # turns that do not count
CONTEXT_GIB = 0.75  # of a GPU's memory, taken by the driver's context and the libraries: outside torch's allocator
GIB = 2**30

CONTENDERS = ("full", "lora", "lora-fp8")


def config_of(shape: str, contender: str, options: argparse.Namespace) -> RunConfig:
    config = RunConfig(
        **sizes(shape),
        sequence_length=options.sequence_length,
        micro_batch=options.micro_batch,
        tokens_per_step=options.micro_batch * options.sequence_length,
        learning_rate=1e-4,
        precision="fp8" if contender == "lora-fp8" else options.precision,
        recompute=options.recompute,
        device=options.device,
    )
    return check(replace(config, lora=options.lora, init_from="random weights") if contender != "full" else config)


def design_of(shape: str, contender: str, options: argparse.Namespace) -> Design:
    return resolve(config_of(shape, contender, options), SHAPES[shape][0])


def contend(shape: str, contender: str, options: argparse.Namespace) -> None:
    """A contender's process: answers each line on stdin with a step's time and its peak of memory."""
    pipe = answers()
    with excuses(pipe):
        limit_memory(options)
        training = assemble_on_one_batch(design_of(shape, contender, options), SHAPES[shape][0])
        for number, _ in enumerate(sys.stdin):
            say(pipe, {**timed_step(training, number), **memory(training.design.device)})


def limit_memory(options: argparse.Namespace) -> None:
    """Limits torch's allocator, from which handgrad has all its memory, to --cap GiB less those of a context."""
    if not options.cap:
        return
    device = devices.resolve_device(options.device)
    if device.type != "cuda":
        raise UsageError("--cap limits the memory of a GPU, found --device cpu; `handgrad plan` counts without one")
    total = torch.cuda.mem_get_info(device)[1]
    fraction = min(1.0, (float(options.cap) - CONTEXT_GIB) * GIB / total)
    torch.cuda.set_per_process_memory_fraction(fraction, device.index or 0)  # it takes no "cuda" alone


def fits(shape: str, cap: str, options: argparse.Namespace) -> dict[str, bool]:
    """Of each contender: True if a few steps run within `cap` GiB of a GPU."""
    turns = take_turns(shape, argparse.Namespace(**{**vars(options), "cap": cap, "rounds": 1}))
    return {name: name in turns for name in options.contenders.split(",")}


def take_turns(shape: str, options: argparse.Namespace) -> dict[str, list[dict[str, Any]]]:
    """The turns of all, or nothing of one that runs out of memory."""
    given = [f"--{name.replace('_', '-')}={value}" for name, value in vars(options).items() if name in (*PASSED, "cap")]
    command = [sys.executable, "-m", "benchmarks.lora", f"--shapes={shape}", *given]
    peers = {name: Peer(name, [*command, f"--contender={name}"]) for name in options.contenders.split(",")}
    turns, failed = alternate(peers, WARM_UP + options.rounds)
    for peer in peers.values():
        peer.close()
    for name, failure in failed.items():
        if options.cap and not failure.startswith("out of memory"):
            raise UsageError(f"{shape}, {name}, failed otherwise than for want of memory: {failure}")
    return turns


def figures_of(shape: str, options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Of each contender: the plan by component, the parameters that train, and what was measured; with --cap, the caps
    that it fits."""
    caps = {cap: fits(shape, cap, options) for cap in options.cap.split(",")} if options.cap else {}
    turns = take_turns(shape, options) if options.rounds and not caps else {}
    figures: dict[str, dict[str, Any]] = {}
    for name in options.contenders.split(","):
        design = design_of(shape, name, options)
        row: dict[str, Any] = {"plan_bytes": design.plan.size_bytes, "trained_parameters": trained_parameters(design)}
        if counted := turns.get(name, [])[WARM_UP:]:
            seconds = median(turn["seconds"] for turn in counted)
            tokens = options.micro_batch * options.sequence_length
            row |= {"seconds_per_step": round(seconds, 5), "tokens_per_second": round(tokens / seconds, 1)}
            row |= {"peak_bytes": counted[-1]["allocated_bytes"], "loss": round(counted[-1]["loss"], 5)}
        if caps:
            row["fits_gib"] = {cap: found[name] for cap, found in caps.items()}
        figures[name] = row
    return figures


def table(figures: dict[str, dict[str, dict[str, Any]]]) -> list[str]:
    lines = [f"{'':<16}{'':<9}{'trained':>12}{'planned':>12}{'peak':>12}{'ms/step':>10}{'tok/s':>10}"]
    for shape, rows in figures.items():
        for name, row in rows.items():
            peak = human_bytes(row["peak_bytes"]) if row.get("peak_bytes") else "-"
            rate = f"{row['tokens_per_second']:.0f}" if "tokens_per_second" in row else "-"
            step = f"{row['seconds_per_step'] * 1e3:.1f}" if "seconds_per_step" in row else "-"
            planned = human_bytes(sum(row["plan_bytes"].values()))
            caps = "".join(f"  {cap} GiB: {'fits' if found else 'no':<4}" for cap, found in row.get("fits_gib", {}).items())
            figure = f"{row['trained_parameters']:>12}{planned:>12}{peak:>12}{step:>10}{rate:>10}{caps}"
            lines.append(f"{shape:<16}{name:<9}{figure}".rstrip())
    return lines


PASSED = ("lora", "micro_batch", "sequence_length", "precision", "recompute", "device")  # to a contender's process


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default=",".join(LARGE))
    parser.add_argument("--contenders", default=",".join(CONTENDERS))
    parser.add_argument("--lora", default="rank=16,alpha=32")
    parser.add_argument("--micro-batch", type=int, default=4)
    parser.add_argument("--sequence-length", type=int, default=2048)
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--recompute", type=int, default=1)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--cap", default="", help="GiB of GPUs, with commas: which fit? Nothing else is measured")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--out", default="")
    parser.add_argument("--contender", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.contender:
        contend(options.shapes, options.contender, options)
        return
    keep_commit()
    figures = {shape: figures_of(shape, options) for shape in options.shapes.split(",")}
    device = devices.resolve_device(options.device)
    print(
        f"\n{options.micro_batch} samples of {options.sequence_length} tokens, {options.lora}, {devices.describe(device)}\n"
    )
    print("\n".join(table(figures)))
    if options.out:
        settings = {name: getattr(options, name) for name in (*PASSED, "contenders", "cap", "rounds")}
        write_record(options.out, device, settings=settings, figures=figures)


if __name__ == "__main__":
    run_main(main)
