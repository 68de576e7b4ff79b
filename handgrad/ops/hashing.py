"""Random numbers without a generator: each is a hash of its index, so it does not matter who draws it, or when.

The hash is the 32-bit finaliser of MurmurHash3 (Appleby 2011), a bijection. It takes an index times Weyl's constant, 2^32
over the golden ratio, plus a key.
"""

from typing import TypeVar

from torch import Tensor

BITS32 = 0xFFFFFFFF
WEYL = 0x9E3779B1
FIRST_MOMENT, SECOND_MOMENT = 0x6D6D6D6D, 0x76767676  # "m", "v": XORed into the seed, so each gets its own random bits

Number = TypeVar("Number", int, Tensor)


def mixed(x: Number) -> Number:
    """Hashes 32-bit numbers; a tensor holds them in int64."""
    x = x ^ (x >> 16)
    x = (x * 0x85EBCA6B) & BITS32
    x = x ^ (x >> 13)
    x = (x * 0xC2B2AE35) & BITS32
    return x ^ (x >> 16)
