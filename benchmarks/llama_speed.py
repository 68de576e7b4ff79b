"""Whole steps of Llama models at their published sizes: handgrad, the tuned twin, and transformers under its Trainer.

Weights are random and the same for all contenders, which alternate as in `handgrad bench step`. The losses of their first
steps must agree: else one of them computes another model, and the command ends with 1. Each Trainer, and with `--alone`
each contender, is measured by itself, after the others have freed the device's memory.

    python -m benchmarks.llama_speed --out-folder benchmarks/results
    python -m benchmarks.llama_speed --precision fp8 --out-folder benchmarks/results
    python -m benchmarks.llama_speed --shapes tiny-llama --device cpu --precision fp32
"""

import argparse
import dataclasses
import importlib.util
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import gpu_step
from benchmarks.contenders import HandgradRun, Settings, TwinRun, tokens_of
from benchmarks.llama_twin import LARGE, SHAPES
from benchmarks.peer_programs import ProgramRun, is_program
from benchmarks.record import keep_commit, rounded, run_main, version, write_record
from benchmarks.trainer_run import TrainerRun, trainer_switches
from benchmarks.trl_run import SftRun
from benchmarks.turns import Run, answers, contend
from benchmarks.twin_switches import check_libraries, switches_of
from handgrad.errors import UsageError
from handgrad.machine import devices
from handgrad.machine.gpus import short_name
from handgrad.settings.config import check

TRAINERS = (
    "transformers",
    *(f"transformers+{end}" for end in ("compiled", "liger", "compiled+liger", "compiled+liger+cudnn")),
)
TWINS = ("twin-cudnn+stream+regional", "twin-flash+stream+regional")
MICRO_BATCHES = {"SmolLM2-135M": 16}  # of others 4: three contenders side by side fit an H200
ADAPTED = "handgrad-lora"  # beside transformers+lora: adapters over frozen weights in bf16
LORA = "rank=16,alpha=32"

FIRST_STEPS = 5  # whose losses are compared
LEARNING_RATE = 1e-5  # without a warm-up: at 1e-4 Llama-3.2-1B's third loss rises by 0.9, and roundings grow to 0.06
LARGEST_DIFFERENCE = 0.02  # in nats, of these losses: bf16's rounding is a tenth of it


def default_contenders(precision: str) -> str:
    """All of them, in fp8 those that have it and the fastest in bf16."""
    if precision == "fp8":
        return ",".join(("handgrad", "handgrad-bf16", *TWINS[:2], *(f"{name}+torchao" for name in TWINS[:2])))
    liger = ("twin-flash+stream+regional+liger",) if importlib.util.find_spec("liger_kernel") else ()
    return ",".join(("handgrad", *TWINS, *liger, *TRAINERS))


def check_contenders(text: str, precision: str, *, chats: bool = False) -> list[str]:
    """The names in a comma-separated list; raises `UsageError` for an unknown one, a twin's missing library, twins in
    fp8 beside contenders in another `precision`, or a contender without packed chats beside `chats`."""
    given = [name.strip() for name in text.split(",") if name.strip()]
    apart = [name for name in given if trainer_switches(name) or name == ADAPTED or is_program(name)]
    others = [name for name in given if name not in apart]
    if others:
        gpu_step.check_contenders(",".join(others))
    for name in given:
        trainer = trainer_switches(name)
        if chats != bool(trainer and trainer.trl) and (trainer or not name.startswith("handgrad")):
            raise UsageError(f"expected handgrad and trl with --chats, the others without it, found {name}")
    if others and len(others) < len(given) and any("lora" in name for name in given):
        raise UsageError(f"expected contenders that all have adapters, or none, found {text!r}")
    for switches in map(switches_of, others):
        if switches is not None:
            check_libraries(switches)
            if switches.attention == "plain":
                raise UsageError(f"expected twins of the Llama family with fused attention, found {text!r}")
            if switches.float8 != "none" and precision != "fp8":
                raise UsageError(f"the torchao twins need --precision fp8, found {precision} for {text!r}")
    return given


