"""Small cards: which settings run in how little of a GPU's memory, what they cost beside the plain run, and its bits.

Every setting of a model runs in a process of its own, under the smallest of the caps that its plan fits. All make the same
steps, one after another in turns, so other load affects them alike. Losses, and at the end the digests of weights and
moments, are compared with the plain run's. The peak is the driver's: the memory that is free once the process has ended.

    python -m benchmarks.small_cards --cap 6,16,24 --device cuda --out benchmarks/results/NAME.json
    python -m benchmarks.small_cards --models tiny --device cpu
"""

import argparse
import sys
from dataclasses import replace
from statistics import median
from typing import Any

import torch

from benchmarks.gpu_step import used_bytes
from benchmarks.lora import CONTEXT_GIB, GIB, limit_memory
from benchmarks.record import keep_commit, run_main, write_record
from benchmarks.same_batch import assemble_on_one_batch, timed_step
from benchmarks.step import VOCABULARY
from benchmarks.turns import Peer, alternate, answers, excuses, memory, say
from handgrad.errors import UsageError
from handgrad.format import human_bytes
from handgrad.machine import devices
from handgrad.ops import DIGEST_SUMS
from handgrad.run.resolve import resolve
from handgrad.settings import presets
from handgrad.settings.config import RunConfig, check
from handgrad.training.design import Design
from handgrad.training.state import TrainingState

WARM_UP = 2  # turns that do not count: the first compiles, the second captures the graphs
PLAIN, ROUNDED = "plain", "offload, moments bf16, recompute 2"
OFFLOAD = {"offload": True}
SETTINGS: dict[str, dict[str, Any]] = {
    PLAIN: {},
    "recompute 3": {"recompute": 3},
    "offload": OFFLOAD,
    "offload, recompute 1": {**OFFLOAD, "recompute": 1},
    "offload, recompute 3": {**OFFLOAD, "recompute": 3},
    "moments bf16": {"moments": "bf16"},
    ROUNDED: {**OFFLOAD, "moments": "bf16", "recompute": 2},
}
# Tokens of a step, and the settings that one H200 holds at once beside the plain run.
MODELS = {
    "d12": (524288, (PLAIN, "recompute 3", "offload", "offload, recompute 3", "moments bf16")),
    "d48": (131072, (PLAIN, "offload", "offload, recompute 1", "offload, recompute 3", ROUNDED)),
}


def config_of(model: str, setting: str, options: argparse.Namespace) -> RunConfig:
    config = presets.preset(model)
    tokens = options.micro_batch * config.sequence_length
    steps = {"tokens_per_step": MODELS.get(model, (2 * tokens,))[0], "micro_batch": options.micro_batch, "lanes": 1}
    rates = {"learning_rate": 1e-4, "warmup_steps": 0, "schedule": "constant", "eval_every": 0}
    run = {"precision": options.precision, "device": options.device, **SETTINGS[setting]}
    return check(replace(config, **steps, **rates, **run))


def design_of(model: str, setting: str, options: argparse.Namespace) -> Design:
    return resolve(config_of(model, setting, options), VOCABULARY)


def contend(model: str, setting: str, options: argparse.Namespace) -> None:
    """A setting's process: makes a step for each line "step", and after "digests" answers with those of its state."""
    pipe = answers()
    with excuses(pipe):
        limit_memory(options)
        training = assemble_on_one_batch(design_of(model, setting, options), VOCABULARY)
        for number, line in enumerate(sys.stdin):
            if line.strip() == "step":
                say(pipe, timed_step(training, number))
                continue
            training.await_weights()
            say(pipe, {"digests": digests_of(training.state), **memory(training.design.device)})


def digests_of(state: TrainingState) -> dict[str, list[int]]:
    """A digest of the model's weights, and the sums of the bits of masters and moments, where they lie."""
    sums = torch.zeros(DIGEST_SUMS, dtype=torch.int64, device=state.parameters.device)
    state.design.ops.digest(sums, state.parameters, state.controls, first=0)
    found = {"parameters": sums.tolist()}
    for name, flat in {"master": state.master, **state.optimizer}.items():
        words = flat.view(torch.int16 if flat.itemsize == 2 else torch.int32)
        found[name] = [int(words.sum(dtype=torch.int64))]
    return found


def cap_of(planned_bytes: int, caps: str) -> str:
    """The smallest of the caps, in GiB, that holds a plan and the driver's context; "" if none does."""
    fitting = [cap for cap in caps.split(",") if cap and planned_bytes <= (float(cap) - CONTEXT_GIB) * GIB]
    return min(fitting, key=float, default="")


