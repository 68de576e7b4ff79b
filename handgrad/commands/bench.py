"""handgrad bench: compares with a PyTorch autograd twin, on this machine, in one run; or measures this machine alone."""

import importlib
import json
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import handgrad
from handgrad.commands.parser import flag
from handgrad.errors import UsageError
from handgrad.files import check_replaceable, write_durably
from handgrad.machine import devices
from handgrad.machine.backend import choose_backend
from handgrad.settings import presets
from handgrad.tools import card


def run(parsed: Namespace) -> int:
    presets.model(parsed.model or MODEL)  # raises for an unknown name
    device = devices.resolve_device(parsed.device).type
    if parsed.out:
        check_replaceable(Path(parsed.out), "--out")
    name = "step on a CPU" if parsed.what == "step" and device == "cpu" else parsed.what
    benchmark, taken = BENCHMARKS[name]
    check_flags(parsed, name, taken)
    parsed.model = parsed.model or MODEL
    benchmark(parsed, device)
    return 0


def check_flags(parsed: Namespace, name: str, taken: str) -> None:
    """Raises `UsageError` for a flag that this benchmark ignores."""
    known = ("device", *taken.split(), "out")
    for flag_name, value in vars(parsed).items():
        if flag_name not in ("what", "arguments", *known) and value is not None:
            raise UsageError(f"{flag(flag_name)} does nothing in `bench {name}`; it takes {', '.join(map(flag, known))}")


def module(name: str) -> ModuleType:
    """Imports a benchmark from the checkout: benchmarks use autograd, which the package never does."""
    checkout = Path(handgrad.__file__).parents[1]
    if not (checkout / "benchmarks" / f"{name}.py").exists():
        raise UsageError(f"the benchmarks lie in a checkout of handgrad, none found at {checkout}; clone the repository")
    sys.path.insert(0, str(checkout))
    return importlib.import_module(f"benchmarks.{name}")


def settings(parsed: Namespace, device: str, micro_batch: int, **others: object) -> object:
    """The `Settings` of a GPU benchmark: the given flags, and defaults for the rest (small ones on a CPU)."""
    contenders = module("contenders")
    batch, length = (micro_batch, 1024) if device == "cuda" else (4, 64)
    defaults = {"micro_batch": batch, "sequence_length": length, **others}
    named = {name: value for name, value in vars(parsed).items() if value is not None and name in contenders.NAMES}
    chosen = contenders.Settings(**{**defaults, **named, "device": device})
    chosen.config()  # checks that the settings fit together
    return chosen


def bench_cpu_step(parsed: Namespace, device: str) -> None:
    sizes = parsed.micro_batch or 4, parsed.sequence_length or 64, parsed.rounds or 5
    module("step").compare(parsed.model, *sizes, parsed.out)


def bench_step(parsed: Namespace, device: str) -> None:
    gpu_step = module("gpu_step")
    chosen = parsed.contenders or gpu_step.default_contenders()
    times = parsed.seconds or 20.0, parsed.turn_seconds or 10.0
    gpu_step.compare(settings(parsed, device, 64), chosen, *times, parsed.out, starts=parsed.starts or 2)


def bench_loss(parsed: Namespace, device: str) -> None:
    gpu_loss = module("gpu_loss")
    if not parsed.data:
        raise UsageError("losses are compared on real text: give --data DIR, made by `handgrad prepare`")
    steps = parsed.steps or 200
    schedule = {"steps": steps, "schedule": "cosine", "warmup_steps": steps // 10, "learning_rate": 6e-4}
    chosen = parsed.contenders or gpu_loss.DEFAULT_CONTENDERS
    gpu_loss.compare(settings(parsed, device, 32, **schedule), chosen, parsed.out)


def bench_ladder(parsed: Namespace, device: str) -> None:
    ladder = module("ladder")
    if parsed.rows and not parsed.out:
        raise UsageError("--rows adds to a record: give its --out FILE")
    module("record").keep_commit()
    rungs = ladder.rungs_of(parsed.rows) if parsed.rows else None
    ladder.compare(settings(parsed, device, 16), parsed.seconds or 5.0, parsed.out, rungs)


def bench_kernels(parsed: Namespace, device: str) -> None:
    need_kernels(parsed, device)
    module("gpu_kernels").compare(parsed.out)


def bench_fp8(parsed: Namespace, device: str) -> None:
    if presets.model(parsed.model)["architecture"] != "gpt2":
        steps = f"`handgrad bench step --model {parsed.model} --contenders handgrad-fp8,handgrad-bf16` measures its steps"
        raise UsageError(f"bench fp8 measures the kernels and GEMMs of GPT-2, found model {parsed.model}; {steps}")
    need_kernels(parsed, device)
    gpu = devices.resolve_device("cuda")
    devices.dtype_of(gpu, "fp8")  # refuses a GPU without fp8
    devices.set_arithmetic(gpu, "fp8")
    module("gpu_fp8").compare(parsed.out)


def need_kernels(parsed: Namespace, device: str) -> None:
    if device != "cuda":
        raise UsageError(f"bench {parsed.what} needs a CUDA GPU; `handgrad bench step --device cpu` measures a CPU")
    choose_backend("kernels", devices.resolve_device("cuda"))  # raises if a library is missing


def bench_sampling(parsed: Namespace, device: str) -> None:
    sampling = module("sampling")
    batches = [parsed.micro_batch] if parsed.micro_batch else [1, 8, 64]
    chosen = parsed.contenders or ",".join(sampling.CONTENDERS)
    precision = parsed.precision or ("bf16" if device == "cuda" else "fp32")
    if precision == "fp8":
        raise UsageError("expected precision fp32, tf32, bf16 or fp16 for bench sampling, found fp8, which is for training")
    sampling.compare(parsed.model, batches, chosen, devices.resolve_device(device), precision, parsed.out)


def bench_card(parsed: Namespace, device: str) -> None:
    out = Path(parsed.out or "card.json")
    check_replaceable(out, "--out")
    for part in card.measure_card(devices.resolve_device(device), parsed.seconds or card.SECONDS):
        if isinstance(part, str):
            print(part, flush=True)
        else:
            write_durably(out, json.dumps(part, indent=1) + "\n")
    print(f"\nwritten    {out}; to send it in, attach it to an issue of https://github.com/handgrad/handgrad")


MODEL = "d12"  # by default
# The flags of each benchmark, besides --device and --out.
BATCH = "model micro_batch sequence_length micro_steps data techniques"
BENCHMARKS: dict[str, tuple[Callable[[Namespace, str], None], str]] = {
    "step": (bench_step, f"{BATCH} precision recompute contenders seconds turn_seconds starts"),
    "step on a CPU": (bench_cpu_step, "model micro_batch sequence_length rounds"),
    "loss": (bench_loss, f"{BATCH} recompute contenders steps learning_rate"),
    "ladder": (bench_ladder, f"{BATCH} precision recompute seconds rows"),
    "kernels": (bench_kernels, ""),
    "sampling": (bench_sampling, "model micro_batch precision contenders"),
    "fp8": (bench_fp8, "model"),
    "card": (bench_card, "seconds"),
}
