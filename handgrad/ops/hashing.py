"""Random numbers without a generator: a number's own place is hashed, so it does not matter who draws it, or when.

The hash is the finaliser of MurmurHash3 (Appleby 2011), of 32 bits; it maps no two numbers to one. Places in a row are
multiplied by Weyl's constant, 2^32 over the golden ratio, and a key is added, before they are hashed.
"""

from typing import TypeVar

from torch import Tensor

BITS32 = 0xFFFFFFFF
WEYL = 0x9E3779B1
FIRST_MOMENT, SECOND_MOMENT = 0x6D6D6D6D, 0x76767676  # "m", "v": XORed into the seed, for random bits of their own

Number = TypeVar("Number", int, Tensor)


def mixed(x: Number) -> Number:
    """The hash of 32-bit numbers; a tensor holds them in int64."""
    x = x ^ (x >> 16)
    x = (x * 0x85EBCA6B) & BITS32
    x = x ^ (x >> 13)
    x = (x * 0xC2B2AE35) & BITS32
    return x ^ (x >> 16)
