"""Boundaries of documents in attention's kernels, read from the document starts of a row, which never fall along it."""

import triton
import triton.language as tl


@triton.jit
def is_before(first_key, KEYS: tl.constexpr, starts):
    """(queries, KEYS): whether the key comes before the start of the query's document."""
    return (first_key + tl.arange(0, KEYS))[None, :] < starts[:, None]


@triton.jit
def keys_of_queries(starts, first, T, QUERIES: tl.constexpr, KEYS: tl.constexpr):
    """(begin, crossed) of a block of queries. Of the keys before its diagonal, all queries see `begin` and later ones, and
    none sees any that is more than `crossed` before it. Both are multiples of KEYS: `crossed` is KEYS at most where all
    queries are of one document, and else `begin` is where the diagonal is."""
    none = tl.load(starts + first) // KEYS * KEYS
    begin = tl.minimum(tl.cdiv(tl.load(starts + tl.minimum(first + QUERIES, T) - 1), KEYS), first // KEYS) * KEYS
    return begin, begin - none


@triton.jit
def masked_block(place, diagonal, begin, starts):
    """The first key of a masked block: blocks up to `begin` come before the diagonal's."""
    if starts is None:
        return place
    else:
        return tl.where(place < diagonal, place + begin - diagonal, place)


@triton.jit
def first_after(starts, first, key, T, SPAN: tl.constexpr = 128):
    """The first position whose document starts after `key`, or T; `first`, at or before the key, is none such. Counts the
    positions before it among every 128th, then among the 128 that are left: two loads in a row for 16,384 positions."""
    found = 0
    for place in range(first, T, SPAN * SPAN):
        places = place + tl.arange(0, SPAN) * SPAN
        found += tl.sum((tl.load(starts + places, mask=places < T, other=2147483647) <= key).to(tl.int32))
    last = first + (found - 1) * SPAN
    places = last + tl.arange(0, SPAN)
    return last + tl.sum((tl.load(starts + places, mask=places < T, other=2147483647) <= key).to(tl.int32))
