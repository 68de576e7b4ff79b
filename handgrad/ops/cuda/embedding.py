"""Token and position embedding; the backward adds equal tokens in a fixed order, without atomics."""

import triton
import triton.language as tl
from torch import Tensor

from handgrad.ops.cuda.column_sums import float32_of
from handgrad.ops.cuda.launch import launch
from handgrad.ops.sizes import CHUNK, chunks_of, forward_tile

# Backward: dwte in two stages over the positions sorted by token, where equal tokens form runs. Stage 1 splits the sorted
# positions into chunks and sums the runs of each chunk in order. A run inside its chunk has no other owner, so stage 1 adds
# it to dwte at once. A run that crosses a border leaves its parts in `parts` (chunks, 2, C): slot 0 if it came from the
# previous chunk, 1 if it begins here. Stage 2: the chunk where a run begins adds its parts in order. A word that makes
# up 4 % of all tokens is 80 parts long; stage 2 sums them as tiles, not one after another.

# Stage 1: a warp walks a chunk's entries in 256 columns, four rows ahead.
RUN_COLUMNS, RUN_WARPS = 256, 1

# Stage 2: 32 parts at a time.
PARTS, PART_COLUMNS, PART_WARPS = 32, 128, 4

# Positions: four samples at a time.
SAMPLES, POSITION_ELEMENTS, POSITION_WARPS = 4, 1024, 4


def embedding_forward(out: Tensor, tokens: Tensor, wte: Tensor, wpe: Tensor | None) -> None:
    N, C = out.shape
    block, rows, warps = forward_tile(C)
    launch(_forward, (triton.cdiv(N, rows),), out, tokens, wte, wpe, N, tokens.shape[1], C, block, rows, num_warps=warps)


def token_embedding_forward(out: Tensor, tokens: Tensor, wte: Tensor) -> None:
    embedding_forward(out, tokens, wte, None)


def embedding_backward(
    dwte_acc: Tensor, dwpe_acc: Tensor, dout: Tensor, tokens: Tensor, sorted_positions: Tensor, *, scratch: Tensor
) -> None:
    token_embedding_backward(dwte_acc, dout, tokens, sorted_positions, scratch=scratch)
    (B, T), C = tokens.shape, dout.shape[1]
    grid, tile = (triton.cdiv(T * C, POSITION_ELEMENTS),), (SAMPLES, POSITION_ELEMENTS)
    launch(_sum_samples, grid, dwpe_acc, dout, B, T * C, *tile, num_warps=POSITION_WARPS)


def token_embedding_backward(
    dwte_acc: Tensor, dout: Tensor, tokens: Tensor, sorted_positions: Tensor, *, scratch: Tensor
) -> None:
    N, C = dout.shape
    chunks = chunks_of(N)
    parts = float32_of(scratch, chunks * 2 * C)
    grid = (triton.cdiv(C, RUN_COLUMNS), chunks)
    entries = tokens, sorted_positions, N, C, CHUNK
    launch(_sum_runs, grid, dwte_acc, parts, dout, *entries, RUN_COLUMNS, num_warps=RUN_WARPS)
    if chunks > 1:
        grid = (triton.cdiv(C, PART_COLUMNS), chunks - 1)
        launch(_join_runs, grid, dwte_acc, parts, *entries, PARTS, PART_COLUMNS, num_warps=PART_WARPS)


