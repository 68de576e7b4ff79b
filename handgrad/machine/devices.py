"""The device of a run: its choice, precision, memory, and description."""

import ctypes
import sys
from typing import Any

import torch
from torch import Tensor

from handgrad.errors import UsageError
from handgrad.machine import gpus, processor
from handgrad.machine.gpus import GPUS

# Dtypes of weights and activations. In fp8 they stay bf16, and GEMMs read fp8 copies.
DTYPES = {
    "fp32": torch.float32,
    "tf32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8": torch.bfloat16,
}

# Dense bf16 peak in FLOP/s from the data sheets, for GPUs whose torch name has the key's words (the longest match counts).
# handgrad prints MFU only for these; every other device gets GFLOP/s.
PEAK_BF16_FLOPS = {gpu.torch_name: gpu.flops("bf16") for gpu in GPUS.values() if gpu.torch_name}
OF_VARIANTS = {"NVL", "Laptop", "Ti", "D", "SUPER", "MIG"}  # in the names of GPUs with a data sheet of their own


def resolve_device(name: str, local_rank: int = 0) -> torch.device:
    """The torch device for `--device`. With several GPUs it picks the one of this local rank and makes it current.
    Raises `UsageError` for a device that the machine lacks."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise UsageError("expected a CUDA GPU for device cuda, torch finds none; use --device cpu or install a CUDA build")
    if name == "mps" and not torch.backends.mps.is_available():
        raise UsageError("expected an Apple GPU for device mps, torch finds none; use --device cpu")
    if name == "cuda" and local_rank:
        if local_rank >= torch.cuda.device_count():
            raise UsageError(
                f"rank {local_rank} of this machine needs a GPU of its own, torch finds {torch.cuda.device_count()};"
                " start as many processes as there are GPUs"
            )
        torch.cuda.set_device(local_rank)
        return torch.device("cuda", local_rank)
    return torch.device(name)


def gpu_count() -> int:
    """CUDA GPUs that this process may use."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def auto_precision(device: torch.device) -> tuple[str, str]:
    """The precision that "auto" picks on the device, and the reason in a few words."""
    if device.type != "cuda":
        return "fp32", f"on a {'CPU' if device.type == 'cpu' else 'GPU of this kind'}"
    precision = gpus.auto_precision(torch.cuda.get_device_capability(device))
    return precision, "which this GPU computes in" if precision == "bf16" else "as this GPU has no bf16"


def resolve_precision(name: str, device: torch.device) -> str:
    """The precision for a name; resolves "auto"."""
    return auto_precision(device)[0] if name == "auto" else name


def precision_note(device: torch.device, precision: str) -> str:
    """A note that compares a precision with the choice of "auto": '(auto, on a CPU)', '(auto would take bf16, ...)'."""
    choice, reason = auto_precision(device)
    if precision == choice:
        bf16 = device.type == "cpu" and processor.multiplies_bf16()
        return f"(auto, {reason}{' that multiplies bf16 as well: `handgrad doctor` times both' if bf16 else ''})"
    slow = "; fp16 is slow on a CPU" if (device.type, precision) == ("cpu", "fp16") else ""
    return f"(auto would take {choice}, {reason}{slow})"


def dtype_of(device: torch.device, precision: str) -> torch.dtype:
    """Dtype of weights and activations. Raises `UsageError` for a precision that the device lacks."""
    if precision == "tf32" and device.type != "cuda":
        raise UsageError(f"precision tf32 exists on NVIDIA GPUs only, the device is {device.type}; use fp32 or bf16")
    if device.type == "cuda":
        gpus.check_precision(torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device), precision)
    return DTYPES[precision]


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Accumulator dtype for a tensor dtype: float32, or float64 for float64. Statistics, gradient accumulators, master
    weights, and formulas that round once at the end use it."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def set_arithmetic(device: torch.device, precision: str) -> None:
    """Sets torch's switches for GEMMs (TF32, 16-bit reductions, float32 on a CPU). They hold for the whole process, so
    only code that launches operations calls this; code that only plans does not."""
    if device.type == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    if device.type == "cpu":  # after set_float32_matmul_precision("medium") oneDNN would round float32 to bf16
        onednn: Any = torch.backends.mkldnn
        onednn.matmul.fp32_precision = "ieee"


def check_optimizer(device: torch.device, optimizer: str) -> None:
    """Raises `UsageError` for an optimizer that does not run on the device."""
    if device.type == "cuda":
        gpus.check_optimizer(torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device), optimizer)


M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # of glibc's mallopt


def keep_freed_memory(device: torch.device) -> None:
    """On a CPU, makes glibc keep the memory of freed tensors for the next ones. By default glibc returns large blocks to
    the kernel, which must zero the pages of the next tensor (https://man7.org/linux/man-pages/man3/mallopt.3.html). Other C
    libraries stay as they are."""
    if device.type == "cpu" and sys.platform == "linux" and (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)):
        mallopt(M_MMAP_MAX, 0)
        mallopt(M_TRIM_THRESHOLD, -1)


def synchronize(device: torch.device) -> None:
    """Waits until the device has finished its work, so that a clock measures all of it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def host_buffers(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """CPU buffers to fill, shaped like these tensors: pinned for a CUDA device; on a CPU, the tensors themselves."""
    kind = next(iter(tensors.values())).device.type
    if kind == "cpu":
        return tensors
    return {name: torch.empty_like(t, device="cpu", pin_memory=kind == "cuda") for name, t in tensors.items()}


def describe(device: torch.device) -> str:
    """'cpu: AMD EPYC, 2 threads' or 'cuda: NVIDIA H200, 141 GB'."""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return f"cuda: {properties.name}, {properties.total_memory / 1e9:.0f} GB"
    if device.type == "mps":
        return f"mps: {processor.name()}"
    return f"cpu: {processor.name()}, {torch.get_num_threads()} threads"


def peak_flops(device: torch.device) -> float | None:
    """The device's dense bf16 peak in FLOP/s, or None where no data sheet is on file."""
    if device.type != "cuda":
        return None
    words = {*torch.cuda.get_device_name(device).replace("-", " ").split()}
    matches = [key for key in PEAK_BF16_FLOPS if words.issuperset(key.split()) and words.isdisjoint(OF_VARIANTS)]
    return PEAK_BF16_FLOPS[max(matches, key=len)] if matches else None


def available_bytes(device: torch.device) -> int | None:
    """Free memory of the device in bytes, None if unknown. On a CPU it respects the limits on this process."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    if device.type != "cpu":
        return None
    kibibytes = processor.value("/proc/meminfo", "MemAvailable:")
    return min([*([int(kibibytes.split()[0]) * 1024] if kibibytes else []), *processor.memory_left()], default=None)
