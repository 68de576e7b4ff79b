"""The machine a run sees: its device, what that device can do, and how it is described."""

import platform
from pathlib import Path

import torch

from handgrad.errors import UsageError

# Of weights and activations; in fp8 they stay bf16 beside what the products read.
DTYPES = {
    "fp32": torch.float32,
    "tf32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8": torch.bfloat16,
}

# Dense bf16 peak in FLOP/s, by the data sheets, for GPUs whose torch name contains the key (the longest match counts).
# MFU is printed only for these; every other device gets GFLOP/s.
PEAK_BF16_FLOPS = {
    "H200": 989.4e12,
    "H100": 989.4e12,
    "H100 PCIe": 756e12,
    "A100": 312e12,
    "L40S": 362e12,
    "RTX 4090": 165.2e12,
    "RTX 3090": 71e12,
}


def resolve_device(name: str, local_rank: int = 0) -> torch.device:
    """The torch device for `--device`, of several GPUs the one for this rank of the machine, made the current one; raises
    `UsageError` when it was asked for and is not there."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise UsageError("device cuda asked for, but torch finds no CUDA GPU; use --device cpu or install a CUDA build")
    if name == "mps" and not torch.backends.mps.is_available():
        raise UsageError("device mps asked for, but torch finds no Apple GPU; use --device cpu")
    if name == "cuda" and local_rank:
        if local_rank >= torch.cuda.device_count():
            raise UsageError(
                f"rank {local_rank} of this machine needs a GPU of its own, torch finds {torch.cuda.device_count()};"
                " start as many processes as there are GPUs"
            )
        torch.cuda.set_device(local_rank)
        return torch.device("cuda", local_rank)
    return torch.device(name)


def use_precision(device: torch.device, precision: str) -> torch.dtype:
    """The dtype of weights and activations; sets what torch keeps as global switches (TF32, bf16 reductions)."""
    if precision == "tf32" and device.type != "cuda":
        raise UsageError(f"precision tf32 exists on NVIDIA GPUs only, the device is {device.type}; use fp32 or bf16")
    if device.type == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
        if precision in ("bf16", "tf32", "fp8") and torch.cuda.get_device_capability(device) < (8, 0):
            raise UsageError(f"{torch.cuda.get_device_name(device)} has no {precision}; use --precision fp16 or fp32")
        capability, name = torch.cuda.get_device_capability(device), torch.cuda.get_device_name(device)
        if precision == "fp8" and capability < (8, 9):
            raise UsageError(f"{name} has no fp8 (Ada and Hopper have); use --precision bf16")
        if precision == "fp8" and capability[0] == 10:  # Triton 3.6 and 3.7 fail on fp8 attention's kernels there
            raise UsageError(f"precision fp8 does not run on {name} yet: its kernels do not compile; use --precision bf16")
    return DTYPES[precision]


def synchronize(device: torch.device) -> None:
    """Waits for the device, so that a clock read next measures finished work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def processor_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def describe(device: torch.device) -> str:
    """'cpu: AMD EPYC, 2 threads' or 'cuda: NVIDIA H200, 141 GB'."""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return f"cuda: {properties.name}, {properties.total_memory / 1e9:.0f} GB"
    if device.type == "mps":
        return f"mps: {processor_name()}"
    return f"cpu: {processor_name()}, {torch.get_num_threads()} threads"


def peak_flops(device: torch.device) -> float | None:
    """The device's dense bf16 peak in FLOP/s, or None where no data sheet is on file."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    matches = [key for key in PEAK_BF16_FLOPS if all(word in name for word in key.split())]
    return PEAK_BF16_FLOPS[max(matches, key=len)] if matches else None


def available_bytes(device: torch.device) -> int | None:
    """Free memory of the device in bytes, or None where it cannot be told."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    info = Path("/proc/meminfo")
    if device.type == "cpu" and info.exists():
        for line in info.read_text(encoding="utf-8").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return None
