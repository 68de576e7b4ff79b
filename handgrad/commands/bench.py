"""handgrad bench: beside a PyTorch autograd twin, on this machine, in one run."""

import importlib
import math
import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType

import handgrad
from handgrad import devices, presets
from handgrad.backend import choose_backend
from handgrad.commands.arguments import Parser
from handgrad.config import PRECISIONS
from handgrad.errors import UsageError

WHATS = {
    "step": "whole optimizer steps, handgrad and the twin in turns: speed, memory; on a GPU power and time to step 1",
    "loss": "the same training run by handgrad and by the twin: how far their losses lie apart",
    "ladder": "from plain PyTorch to handgrad's kernels, one improvement a row",
    "kernels": "single operations beside torch's",
    "sampling": "texts of a model with random weights, beside transformers.generate, one and 64 at a time",
    "fp8": "kernels and products of fp8 beside bf16: times, bytes, errors",
}


def run(arguments: Sequence[str]) -> int:
    parser = Parser("handgrad bench", description="Beside a PyTorch twin, on this machine, in one run.")
    parser.add_argument("what", choices=list(WHATS), help="; ".join(f"{what}: {text}" for what, text in WHATS.items()))
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"], help="(default: auto)")
    parser.add_argument("--model", default="d12", metavar="NAME", help="model size (default: d12)")
    number, fraction, text = ({"type": int, "metavar": "N"}, {"type": float, "metavar": "X"}, {"metavar": "TEXT"})
    parser.add_argument("--micro-batch", **number, help="samples at once (default: step 64, loss 32, ladder 16; CPU: 4)")
    parser.add_argument("--sequence-length", **number, help="tokens per sample (default: 1024; CPU: 64)")
    parser.add_argument("--micro-steps", **number, help="micro-batches per optimizer step (default: 1)")
    parser.add_argument("--precision", choices=PRECISIONS, help="of handgrad (default: bf16)")
    parser.add_argument("--recompute", type=int, choices=(0, 1, 2), help="of handgrad, as in train (default: 0)")
    parser.add_argument("--data", metavar="DIR", help="prepared shards to take the tokens from (default: made-up tokens)")
    parser.add_argument("--contenders", **text, help="step on a GPU, loss: names, by commas; a wrong one lists all")
    parser.add_argument("--seconds", **fraction, help="per contender (default: 20; ladder: per row, 5)")
    parser.add_argument("--turn-seconds", **fraction, help="step on a GPU: length of a turn (default: 10)")
    parser.add_argument("--twin-mode", **text, help="step on a GPU: the mode of the twin's compiler (default: default)")
    parser.add_argument("--steps", **number, help="loss: optimizer steps (default: 200)")
    parser.add_argument("--learning-rate", **fraction, help="loss: at its peak (default: 6e-4)")
    parser.add_argument("--rounds", **number, help="step on a CPU: turns of every contender (default: 5)")
    parser.add_argument("--out", default="", metavar="FILE", help="also write the figures as JSON")
    parsed = parser.parse(arguments)
    presets.model(parsed.model)  # refuses an unknown one
    device = devices.resolve_device(parsed.device).type
    folder = Path(parsed.out).absolute().parent
    if parsed.out and not folder.is_dir():
        raise UsageError(f"--out {parsed.out}: there is no folder {folder}; make it, or write elsewhere")
    name = "step on a CPU" if parsed.what == "step" and device == "cpu" else parsed.what
    benchmark, taken = BENCHMARKS[name]
    check_flags(parsed, name, taken)
    benchmark(parsed, device)
    return 0


def check_flags(parsed: Namespace, name: str, taken: str) -> None:
    """Raises `UsageError` for a number that makes no sense, and for a flag that this benchmark would not heed."""
    for flag, value in vars(parsed).items():
        shown = "--" + flag.replace("_", "-")
        if isinstance(value, float | int) and flag != "recompute" and not 0 < value < math.inf:
            raise UsageError(f"{shown} must be above 0, found {value}")
        if flag not in ("what", "device", "model", "out", *taken.split()) and value is not None:
            raise UsageError(f"{shown} does nothing in `bench {name}`; it takes {', '.join(flags(taken))}")


def flags(taken: str) -> list[str]:
    return ["--" + flag.replace("_", "-") for flag in ("device", "model", *taken.split(), "out")]


