"""Step 18: eight bits and a scale."""

import math

import torch

from handgrad.joins.fp8.formats import E4M3, largest_number, largest_scale
from handgrad.tools.climb import Case

TOLERANCE = 1e-6


def cases(draw):
    """Just below and just above a power of two, at 1.75 times one, and a tensor of zeros before; x exceeds most of them."""
    amaxes = (1.7, 3.7, 0.00175, 448.0, 0.0, 2.0**-9, 1000.0)
    for size, amax in zip((1.0, 40.0, 0.001, 1.0, 1.0, 0.1, 600.0), amaxes, strict=True):
        yield Case({}, x=(draw(5, 7) * size).float(), amax=amax)


def answers(c):
    c.scale = largest_scale(c.amax, E4M3, 0) if c.amax else 1.0
    c.most = largest_number(E4M3)
    return {"scale": torch.tensor(c.scale), "q": quantised(c, c.scale)}


def call(function, c):
    found = function(c.x.clone(), c.amax)
    return found[::-1] if isinstance(found, tuple) else found


def quantised(c, scale, most=448.0, kind=E4M3):
    return (c.x * scale).clamp(-most, most).to(kind)


def both(words, scale):
    return (
        ("scale", words, lambda c: torch.tensor(scale(c), dtype=torch.float32)),
        ("q", words, lambda c: quantised(c, scale(c))),
    )


def guarded(formula):
    """A formula of amax, with the right answer at 0."""
    return lambda c: formula(c) if c.amax else 1.0


def whole(c, value):
    return 2.0**value if c.amax else 1.0


MISTAKES = (
    *both("is no power of two: 448 / amax rounds every number a second time", guarded(lambda c: 448 / c.amax)),
    *both("is one power of two too large: numbers near amax are cut off at 448", lambda c: whole(c, math.ceil(math.log2(448 / (c.amax or 1))))),
    *both("rounds the exponent to the nearest, and so cuts numbers near amax off half of the time", lambda c: whole(c, round(math.log2(448 / (c.amax or 1))))),
    *both("leaves a power of two unused: 448 is 1.75 * 2^8, not 2^8", lambda c: whole(c, 8 - math.ceil(math.log2(c.amax or 1)))),
    *both("takes 57344, the largest number of e5m2", lambda c: whole(c, math.floor(math.log2(57344 / (c.amax or 1))))),
    *both("takes 240 for the largest number, as in another e4m3", lambda c: whole(c, math.floor(math.log2(240 / (c.amax or 1))))),
    *both("is the inverse: x is multiplied by it", lambda c: 1 / c.scale),
    *both("reads x's own largest number: the step before's amax is what a kernel has in time", lambda c: largest_scale(c.x.abs().max().item(), E4M3, 0)),
    *both("is 1 always", lambda c: 1.0),
    *both("keeps a margin of one power of two, which was not asked for", lambda c: whole(c, math.log2(c.scale) - 1)),
    ("scale", "is infinite or undefined for an amax of 0", lambda c: torch.tensor(c.scale if c.amax else math.inf)),
    ("scale", "is 0 for an amax of 0: it must be 1", lambda c: torch.tensor(c.scale if c.amax else 0.0)),
    ("q", "is clamped at amax, before the scale: clamp at 448 after it", lambda c: (c.x.clamp(-c.amax, c.amax) * c.scale).to(E4M3)),
    ("q", "is clamped at 448 before the scale: clamp after it", lambda c: (c.x.clamp(-448, 448) * c.scale).clamp(-448, 448).to(E4M3)),
    ("q", "is clamped to 256", lambda c: quantised(c, c.scale, 256.0)),
    ("q", "is rounded to whole numbers first: the format rounds by itself", lambda c: (c.x * c.scale).round().clamp(-448, 448).to(E4M3)),
    ("q", "loses the sign", lambda c: (c.x.abs() * c.scale).clamp(max=448).to(E4M3)),
)  # fmt: skip
