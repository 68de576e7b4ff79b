"""The CPU, as the system describes it."""

import platform
from pathlib import Path

CPU_INFO = "/proc/cpuinfo"


def value(file: str, key: str) -> str:
    """The first value of `key` in a file of "key: value" lines; "" if there is none."""
    path = Path(file)
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith(key)), "")


def name() -> str:
    return value(CPU_INFO, "model name") or platform.processor() or platform.machine()


def is_intel() -> bool:
    """True for Intel's CPUs on Linux, the systems for which torch's wheels carry MKL."""
    return value(CPU_INFO, "vendor_id") == "GenuineIntel"


def multiplies_bf16() -> bool:
    """True for a CPU with instructions for GEMMs in bf16: AVX-512 BF16 or AMX on Linux; elsewhere nothing says so."""
    return not {"avx512_bf16", "amx_bf16"}.isdisjoint(value(CPU_INFO, "flags").split())
