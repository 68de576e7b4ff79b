"""The hash of `handgrad.ops.hashing` in kernels."""

import triton
import triton.language as tl

from handgrad.ops import hashing

WEYL = tl.constexpr(hashing.WEYL)


@triton.jit
def mixed(x):
    """Hashes uint32 numbers by MurmurHash3's finaliser."""
    x = x ^ (x >> 16)
    x = x * 0x85EBCA6B
    x = x ^ (x >> 13)
    x = x * 0xC2B2AE35
    return x ^ (x >> 16)
