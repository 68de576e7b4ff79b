"""Lists the parts of this machine that training needs and runs each once; for a missing part, names the remedy."""

import re
import shutil
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from handgrad.data.tokenizer_loading import load_tokenizer
from handgrad.errors import HandgradError
from handgrad.format import human_bytes
from handgrad.joins.dropout.bind import dropout_operations
from handgrad.machine import devices, threads
from handgrad.machine.backend import REQUIRED, choose_backend
from handgrad.machine.gpus import BF16_CAPABILITY
from handgrad.ops import reference
from handgrad.run.assemble import assemble
from handgrad.run.resolve import resolve
from handgrad.settings.config import RunConfig
from handgrad.tools.kernel_checks.fp8 import OLDEST_FP8, check_fp8_kernels
from handgrad.tools.kernel_checks.operations import CASES, check_dropout_kernels, check_kernels
from handgrad.tools.profile import MadeUpTokens
from handgrad.tools.speeds import gemm_flops

# On an NVIDIA GPU. Package: its benefit.
OPTIONAL = {
    "nvidia-cudnn-frontend": "with it, heads of more than 64 channels use cuDNN's attention, which is faster than Triton's",
    "nvidia-ml-py": "with it, metrics and benchmarks show power, clock and temperature of the GPU",
}
DRIVER = Path("/proc/driver/nvidia/version")


def examine() -> Iterator[tuple[bool, str]]:
    """Yields (ok, line) for each part."""
    device = devices.resolve_device("auto")
    yield True, f"device {devices.describe(device)}, the choice of --device auto"
    yield True, threads.describe(torch.get_num_threads())
    if device.type == "cpu" and torch.version.cuda is None and DRIVER.exists():
        yield False, "there is an NVIDIA driver, but this torch is a CPU build; install a CUDA build of torch"
    if (memory := devices.available_bytes(device)) is not None:
        yield True, f"{human_bytes(memory)} of memory free on {device.type}"
    yield True, f"{human_bytes(shutil.disk_usage('.').free)} of disk free here"
    for precision in ("fp32", half_precision(device)):
        rate = gemm_flops(device, devices.DTYPES[precision])
        note = ""
        if precision == "bf16" and device.type == "cpu" and rate < 2 * gemm_flops(device, torch.float32):
            note = "; this processor has no fast bf16 instructions, train in fp32"
        yield True, f"{precision} GEMMs run at {rate / 1e9:.0f} GFLOP/s{note}"
    yield from examine_gpu(device)
    checks = {
        f"forward and backward, fp32 and {half_precision(device)}": check_operations,
        "GPT-2 tokenizer": check_tokenizer,
    }
    for name, check in checks.items():
        try:
            check()
            yield True, f"{name} works"
        except (HandgradError, RuntimeError, OSError, AssertionError) as error:
            yield False, f"{name} failed: {error}"


def examine_package(package: str, remedy: str, *, optional: bool = False) -> tuple[bool, str]:
    try:
        return True, f"{package} {version(package)}"
    except PackageNotFoundError:
        return optional, f"{package} is not installed; {remedy}"


def half_precision(device: torch.device) -> str:
    """The 16-bit precision to train in: fp16 on GPUs before Ampere, else bf16."""
    return "fp16" if device.type == "cuda" and torch.cuda.get_device_capability(device) < BF16_CAPABILITY else "bf16"


def examine_gpu(device: torch.device) -> Iterator[tuple[bool, str]]:
    """Checks the driver and the kernels' packages and libraries, and launches each kernel."""
    if device.type != "cuda":
        others = "torch's own kernels" if device.type == "cpu" else "the reference operations"
        yield True, f"the kernels need an NVIDIA GPU; on {device.type} runs use {others}"
        return
    capability = torch.cuda.get_device_capability(device)
    yield True, f"driver {driver_version()}, CUDA {torch.version.cuda}, compute capability {dotted(capability)}"
    for package in REQUIRED.values():
        yield examine_package(package, "try: pip install 'handgrad[gpu]'")
    for package, benefit in OPTIONAL.items():
        yield examine_package(package, f"{benefit} (pip install {package})", optional=True)
    try:
        kernels = choose_backend("kernels", device)
        used = kernels.versions()
    except HandgradError as error:
        yield False, str(error)
        return
    yield True, f"GEMMs by {used['products']}; attention by {used['attention']}"
    yield True, kernels.tuning()
    dtype = devices.dtype_of(device, half_precision(device))
    devices.set_arithmetic(device, half_precision(device))
    # Muon's GEMMs are in bf16, which older GPUs lack.
    cases = {line: make for line, make in CASES.items() if capability >= BF16_CAPABILITY or not line.startswith("muon")}
    yield from check_kernels(kernels, device, dtype, cases)
    yield from check_dropout_kernels(dropout_operations(kernels), device, dtype)
    if capability < BF16_CAPABILITY:
        yield True, f"--optimizer muon needs bf16, which compute capability {dotted(capability)} lacks: train with adamw"
    if capability < OLDEST_FP8:
        needed = f"compute capability {dotted(OLDEST_FP8)} (Ada, Hopper or newer)"
        yield True, f"--precision fp8 needs {needed}, this GPU has {dotted(capability)}: train in {half_precision(device)}"
    else:
        yield from check_fp8_kernels(choose_backend("kernels", device, "fp8"), device)


def dotted(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"


def driver_version() -> str:
    """The driver's version, from the kernel module's file, like '570.86.15'."""
    match = re.search(r"\s(\d+\.\d+(\.\d+)?)\s", DRIVER.read_text(encoding="utf-8")) if DRIVER.exists() else None
    return match[1] if match else "of unknown version"


def check_operations() -> None:
    """Runs a tiny model forward and backward in both precisions on this machine's device."""
    device = devices.resolve_device("auto")
    for precision in ("fp32", half_precision(device)):
        sizes = {"num_layers": 2, "num_heads": 2, "channels": 32, "sequence_length": 16}
        config = RunConfig(precision=precision, micro_batch=2, tokens_per_step=32, **sizes)
        training = assemble(resolve(config, 257, device=device, ops=reference), MadeUpTokens(257, seed=0))
        training.stepper.accumulate_gradients(0)
        state = training.state
        assert torch.isfinite(state.gradients).all(), f"non-finite gradients in {precision}"
        assert state.gradients.abs().max() > 0, f"no gradients in {precision}"


def check_tokenizer() -> None:
    expected = [15496, 995, 11, 340, 338, 5433, 0]
    tokens = load_tokenizer("gpt2").encode("Hello world, it's 42!").tolist()
    assert tokens == expected, f"expected {expected}, found {tokens}"
