"""Checks the promises of sums in a fixed order, for either backend, on a CPU and on a GPU."""

import functools
import math
import operator
from types import ModuleType

import torch
from torch import Tensor

from handgrad import ops
from handgrad.ops import CONTROLS
from tests.kernels.memory_checks import Draw, nan

ROWS = (2, 4, 16, 32)
SIZES = (1, 131, 9001)


def rows_apart(rows: Tensor) -> Tensor:
    """The same rows, each in one piece, but with something between them."""
    apart = torch.full((rows.shape[0], rows.shape[1] + 37), math.nan, dtype=rows.dtype, device=rows.device)
    apart[:, 5 : 5 + rows.shape[1]] = rows
    return apart[:, 5 : 5 + rows.shape[1]]


def different_sizes(draw: Draw, P: int, n: int) -> Tensor:
    """Numbers whose sums depend on the order, with ties of bf16 among them."""
    rows = draw.normal(P, n) * torch.exp2(draw.normal(P, n) * 3)
    rows[:, ::3] = (rows[:, ::3].bfloat16().float() * (1 + 2.0**-8)).to(rows.dtype)
    return rows


def level_by_level(pieces: Tensor, out: Tensor, rounded: bool) -> Tensor:
    """The tree from its leaves to its root, instead of from its root."""
    rows = list(pieces)
    while len(rows) > 1:
        if rounded:
            rows = [row.bfloat16() for row in rows]
        rows = [row.to(out.dtype) for row in rows]
        rows = [a + b for a, b in zip(rows[::2], rows[1::2], strict=True)]
    return rows[0]


def same_bits(a: Tensor, b: Tensor) -> bool:
    integer = torch.int64 if a.dtype == torch.float64 else torch.int32
    return torch.equal(a.view(integer), b.view(integer))


def check_tree(backend: ModuleType, draw: Draw, P: int, n: int, rounded: bool, sent: bool = False) -> None:
    """The explicit tree, to the bit; the rows stay, and what lies behind `out`. `sent`: pieces of bf16."""
    rows = different_sizes(draw, P, n)
    pieces = rows_apart(rows.bfloat16() if sent else rows)
    before, longer = pieces.clone(), nan(rows, n + 20_000)
    out = longer[:n]
    backend.tree_sum(out, pieces, rounded=rounded)
    assert longer[n:].isnan().all()
    assert same_bits(out, level_by_level(pieces, out, rounded)) and torch.equal(pieces, before)
    if n > 100 and not (sent and P == 2):  # these are rounded already
        assert rounded != torch.equal(out, level_by_level(pieces, out, False)), "numbers that rounding does not change"
    if n > 100 and P > 2:
        one_by_one = rows[0]
        for row in rows[1:]:
            one_by_one = one_by_one + row
        assert not torch.equal(out, one_by_one), "numbers that add up to the same in every order show nothing"


def check_aliasing(backend: ModuleType, draw: Draw, P: int, rounded: bool) -> None:
    """`out` may be any of the rows; nothing else of the buffer that they lie in changes."""
    for row in {0, 1, P - 1}:
        rows = different_sizes(draw, P, 1031)
        pieces = rows_apart(rows)
        expected = level_by_level(pieces, pieces[0], rounded)
        backend.tree_sum(pieces[row], pieces, rounded=rounded)
        rows[row] = expected
        assert torch.equal(pieces, rows) and pieces._base is not None
        assert pieces._base.isnan().sum() == 37 * P


def check_cuts(backend: ModuleType, draw: Draw, world: int, rounded: bool) -> None:
    """Eight rows on one device, or on several that send a subtree's sum each: as bf16 if `rounded`."""
    rows = different_sizes(draw, 8, 1031)
    whole, out = nan(rows, 1031), nan(rows, 1031)
    backend.tree_sum(whole, rows, rounded=rounded)
    sums = nan(rows, world, 1031)
    for rank in range(world):
        own = rows[rank * 8 // world : (rank + 1) * 8 // world]
        if len(own) > 1:
            backend.tree_sum(sums[rank], own, rounded=rounded)
        else:
            sums[rank] = own[0]
    backend.tree_sum(out, sums.bfloat16() if rounded else sums, rounded=rounded)
    assert same_bits(out, whole)


def check_not_finite(backend: ModuleType, draw: Draw, rounded: bool) -> None:
    """NaN of every kind, infinities, and numbers that bf16 rounds up to infinity."""
    rows = torch.zeros(4, 6, device=draw.device)
    rows[3] = torch.tensor([math.nan, math.inf, -math.inf, 3.4028e38, math.inf, 0.0], device=draw.device)
    rows[0, 4] = -math.inf
    rows.view(torch.int32)[2, 5] = 0x7FFFFFFF  # rounding its bits would carry into the sign: -0
    out = nan(rows, 6)
    backend.tree_sum(out, rows, rounded=rounded)
    largest = math.inf if rounded else 3.4028e38
    assert out.isnan().tolist() == [True, False, False, False, True, True]
    torch.testing.assert_close(out[1:4].tolist(), [math.inf, -math.inf, largest], rtol=1e-6, atol=0)


# Checksum.


def words_of(flat: Tensor) -> Tensor:
    """The bits, in integers that may be flipped and exchanged."""
    return flat.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.itemsize])


def numbers(draw: Draw, dtype: torch.dtype, n: int) -> Tensor:
    return draw.integers(2**62, n) * 2 + 1 if dtype == torch.int64 else draw.normal(n, dtype=dtype)


def checksum(backend: ModuleType, flat: Tensor) -> int:
    out = torch.full((1,), 77, dtype=torch.int64, device=flat.device)
    backend.checksum(out, flat)
    return int(out.item())