def module(name: str) -> ModuleType:
    """A benchmark. It uses autograd, which the package never does: it lives outside, and is looked up only here."""
    checkout = Path(handgrad.__file__).parents[1]
    if not (checkout / "benchmarks" / f"{name}.py").exists():
        raise UsageError(f"the benchmarks lie in a checkout of handgrad, none found at {checkout}; clone the repository")
    sys.path.insert(0, str(checkout))
    return importlib.import_module(f"benchmarks.{name}")


def settings(parsed: Namespace, device: str, micro_batch: int, **others: object) -> object:
    """The `Settings` of a GPU benchmark: the flags given, else these defaults (small ones on a CPU)."""
    contenders = module("contenders")
    sizes = (
        {"micro_batch": micro_batch, "sequence_length": 1024}
        if device == "cuda"
        else {"micro_batch": 4, "sequence_length": 64}
    )
    given = {name: value for name, value in vars(parsed).items() if value is not None and name in contenders.NAMES}
    found = contenders.Settings(**{**sizes, **others, **given, "device": device})
    found.config()  # refuses what does not fit together
    return found


def bench_cpu_step(parsed: Namespace, device: str) -> None:
    sizes = parsed.micro_batch or 4, parsed.sequence_length or 64, parsed.rounds or 5
    module("step").compare(parsed.model, *sizes, parsed.out)


def bench_step(parsed: Namespace, device: str) -> None:
    gpu_step = module("gpu_step")
    chosen = parsed.contenders or gpu_step.DEFAULT_CONTENDERS
    gpu_step.compare(settings(parsed, device, 64), chosen, parsed.seconds or 20.0, parsed.turn_seconds or 10.0, parsed.out)


def bench_loss(parsed: Namespace, device: str) -> None:
    gpu_loss = module("gpu_loss")
    if not parsed.data:
        raise UsageError("losses are compared on real text: give --data DIR, made by `handgrad prepare`")
    steps = parsed.steps or 200
    schedule = {"steps": steps, "schedule": "cosine", "warmup_steps": steps // 10, "learning_rate": 6e-4}
    chosen = parsed.contenders or gpu_loss.DEFAULT_CONTENDERS
    gpu_loss.compare(settings(parsed, device, 32, **schedule), chosen, parsed.out)


def bench_ladder(parsed: Namespace, device: str) -> None:
    module("ladder").compare(settings(parsed, device, 16), parsed.seconds or 5.0, parsed.out)


def bench_kernels(parsed: Namespace, device: str) -> None:
    if device != "cuda":
        raise UsageError("bench kernels needs a CUDA GPU; `handgrad bench step --device cpu` measures what a CPU can do")
    choose_backend("kernels", devices.resolve_device("cuda"))  # says what is missing
    module("gpu_kernels").compare(parsed.out)


def bench_fp8(parsed: Namespace, device: str) -> None:
    if device != "cuda":
        raise UsageError("bench fp8 needs a CUDA GPU")
    devices.use_precision(devices.resolve_device("cuda"), "fp8")
    choose_backend("kernels", devices.resolve_device("cuda"))  # says what is missing
    module("gpu_fp8").compare(parsed.out)


def bench_sampling(parsed: Namespace, device: str) -> None:
    sampling = module("sampling")
    batches = [parsed.micro_batch] if parsed.micro_batch else [1, 64]
    chosen = parsed.contenders or ",".join(sampling.CONTENDERS)
    precision = parsed.precision or ("bf16" if device == "cuda" else "fp32")
    if precision == "fp8":
        raise UsageError("texts are written in fp32, tf32, bf16 or fp16; fp8 is for training")
    sampling.compare(parsed.model, batches, chosen, devices.resolve_device(device), precision, parsed.out)


# What each takes beside --device, --model and --out.
BATCH = "micro_batch sequence_length micro_steps data"
BENCHMARKS: dict[str, tuple[Callable[[Namespace, str], None], str]] = {
    "step": (bench_step, f"{BATCH} precision recompute contenders seconds turn_seconds twin_mode"),
    "step on a CPU": (bench_cpu_step, "micro_batch sequence_length rounds"),
    "loss": (bench_loss, f"{BATCH} recompute contenders steps learning_rate"),
    "ladder": (bench_ladder, f"{BATCH} precision recompute seconds"),
    "kernels": (bench_kernels, ""),
    "sampling": (bench_sampling, "micro_batch precision contenders"),
    "fp8": (bench_fp8, ""),
}
