"""What this machine has, what handgrad will use, and what to do about what is missing. Everything named is run once."""

import platform
import shutil
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

import handgrad
from handgrad import world
from handgrad.config import RunConfig
from handgrad.data.tokenizer import load_tokenizer
from handgrad.errors import HandgradError
from handgrad.model import transformer
from handgrad.ops import reference
from handgrad.plan import product_rate
from handgrad.training.console import human_bytes
from handgrad.training.state import allocate_state

PACKAGES = (
    "torch",
    "numpy",
    "tiktoken",
    "tokenizers",
    "safetensors",
    "huggingface_hub",
    "pyarrow",
    "rich",
    "matplotlib",
)


def examine() -> Iterator[tuple[bool, str]]:
    """(whether it is well, line) for each thing looked at."""
    yield True, f"handgrad {handgrad.__version__}, Python {platform.python_version()}, {platform.platform()}"
    for package in PACKAGES:
        try:
            yield True, f"{package} {version(package)}"
        except PackageNotFoundError:
            yield False, f"{package} is not installed; try: pip install {package}"
    device = world.resolve_device("auto")
    yield True, f"device {world.describe(device)}: this is what --device auto takes"
    if device.type == "cpu" and torch.version.cuda is None and Path("/proc/driver/nvidia/version").exists():
        yield False, "there is an NVIDIA driver, but this torch is a CPU build; install a CUDA build of torch"
    memory = world.available_bytes(device)
    if memory is not None:
        yield True, f"{human_bytes(memory)} of memory free on {device.type}"
    yield True, f"{human_bytes(shutil.disk_usage('.').free)} of disk free here"
    for precision in ("fp32", "bf16"):
        rate = product_rate(device, world.DTYPES[precision])
        note = ""
        if precision == "bf16" and device.type == "cpu" and rate < 2 * product_rate(device, torch.float32):
            note = "; this processor has no bf16 instructions worth using, train in fp32"
        yield True, f"{precision} products run at {rate / 1e9:.0f} GFLOP/s{note}"
    for name, attempt in CHECKS.items():
        try:
            attempt()
            yield True, f"{name} works"
        except (HandgradError, RuntimeError, OSError, AssertionError) as error:
            yield False, f"{name} failed: {error}"


def check_operations() -> None:
    """One tiny model, forward and backward, in both precisions on this machine's device."""
    device = world.resolve_device("auto")
    for precision in ("fp32", "bf16"):
        dtype = world.use_precision(device, precision)
        config = RunConfig(
            num_layers=2,
            num_heads=2,
            channels=32,
            sequence_length=16,
            micro_batch=2,
            tokens_per_step=32,
        )
        state = allocate_state(config, config.shape(257), dtype, device, reference)
        transformer.loss_and_gradients(
            reference,
            state.weights,
            state.weight_gradients,
            state.activations,
            state.loss_scale[:1],
            vocab_size=257,
            recompute=0,
        )
        assert torch.isfinite(state.gradients).all(), f"non-finite gradients in {precision}"
        assert state.gradients.abs().max() > 0, f"no gradients in {precision}"


def check_tokenizer() -> None:
    expected = [15496, 995, 11, 340, 338, 5433, 0]
    found = load_tokenizer("gpt2").encode("Hello world, it's 42!").tolist()
    assert found == expected, f"expected {expected}, found {found}"


CHECKS: dict[str, Callable[[], None]] = {
    "forward and backward, fp32 and bf16": check_operations,
    "GPT-2 tokenizer": check_tokenizer,
}