def murmur(x: int) -> int:
    """MurmurHash3's finaliser."""
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
        x = (x ^ (x >> shift)) * factor % 2**32
    return x


def check_checksum(backend: ModuleType, draw: Draw, dtype: torch.dtype, n: int) -> None:
    """The formula in Python's integers."""
    flat = numbers(draw, dtype, n)
    width = min(flat.itemsize, 4)
    data = words_of(flat).cpu().numpy().tobytes()
    words = [int.from_bytes(data[i : i + width], "little") for i in range(0, len(data), width)]
    assert checksum(backend, flat) % 2**64 == sum((2 * i + 1) * murmur(w) for i, w in enumerate(words)) % 2**64


def check_checksum_sees(backend: ModuleType, draw: Draw, dtype: torch.dtype) -> None:
    """Every single flipped bit, of the first number, the last and one between; and two exchanged."""
    flat = numbers(draw, dtype, 1031)
    words, found = words_of(flat), {checksum(backend, flat)}
    places, bits = (0, 500, 1030), flat.itemsize * 8
    for place in places:
        for bit in range(bits):
            mask = torch.tensor(1 << bit).to(words.dtype) if bit < bits - 1 else torch.iinfo(words.dtype).min
            words[place] ^= mask
            found.add(checksum(backend, flat))
            words[place] ^= mask
    for a, b in ((0, 1), (0, 1030), (6, 518)):  # 512 apart
        words[[a, b]] = words[[b, a]]
        found.add(checksum(backend, flat))
        words[[a, b]] = words[[b, a]]
    assert len(found) == 1 + len(places) * bits + 3


# Digest.


def digest(backend: ModuleType, flat: Tensor, step: int = 7, first: int = 0, size: int = 0) -> list[int]:
    """The sums of a state, made in pieces of `size` numbers, the last first."""
    out = torch.zeros(2, dtype=torch.int64, device=flat.device)
    controls = torch.full((CONTROLS,), float(step), dtype=torch.float64, device=flat.device)
    pieces = flat.split(size or flat.numel())
    for index in reversed(range(len(pieces))):
        backend.digest(out, pieces[index], controls, first=first + index * size)
    return [total % 2**64 for total in out.tolist()]


def check_digest(backend: ModuleType, draw: Draw, dtype: torch.dtype, n: int, first: int) -> None:
    """The formula in Python's integers, and the same in pieces."""
    flat = numbers(draw, dtype, n)
    width, step = min(flat.itemsize, 4), 7
    data = words_of(flat).cpu().numpy().tobytes()
    words = [int.from_bytes(data[i : i + width], "little", signed=True) for i in range(0, len(data), width)]
    place = first * (flat.itemsize // width)

    @functools.cache
    def key(stream: int, at: int) -> int:
        high, low = (murmur(at ^ murmur((murmur(step) + half * 0x9E3779B1) % 2**32)) for half in (stream, stream + 1))
        return high << 32 | low | 1

    columns = [[key(4 * j + 2, c) for c in range(4096)] for j in range(2)]
    expected = [
        sum(w * key(4 * j, (place + i) // 4096) * columns[j][(place + i) % 4096] for i, w in enumerate(words)) % 2**64
        for j in range(2)
    ]
    assert digest(backend, flat, step, first) == expected
    if n > 100:
        assert digest(backend, flat, step, first, size=n // 3) == expected


def check_digest_sees(backend: ModuleType, draw: Draw, dtype: torch.dtype) -> None:
    """A flipped bit anywhere, two exchanged numbers, two flipped signs, another step, another place: each in both sums."""
    flat = numbers(draw, dtype, 5000)
    words, found = words_of(flat), [digest(backend, flat), digest(backend, flat, step=8), digest(backend, flat, first=1)]
    found.append(digest(backend, flat, first=4096))
    sign = torch.iinfo(words.dtype).min
    for place in (0, 4095, 4096, 4999):
        for bit in (0, 1, flat.itemsize * 8 - 2):
            words[place] ^= 1 << bit
            found.append(digest(backend, flat))
            words[place] ^= 1 << bit
    for a, b in ((0, 1), (0, 4096), (500, 4999)):
        words[[a, b]] = words[[b, a]]
        found.append(digest(backend, flat))
        words[[a, b]] = words[[b, a]]
        words[[a, b]] ^= sign
        found.append(digest(backend, flat))
        words[[a, b]] ^= sign
    for sums in zip(*found, strict=True):
        assert len(set(sums)) == len(found)


# The losses of a step, one sum per lane.


def check_losses_in_order(backend: ModuleType, device: str, lanes: int) -> None:
    """One after another in float64, without compensation; numbers among which any other order shows."""
    sums = torch.rand(lanes, generator=torch.Generator().manual_seed(3), dtype=torch.float64) * 0.4 + 0.55
    sums[0] = 2.0**52  # the numbers from here on are whole: each of the others counts as 1
    in_order, backwards = (functools.reduce(operator.add, order) for order in (sums.tolist(), sums.flip(0).tolist()))
    if lanes > 8:
        assert in_order not in (math.fsum(sums.tolist()), backwards)
    results = torch.full((ops.RESULTS,), math.nan, dtype=torch.float64, device=device)
    limits = torch.tensor([1.0, 1e-3, math.inf, math.inf, 3000.0], dtype=torch.float64, device=device)
    loss_scale, norms = torch.tensor([1 / 3000, 1.0, 0.0], device=device), torch.ones(4, device=device)
    settings = {"gradient_tokens": 3000, "clip_norm": 0.0, "dynamic_loss_scale": False}
    backend.verdict(results, loss_scale, sums.to(device), norms, limits, **settings)
    assert results[ops.RESULT_LOSS].item() == in_order / 3000