def make_run(name: str, settings: Settings) -> Run:
    """A contender, in its own process, from handgrad's initial weights."""
    config, tokens = settings.config(), tokens_of(settings)
    trainer = trainer_switches(name)
    if is_program(name):
        return ProgramRun(name, config, tokens)
    if name == ADAPTED or (trainer and trainer.lora):
        config = check(dataclasses.replace(config, lora=LORA, init_from="random weights"))
    if name == ADAPTED:
        return HandgradRun(config, tokens)
    if trainer:
        plain = dataclasses.replace(config, precision="bf16") if config.precision == "fp8" else config
        return (SftRun if trainer.trl else TrainerRun)(plain, tokens, trainer)
    if switches := switches_of(name):
        on_gpu, bf16 = config.device == "cuda", config.precision in ("bf16", "fp8")
        chosen = dataclasses.replace(
            switches, compiled=on_gpu, autocast=bf16, bf16_stream=switches.bf16_stream and bf16, tf32=bf16
        )
        return TwinRun(config, tokens, chosen, same_weights=True)
    return gpu_step.make_run(name, settings)


def add_comparisons(rows: dict[str, Any]) -> None:
    """Adds to each row its speed over the fastest peer's, and the largest distance of its first losses from handgrad's; of
    a program of the very first, for it has other samples in each step, and its weights in bf16 take other updates."""
    gpu_step.add_times_best_twin(rows)
    measure = rows.get("handgrad", rows.get(ADAPTED, {})).get("losses")
    for name, row in rows.items():
        if measure and "losses" in row:
            compared = 1 if is_program(name) else FIRST_STEPS
            differences = np.abs(np.subtract(row["losses"], measure))[:compared]
            row["loss_difference"] = float(differences.max())  # NaN if one of them is


def other_models(rows: dict[str, Any]) -> list[str]:
    """The contenders that compute something else than handgrad, a line each."""
    return [
        f"{name}: expected the first losses within {LARGEST_DIFFERENCE} of handgrad's, found {row['losses']}"
        for name, row in rows.items()
        if not row.get("loss_difference", 0.0) <= LARGEST_DIFFERENCE  # NaN is none
    ]


def measure(
    commands: dict[str, list[str]], alone: list[str], seconds: float, turn_seconds: float, device: torch.device
) -> dict[str, Any]:
    """The raw figures of all contenders: of those `alone` one by one, each in the memory of the whole device; of the
    others, which alternate, together."""
    apart = [{name: commands[name]} for name in alone]
    together = {name: command for name, command in commands.items() if name not in alone}
    rows: dict[str, Any] = {}
    for group in [together, *apart] if together else apart:
        rows |= gpu_step.measure(group, seconds, turn_seconds, device, twice=False, single_steps=FIRST_STEPS - 1)
    return rows


def compare(
    settings: Settings, names: list[str], alone: list[str], seconds: float, turn_seconds: float, out: str
) -> dict[str, Any]:
    """Measures one shape, prints its table, writes the record to `out` if that is not empty; returns the rows."""
    device, config, tokens = devices.resolve_device(settings.device), settings.config(), tokens_of(settings)
    commands = {name: [sys.executable, "-m", "benchmarks.llama_speed", name, settings.to_json()] for name in names}
    raw = measure(commands, alone, seconds, turn_seconds, device)
    shape = config.shape(tokens.vocab_size)
    flops, peak = shape.flops_per_token, devices.peak_flops(device)
    rows = {name: gpu_step.figures(row, config.tokens_per_step, flops, peak) for name, row in raw.items()}
    for name, row in rows.items():
        if "lora" in name:  # frozen weights have no gradients, so these FLOPs are not made
            row |= dict.fromkeys(("mfu", "gflop_per_second"))
    add_comparisons(rows)
    batch = f"steps of {settings.micro_steps} x {settings.micro_batch} x {settings.sequence_length} tokens"
    print(f"\n{settings.model}, {settings.precision}, {batch}, {devices.describe(device)}; memory in GiB\n")
    print("\n".join(gpu_step.table(rows)))
    for name, row in rows.items():
        if "loss_difference" in row:
            print(f"{name}: loss {row['losses'][0]:.5f} at step 1, within {row['loss_difference']:.1e} of handgrad's")
    if out:
        described = {**dataclasses.asdict(settings), "seconds": seconds, "turn_seconds": turn_seconds}
        described["measured_alone"] = alone
        versions = {**gpu_step.libraries(), **{name: version(name) for name in ("transformers", "accelerate")}}
        counted = {"flops_per_token": flops, "peak_flop_per_second": peak}
        figures = rounded(rows)
        write_record(out, device, settings=described, tokens=tokens.words, libraries=versions, **counted, figures=figures)
    return rows