def figures_of(model: str, options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Of each setting: plan, cap, time of a step and its ratio to the plain run's, peak, and whether the bits are its."""
    device = devices.resolve_device(options.device)
    names = options.settings.split(";") if options.settings else MODELS.get(model, (0, tuple(SETTINGS)))[1]
    figures: dict[str, dict[str, Any]] = {}
    peers: dict[str, Peer] = {}
    for name in names:
        design = design_of(model, name, options)
        planned = design.plan.total_bytes
        figures[name] = {"planned_bytes": planned, "host_bytes": design.host_plan.total_bytes}
        figures[name]["cap_gib"] = cap = cap_of(planned, options.cap) if device.type == "cuda" else ""
        given = [f"--{key}={getattr(options, key.replace('-', '_'))}" for key in PASSED]
        command = [sys.executable, "-m", "benchmarks.small_cards", f"--models={model}", *given, f"--cap={cap}"]
        peers[name] = Peer(name, [*command, f"--contender={name}"])
    turns, _ = alternate(peers, WARM_UP + options.rounds)
    if PLAIN not in turns:
        raise UsageError(f"the plain run of {model} must run beside the others, and did not; try a smaller --micro-batch")
    for peer in peers.values():  # all at once: what lies on the host takes a while
        assert peer.process.stdin is not None
        peer.process.stdin.write("digests\n")
        peer.process.stdin.flush()
    digests = {name: peer.answer() for name, peer in peers.items()}
    plain = turns[PLAIN]
    for name, peer in peers.items():
        before = used_bytes(device)
        peer.close()
        seconds = [turn["seconds"] for turn in turns[name][WARM_UP:]]
        ratios = [turn["seconds"] / other["seconds"] for turn, other in zip(turns[name], plain, strict=True)][WARM_UP:]
        same_steps = all((a["loss"], a["norm"]) == (b["loss"], b["norm"]) for a, b in zip(turns[name], plain, strict=True))
        figures[name] |= {
            "seconds_per_step": round(median(seconds), 5),
            "ratio": round(median(ratios), 4),
            "driver_bytes": before - used_bytes(device),
            "allocated_bytes": digests[name]["allocated_bytes"],
            "same_bits": same_steps and digests[name]["digests"] == digests[PLAIN]["digests"],
            "loss": turns[name][-1]["loss"],
        }
    return figures


def table(figures: dict[str, dict[str, dict[str, Any]]]) -> list[str]:
    lines = [f"{'':<44}{'planned':>11}{'driver':>11}{'ms/step':>10}{'x plain':>9}  bits   cap, GiB"]
    for model, rows in figures.items():
        for name, row in rows.items():
            start = f"{model:<6}{name:<38}{human_bytes(row['planned_bytes']):>11}"
            cap = row["cap_gib"] or "-"
            if "ratio" not in row:
                lines.append(f"{start}  did not run{f' in {cap} GiB' if row['cap_gib'] else ''}")
                continue
            peak = human_bytes(row["driver_bytes"]) if row["driver_bytes"] else "-"
            bits = "same" if row["same_bits"] else "other"
            lines.append(f"{start}{peak:>11}{row['seconds_per_step'] * 1e3:>10.1f}{row['ratio']:>9.3f}  {bits:<6} {cap}")
    return lines


PASSED = ("micro-batch", "precision", "device")  # to a setting's process


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--settings", default="", help=f"with semicolons, the first {PLAIN} (default: those of the model)")
    parser.add_argument("--micro-batch", type=int, default=4)
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--device", default="auto")
    parser.add_argument(
        "--cap", default="", help="GiB of GPUs, with commas: each setting runs in the smallest that holds it"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", default="")
    parser.add_argument("--contender", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.contender:
        contend(options.models, options.contender, options)
        return
    keep_commit()
    figures = {model: figures_of(model, options) for model in options.models.split(",")}
    device = devices.resolve_device(options.device)
    print(f"\nmicro-batches of {options.micro_batch}, {options.precision}, {devices.describe(device)}\n")
    print("\n".join(table(figures)))
    if options.out:
        settings = {name: getattr(options, name) for name in ("micro_batch", "precision", "cap", "rounds")}
        tokens = {model: config_of(model, PLAIN, options).tokens_per_step for model in figures}
        write_record(options.out, device, settings={**settings, "tokens_per_step": tokens}, figures=figures)


if __name__ == "__main__":
    run_main(main)
