"""GPU data sheets: memory, arithmetic, bandwidth, power. The machine need not have these GPUs."""

import re
from typing import NamedTuple

from handgrad.errors import UsageError

Capability = tuple[int, int]

BF16_CAPABILITY, FP8_CAPABILITY = (8, 0), (8, 9)  # Ampere; Ada
HOPPER = (9, 0)


class Gpu(NamedTuple):
    """A GPU of the table below. Its rates are for dense GEMMs with float32 accumulators, never for sparse ones."""

    title: str
    capability: Capability
    memory_gib: float  # as torch reports it
    half_teraflops: float  # bf16, or fp16 on a GPU without bf16
    fp8_teraflops: float  # 0: none
    fp32_teraflops: float  # of the plain units, without TF32
    terabytes_per_second: float
    watts: int  # of the board
    link_gigabytes_per_second: float  # to its neighbours, one way: NVLink, or PCIe
    torch_name: str = ""  # words of the GPU's name in torch; handgrad prints MFU only for GPUs that have them

    @property
    def memory_bytes(self) -> int:
        return int(self.memory_gib * 2**30)

    @property
    def host_gigabytes_per_second(self) -> float:
        """Bandwidth of PCIe 3, 4 or 5 with 16 lanes, one way."""
        return 16 if self.capability < (8, 0) else 32 if self.capability < HOPPER else 64

    def flops(self, precision: str) -> float:
        """Peak FLOP/s of dense GEMMs. TF32 runs at half the rate of bf16 on all of them."""
        rates = {"fp8": self.fp8_teraflops, "fp32": self.fp32_teraflops, "tf32": self.half_teraflops / 2}
        return 1e12 * rates.get(precision, self.half_teraflops)


# Data sheets: https://www.nvidia.com/en-us/data-center/{dgx-b200,h200,h100,a100,l40s,l4,tesla-t4}/. From Ada on they give
# peaks with sparsity; the table has half of them. GeForce and A6000: the white papers of GA102, AD102 and GB202, rows with
# FP32 accumulate.
GPUS = {
    "b200": Gpu("B200", (10, 0), 178.3, 2250, 4500, 75, 8.0, 1000, 900),
    "h200": Gpu("H200", HOPPER, 139.8, 989.4, 1978.9, 67, 4.8, 700, 450, "H200"),
    "h100": Gpu("H100 SXM", HOPPER, 79.2, 989.4, 1978.9, 67, 3.35, 700, 450, "H100"),
    "h100-pcie": Gpu("H100 PCIe", HOPPER, 79.2, 756, 1513, 51, 2.0, 350, 64, "H100 PCIe"),
    "a100": Gpu("A100 80GB SXM", (8, 0), 79.2, 312, 0, 19.5, 2.039, 400, 300, "A100"),
    "a100-40gb": Gpu("A100 40GB SXM", (8, 0), 39.4, 312, 0, 19.5, 1.555, 400, 300),
    "l40s": Gpu("L40S", (8, 9), 44.4, 362, 733, 91.6, 0.864, 350, 32, "L40S"),
    "l4": Gpu("L4", (8, 9), 22.0, 121, 242, 30.3, 0.3, 72, 32),
    "a6000": Gpu("RTX A6000", (8, 6), 47.4, 154.8, 0, 38.7, 0.768, 300, 32),
    "5090": Gpu("RTX 5090", (12, 0), 31.3, 209.5, 419, 104.8, 1.792, 575, 64),
    "4090": Gpu("RTX 4090", (8, 9), 23.5, 165.2, 330.3, 82.6, 1.008, 450, 32, "RTX 4090"),
    "3090": Gpu("RTX 3090", (8, 6), 23.6, 71, 0, 35.6, 0.936, 350, 32, "RTX 3090"),
    "t4": Gpu("T4", (7, 5), 14.6, 65, 0, 8.1, 0.32, 70, 16),
}


def short_name(name: str) -> str:
    """The table key for a GPU name, as people write it (RTX 4090, NVIDIA H100-SXM5, A100-80GB) or as torch reports it."""
    short = re.sub(r"nvidia|geforce|rtx|tesla|[ _-]*80 ?gb|[ _-]*sxm[0-9]?|[ _-]*hbm[0-9]e?", "", name.lower())
    return "-".join(re.split(r"[ _-]+", short.strip(" _-")))


def auto_precision(capability: Capability) -> str:
    """The precision that "auto" picks on a GPU."""
    return "bf16" if capability >= BF16_CAPABILITY else "fp16"


def check_precision(name: str, capability: Capability, precision: str) -> None:
    """Raises `UsageError` for a precision that the GPU called `name` lacks."""
    if precision in ("bf16", "tf32", "fp8") and capability < BF16_CAPABILITY:
        raise UsageError(f"{name} has no {precision}; use --precision fp16 or fp32")
    if precision == "fp8" and capability < FP8_CAPABILITY:
        raise UsageError(f"{name} has no fp8 (Ada and Hopper have); use --precision bf16")
    if precision == "fp8" and capability[0] == 10:  # Triton 3.6 and 3.7 fail on fp8 attention's kernels there
        raise UsageError(f"precision fp8 does not run on {name} yet: its kernels do not compile; use --precision bf16")


def check_optimizer(name: str, capability: Capability, optimizer: str) -> None:
    """Raises `UsageError` for an optimizer that does not run on the GPU called `name`."""
    if optimizer == "muon" and capability < BF16_CAPABILITY:
        raise UsageError(f"{name} has no bf16, in which optimizer muon computes polar factors; use --optimizer adamw")