@triton.jit
def _forward(out, tokens, wte, wpe, N, T, C: tl.constexpr, BLOCK_C: tl.constexpr, ROWS: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK_C)[None, :]
    in_rows = row < N
    inside = in_rows & (column < C)
    token = tl.load(tokens + row, mask=in_rows, other=0)
    x = tl.load(wte + token * C + column, mask=inside, other=0.0).to(tl.float32)
    if wpe is not None:
        x += tl.load(wpe + row % T * C + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row.to(tl.int64) * C + column, x.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _sum_runs(dwte, parts, dout, tokens, sorted_positions, N, C: tl.constexpr, CHUNK: tl.constexpr, COLUMNS: tl.constexpr):
    chunk = tl.program_id(1)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    start = chunk * CHUNK
    end = tl.minimum(start + CHUNK, N)
    before = sorted_token(tokens, sorted_positions, start - 1, N)
    after = sorted_token(tokens, sorted_positions, end, N)
    head = sorted_token(tokens, sorted_positions, start, N)
    parts += chunk.to(tl.int64) * 2 * C
    token = head
    sums = tl.zeros((COLUMNS,), tl.float32)
    for index in range(start, start + CHUNK, 4):
        token0, row0 = entry(dout, tokens, sorted_positions, column, index, N, C)
        token1, row1 = entry(dout, tokens, sorted_positions, column, index + 1, N, C)
        token2, row2 = entry(dout, tokens, sorted_positions, column, index + 2, N, C)
        token3, row3 = entry(dout, tokens, sorted_positions, column, index + 3, N, C)
        token, sums = follow(dwte, parts, sums, token, token0, row0, column, head, before, after, C)
        token, sums = follow(dwte, parts, sums, token, token1, row1, column, head, before, after, C)
        token, sums = follow(dwte, parts, sums, token, token2, row2, column, head, before, after, C)
        token, sums = follow(dwte, parts, sums, token, token3, row3, column, head, before, after, C)
    put_run(dwte, parts, sums, token, column, head, before, after, C)


@triton.jit
def sorted_token(tokens, sorted_positions, index, N):
    """The token at an index of the sorted order, -1 before its start and after its end."""
    inside = (index >= 0) & (index < N)
    position = tl.load(sorted_positions + index, mask=inside, other=0)
    return tl.load(tokens + position, mask=inside, other=-1)


@triton.jit
def entry(dout, tokens, sorted_positions, column, index, N, C: tl.constexpr):
    """(token, its output gradient) at an index of the sorted order, (-1, 0) after its end."""
    inside = index < N
    position = tl.load(sorted_positions + index, mask=inside, other=0)
    token = tl.load(tokens + position, mask=inside, other=-1)
    row = tl.load(dout + position.to(tl.int64) * C + column, mask=inside & (column < C), other=0.0)
    return token, row.to(tl.float32)


@triton.jit
def follow(dwte, parts, sums, token, next_token, row, column, head, before, after, C: tl.constexpr):
    """Adds a row to its run; if a new run begins, stores the old one first."""
    if (next_token != token) & (next_token >= 0):
        put_run(dwte, parts, sums, token, column, head, before, after, C)
        sums = tl.zeros_like(sums)
        token = next_token
    return token, sums + row


@triton.jit
def put_run(dwte, parts, sums, token, column, head, before, after, C: tl.constexpr):
    """Stores a run. It began in an earlier chunk if its token is both `head` and `before`, and goes on if it is `after`."""
    if (token == head) & (token == before):
        tl.store(parts + column, sums, mask=column < C)
    elif token == after:
        tl.store(parts + C + column, sums, mask=column < C)
    else:
        add_row(dwte, sums, token, column, C)


@triton.jit
def add_row(dwte, sums, token, column, C: tl.constexpr):
    pointers = dwte + token * C + column
    tl.store(pointers, tl.load(pointers, mask=column < C, other=0.0) + sums, mask=column < C)


@triton.jit
def _join_runs(
    dwte, parts, tokens, sorted_positions, N, C: tl.constexpr, CHUNK: tl.constexpr, PARTS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    chunk = tl.program_id(1)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    start = chunk * CHUNK
    before = sorted_token(tokens, sorted_positions, start - 1, N)
    head = sorted_token(tokens, sorted_positions, start, N)
    token = sorted_token(tokens, sorted_positions, start + CHUNK - 1, N)
    after = sorted_token(tokens, sorted_positions, start + CHUNK, N)
    begins_here = (token != head) | (token != before)
    if (token == after) & begins_here:
        sums = tl.zeros((PARTS, COLUMNS), tl.float32)
        first = chunk + 1
        matching = PARTS
        while matching == PARTS:  # a tile with fewer parts of this run than PARTS ends it
            other = first + tl.arange(0, PARTS)[:, None]
            belongs = sorted_token(tokens, sorted_positions, other * CHUNK, N) == token
            pointers = parts + other.to(tl.int64) * 2 * C + column[None, :]
            sums += tl.load(pointers, mask=belongs & (column < C)[None, :], other=0.0)
            matching = tl.sum(belongs.to(tl.int32))
            first += PARTS
        begin = tl.load(parts + (chunk.to(tl.int64) * 2 + 1) * C + column, mask=column < C, other=0.0)
        add_row(dwte, begin + tl.sum(sums, 0), token, column, C)


@triton.jit
def _sum_samples(dwpe, dout, B, elements, SAMPLES: tl.constexpr, BLOCK: tl.constexpr):
    """dwpe (elements) += the sum over the samples of dout (B, elements)."""
    offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = offset < elements
    sums = tl.zeros((1, BLOCK), tl.float32)
    for first in range(0, B, SAMPLES):
        sample = first + tl.arange(0, SAMPLES)[:, None]
        x = tl.load(dout + sample.to(tl.int64) * elements + offset, mask=(sample < B) & inside, other=0.0)
        sums += tl.sum(x.to(tl.float32), 0, keep_dims=True)
    tl.store(dwpe + offset, tl.load(dwpe + offset, mask=inside, other=0.0) + sums, mask=inside)
