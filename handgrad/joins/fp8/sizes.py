"""The sizes that the fp8 kernels and the memory plan share: tiles, programs, parts of a tensor's statistics.

Imports neither torch nor Triton, like `handgrad.ops.sizes`. Each program of a kernel that writes fp8 writes one part of its
tensor's statistics. Tiles are (rows, columns).
"""

from handgrad.ops.sizes import attention_tile, backward_tile, cdiv, forward_tile, rmsnorm_backward_tile, rows_of

QUANTIZE_TILE = 64, 128  # bytes of a column and of a row

# Forward of a nonlinearity: elements per program. SwiGLU: a tile per program, 512 bytes of a row of gates and as many of
# the values that they gate.
NONLINEARITY_ELEMENTS = 8192
SWIGLU_TILE = 32, 256

# Its backward: a program's tile, in quads of rows. A lane has 8 columns of a quad. A column's fp8 numbers are one word of
# the transposed form: 32 rows are 32 bytes there, one sector. Small tiles are faster: 413 us at 124M, where 128
# rows of 64 columns with 8 warps take 511 (benchmarks/results/h200-fp8-choices.json). The backward of norm and rotation of
# queries and keys uses tiles of as many rows.
ROWS_OF_QUAD, QUADS = 4, 8
QUADS_TILE = QUADS * ROWS_OF_QUAD, 128

# Programs of the backward of an RMS norm without a gain. They stride over the rows, to limit the parts that each micro-step
# reads. 132 multiprocessors hold this many of the smallest programs.
RMSNORM_PROGRAMS = 4096


def tiles(rows: int, columns: int, tile: tuple[int, int]) -> int:
    """Tiles that cover a matrix."""
    return cdiv(rows, tile[0]) * cdiv(columns, tile[1])


def rmsnorm_programs(tokens: int, channels: int) -> int:
    return min(RMSNORM_PROGRAMS, cdiv(tokens, rmsnorm_backward_tile(channels)[1]))


def attention_parts(*kernels: str, batch: int, length: int, num_heads: int, head_width: int) -> int:
    """Total programs of these kernels, with the smallest 16-bit tiles used on any GPU."""
    blocks = 0
    for kernel in kernels:
        choices = (attention_tile(kernel, head_width, narrow=True, newer=newer) for newer in (True, False))
        blocks += cdiv(length, min(rows_of(kernel, tile) for tile in choices))
    return batch * num_heads * blocks


def statistics_parts(
    *,
    batch: int,
    length: int,
    num_heads: int,
    head_width: int,
    channels: int,
    feed_forward: int,
    widest: int,
    padded_vocab_size: int,
) -> int:
    """Most parts of any tensor's statistics: the programs of the kernel that has most."""
    tokens = batch * length
    heads = {"batch": batch, "length": length, "num_heads": num_heads, "head_width": head_width}
    quantized = (tokens, widest), (widest, channels), (channels, widest), (padded_vocab_size, channels)
    return max(
        *(tiles(*shape, QUANTIZE_TILE) for shape in quantized),
        cdiv(tokens, forward_tile(channels)[1]),
        backward_tile(tokens, channels, 2)[0],
        rmsnorm_programs(tokens, channels),
        attention_parts("forward", **heads),
        attention_parts("dq", "dkdv", **heads),
        cdiv(tokens * feed_forward, NONLINEARITY_ELEMENTS),
        tiles(tokens, feed_forward, QUADS_TILE),
        tiles(tokens, feed_forward, SWIGLU_TILE),
    )