def parse(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default=",".join(LARGE))
    parser.add_argument("--contenders", default="", help="by commas; empty: those of the precision")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--precision", default="bf16", choices=("bf16", "fp32", "fp8"), help="of handgrad")
    parser.add_argument("--sequence-length", type=int, default=2048)
    parser.add_argument("--micro-batch", type=int, default=0, help="of all contenders; 0: by shape")
    parser.add_argument("--micro-steps", type=int, default=4)
    parser.add_argument("--recompute", type=int, default=0, help="of handgrad")
    parser.add_argument("--head-chunk-tokens", type=int, default=0, help="of handgrad; 0: its own choice")
    parser.add_argument("--chats", action="store_true", help="packed chats: of handgrad and trl")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each contender")
    parser.add_argument("--turn-seconds", type=float, default=5.0)
    parser.add_argument("--alone", action="store_true", help="one contender at a time, as Trainers and llmq always are")
    parser.add_argument("--out-folder", default="", help="for a record of each shape")
    return parser.parse_args(given)


def main() -> int:
    options = parse()
    chosen = options.contenders or ("handgrad,trl+varlen" if options.chats else default_contenders(options.precision))
    names, shapes = check_contenders(chosen, options.precision, chats=options.chats), options.shapes.split(",")
    if unknown := [shape for shape in shapes if shape not in SHAPES]:
        raise UsageError(f"unknown shapes {', '.join(unknown)}; known: {', '.join(SHAPES)}")
    alone = [name for name in names if options.alone or trainer_switches(name) or is_program(name)]
    keep_commit()
    if options.out_folder:
        Path(options.out_folder).mkdir(parents=True, exist_ok=True)
    lines = []
    for shape in shapes:
        settings = Settings(
            model=shape,
            micro_batch=options.micro_batch or MICRO_BATCHES.get(shape, 4 if options.device == "cuda" else 2),
            micro_steps=options.micro_steps,
            sequence_length=options.sequence_length,
            precision=options.precision,
            recompute=options.recompute,
            head_chunk_tokens=options.head_chunk_tokens,
            chats=options.chats,
            device=options.device,
            learning_rate=LEARNING_RATE,
            vocab_size=SHAPES[shape][0],
        )
        kind = short_name(torch.cuda.get_device_name()) if options.device == "cuda" else options.device
        more = "fp8-" if options.precision == "fp8" else "lora-" if ADAPTED in names else ""
        more += "chats-" * options.chats
        more += f"chunk-{settings.head_chunk_tokens}-" * bool(settings.head_chunk_tokens)
        name = f"{kind}-llama-speed-{more}{shape.lower().replace('.', '_')}.json"
        out = Path(options.out_folder) / name if options.out_folder else ""
        lines += other_models(compare(settings, names, alone, options.seconds, options.turn_seconds, str(out)))
    print("\n".join(lines), file=sys.stderr)
    return 1 if lines else 0


if __name__ == "__main__":
    if len(sys.argv) == 3 and sys.argv[2].startswith("{"):
        _name, _settings = sys.argv[1], Settings.from_json(sys.argv[2])
        _pipe = answers()
        contend(lambda: make_run(_name, _settings), devices.resolve_device(_settings.device), sys.stdin, _pipe)
    else:
        run_main(main)
