"""The sizes that the CUDA operations and their memory plan share: tiles, programs, scratch.

This file imports neither torch nor Triton, so a run can be planned for a GPU that this machine lacks. The kernels divide
their work by the same functions. A tile that affects no buffer size stays in its kernel's file.
"""

from typing import NamedTuple

WORKSPACE_BYTES = 32 << 20  # cuBLASLt's workspace, as NVIDIA recommends for Hopper


def cdiv(size: int, tile: int) -> int:
    """The number of tiles that cover `size`."""
    return -(-size // tile)


def power_of_two(size: int) -> int:
    """The smallest power of two >= `size`."""
    return 1 << (size - 1).bit_length()


def scratch_bytes(*, tokens: int, channels: int, widest: int) -> int:
    """Bytes of scratch for any operation except attention's backward: the larger of cuBLASLt's workspace and a Triton
    kernel's rows of float32 partial sums."""
    norm = NORM_PROGRAMS * 3 * channels
    bias = row_split(tokens) * widest
    return max(WORKSPACE_BYTES, 4 * max(norm, bias, chunks_of(tokens) * 2 * channels))


# Norms. Forward: a warp holds whole rows, 64 elements per lane, so no reduction crosses warps. Two short rows at a time
# halve the number of programs; otherwise starting programs would be the limit.
NORM_ELEMENTS_PER_WARP = 2048

# Backward: a fixed number of programs of four warps. All fit on 132 multiprocessors at once, and their rows of partial
# sums are small next to 65,536 rows. Two rows at a time share the reductions' barriers. Three stages of asynchronous copies
# load the three inputs of the next rows while these are summed: 92 % of the copy bandwidth where one stage reaches 68 %. In
# float32 the stages would not fit the shared memory of every GPU.
NORM_PROGRAMS = 512  # half as many if a row is padded to more than 1024 channels
NORM_ROWS = 2
NORM_WARPS = 4
NORM_STAGES = 3

# An RMS norm without a gain has no parameter gradient, so no sum crosses rows: each program handles its own rows, forward
# and backward. The backward holds three rows where the forward holds one, so a warp takes half as many elements.
RMSNORM_ELEMENTS_PER_WARP = 1024


def forward_tile(channels: int, elements_per_warp: int = NORM_ELEMENTS_PER_WARP) -> tuple[int, int, int]:
    """(padded channels, rows, warps) of a program that takes whole rows."""
    block = power_of_two(channels)
    return block, min(16, max(1, elements_per_warp // block)), min(16, max(1, block // elements_per_warp))


def backward_tile(tokens: int, channels: int, itemsize: int) -> tuple[int, int, int, int, int]:
    """(programs, padded channels, rows, warps, stages) of the backward. At most as many warps as 16-byte loads of a row
    keep busy: sums over rows then stay in a lane."""
    block = power_of_two(channels)
    programs = NORM_PROGRAMS if block <= 1024 else cdiv(NORM_PROGRAMS, 2)
    rows = NORM_ROWS if block <= 2048 else 1
    warps = max(1, min(NORM_WARPS, block // 256))
    small = block <= 2048 and itemsize == 2
    return min(programs, cdiv(tokens, rows)), block, rows, warps, NORM_STAGES if small else 1


def rmsnorm_backward_tile(channels: int) -> tuple[int, int, int]:
    """(padded channels, rows, warps) of a program of the backward without a gain."""
    return forward_tile(channels, RMSNORM_ELEMENTS_PER_WARP)


# Heads. Programs walk the rows with this stride and compute the frequencies, each a power in float64, once for all their
# rows. 132 multiprocessors hold this many of the smallest programs.
ROTARY_PROGRAMS = 4096
QK_GAIN_PROGRAMS = 512  # programs of a gained norm's backward; each writes a row of partial sums

# A bias gradient. 8 lanes read 128 bytes of a bf16 row; 64 rows at once keep four 16-byte loads per lane in flight.
# Narrow strips and few programs along the rows (90 % of the copy bandwidth at 65,536 rows) beat wide and many (76 %).
BIAS_ROWS, BIAS_COLUMNS = 64, 64
LARGEST_SPLIT = 64  # most programs along the rows: their float32 partial sums are 1/512 of 65,536 rows of bf16


def row_split(rows: int) -> int:
    """Programs that share the rows of one strip of columns."""
    return min(LARGEST_SPLIT, cdiv(rows, BIAS_ROWS))


CHUNK = 32  # sorted positions per program of the embedding's backward


def chunks_of(tokens: int) -> int:
    return cdiv(tokens, CHUNK)


CHOICES = 1024  # logits per program in the choice of tokens


def choosing_scratch_bytes(*, batch: int, vocab_size: int) -> int:
    """Bytes of scratch to choose tokens: four numbers per part of the logits."""
    return 16 * batch * cdiv(vocab_size, CHOICES)


# Muon.
SUM_ELEMENTS = 65536  # matrix elements per program of the sum of squares
MOMENT_ROWS = 4  # rows per program of the moments
ALIGN_BYTES = 512  # alignment of each part of the scratch


def muon_scratch_bytes(*, matrices: int, rows: int, columns: int) -> int:
    """Bytes of scratch for `muon_polar` in 16 bits, or `muon_update`, which needs more only for tiny matrices."""
    return max(sum(polar_bytes(matrices, rows, columns, 2)), 4 * (rows + cdiv(rows, MOMENT_ROWS)))


def polar_bytes(matrices: int, rows: int, columns: int, itemsize: int) -> tuple[int, ...]:
    """Bytes of the partial sums of squares, the second X, A and B. Padding gives each the same alignment in any batch: a
    kernel's summation order may depend on the alignment."""
    elements, square = rows * columns, min(rows, columns) ** 2
    sizes = 4 * cdiv(elements, SUM_ELEMENTS), *(itemsize * n for n in (elements, square, square))
    return tuple(cdiv(matrices * size, ALIGN_BYTES) * ALIGN_BYTES for size in sizes)


class AttentionTile(NamedTuple):
    """Launch parameters of a kernel: queries and keys per tile, warps per program, depth of the load pipeline (3 loads one
    tile ahead of the products), and a cap on registers per thread if it lets one more program fit a multiprocessor."""

    queries: int
    keys: int
    warps: int
    stages: int
    registers: int | None = None


# Fixed: a choice at run time would change the order of the sums, and so the bits. Key: (kernel, largest head width). Tiles:
# for 16-bit inputs on a data-centre GPU, with the shared memory and the tensor cores of Hopper or Blackwell; for 16-bit
# inputs elsewhere, within the 99 KB of shared memory of sm_86, sm_89 and sm_120; for float32 on any GPU.
AttentionTiles = dict[tuple[str, int], tuple[AttentionTile, AttentionTile, AttentionTile]]
ATTENTION_TILES: AttentionTiles = {
    ("forward", 64): (AttentionTile(64, 64, 4, 3, 128), AttentionTile(128, 64, 8, 2), AttentionTile(32, 32, 8, 2)),
    ("forward", 128): (AttentionTile(64, 64, 4, 3), AttentionTile(128, 32, 8, 2), AttentionTile(32, 16, 8, 2)),
    ("forward", 256): (AttentionTile(128, 64, 8, 2), AttentionTile(64, 32, 8, 2), AttentionTile(32, 16, 8, 2)),
    ("dq", 64): (AttentionTile(64, 64, 4, 2, 128), AttentionTile(64, 64, 4, 2), AttentionTile(32, 32, 8, 2)),
    ("dq", 128): (AttentionTile(64, 64, 4, 2), AttentionTile(64, 32, 4, 2), AttentionTile(32, 16, 8, 2)),
    ("dq", 256): (AttentionTile(128, 32, 8, 2), AttentionTile(32, 32, 4, 2), AttentionTile(32, 16, 8, 2)),
    ("dkdv", 64): (AttentionTile(64, 64, 4, 3), AttentionTile(32, 64, 8, 2), AttentionTile(32, 32, 8, 2)),
    ("dkdv", 128): (AttentionTile(32, 64, 4, 2), AttentionTile(32, 32, 4, 2), AttentionTile(16, 16, 4, 2)),
    # Two accumulators of 64 keys by 256 channels spill: so 32 keys, too few rows for Hopper's own instructions (wgmma).
    ("dkdv", 256): (AttentionTile(64, 32, 8, 2), AttentionTile(32, 32, 8, 2), AttentionTile(16, 16, 8, 2)),
}
# If query heads share keys, for 16-bit inputs on a data-centre GPU. It spills a few words; without spills it takes up to
# twice the time (benchmarks/results/h200-attention-choices.json).
GROUPED_TILES = {("dkdv", 128): AttentionTile(64, 64, 4, 2)}
WIDEST_HEAD = max(width for _, width in ATTENTION_TILES)
# With documents in a row. Fewer keys at a time skip more of them and are added in the same order, so a row of one document
# gets the plain kernels' bits. Eight warps of float32 do not spill.
DOCUMENT_TILES: AttentionTiles = {
    ("dq", 64): (AttentionTile(64, 32, 4, 3), AttentionTile(64, 64, 4, 2), AttentionTile(32, 32, 8, 2)),
    ("dkdv", 128): (AttentionTile(32, 64, 4, 2), AttentionTile(32, 32, 4, 2), AttentionTile(16, 16, 8, 2)),
}

# Before Ampere, for 16-bit inputs and float32. Triton has no tensor-core instructions there
# (https://github.com/triton-lang/triton/pull/5066) and unrolls a product into multiply-adds, so larger tiles spill.
# Shared memory ends at 64 KB; float32 heads of 256 channels do not fit.
TURING_TILES: dict[tuple[str, int], AttentionTile] = {
    ("forward", 64): AttentionTile(32, 32, 8, 1),
    ("forward", 128): AttentionTile(16, 16, 4, 1),
    ("dq", 64): AttentionTile(32, 32, 8, 1),
    ("dq", 128): AttentionTile(16, 16, 8, 1),
    ("dkdv", 64): AttentionTile(32, 32, 8, 1),
    ("dkdv", 128): AttentionTile(16, 16, 8, 1),
}

# Head widths that go to cuDNN on Hopper, the GPU where both were measured: up to 64 channels the Triton kernels are faster
# (docs/operations/attention.md).
CUDNN_HEADS = range(72, 129, 8)
CUDNN_SUMS = 8  # float32 partial sums of dq in its deterministic backward: seen with heads of 64, documented nowhere


def attention_tile(
    kernel: str, D: int, *, narrow: bool, newer: bool, turing: bool = False, grouped: bool = False, documents: bool = False
) -> AttentionTile:
    """The tile of a kernel for heads of width D. `narrow`: 16-bit inputs; `newer`: data-centre GPU; `turing`: GPU before
    Ampere; `grouped`: query heads share keys; `documents`: a row holds several."""
    key = kernel, min(width for name, width in ATTENTION_TILES if name == kernel and width >= D)
    if turing:
        return TURING_TILES[key]
    data_centre, others, float32 = (ATTENTION_TILES | DOCUMENT_TILES if documents else ATTENTION_TILES)[key]
    if grouped:
        data_centre = GROUPED_TILES.get(key, data_centre)
    return (data_centre if newer else others) if narrow else float32


def rows_of(kernel: str, tile: AttentionTile) -> int:
    """Rows that a program writes."""
    return tile.keys if kernel == "dkdv" else tile.queries


def attention_scratch_bytes(*, batch: int, length: int, num_heads: int, **_sizes: object) -> int:
    """Bytes of scratch for the Triton backward, at any head width: pairs (lse log2(e), delta), float32, for (B, H, T)."""
    return 8 * batch * num_heads * length


def cudnn_scratch_bytes(*, batch: int, length: int, num_heads: int, head_width: int) -> int:
    """An estimate of cuDNN's backward workspace in bytes, to plan for a GPU that this machine lacks."""
    return 4 * batch * num_heads * length * (CUDNN_SUMS * head_width + 1) + 256
