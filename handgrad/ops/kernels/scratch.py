"""What the memory-bound kernels need beside their buffers."""

from handgrad.ops.kernels.column_sums import row_split
from handgrad.ops.kernels.embedding import chunks_of
from handgrad.ops.kernels.layernorm import BACKWARD_PROGRAMS


def scratch_bytes(*, batch: int, length: int, channels: int) -> int:
    """Bytes of `scratch` that the largest of them needs: rows of float32 partial sums."""
    tokens = batch * length
    layernorm = BACKWARD_PROGRAMS * 3 * channels
    bias = row_split(tokens) * 4 * channels  # the widest output of a block: the feed-forward's
    embedding = chunks_of(tokens) * 2 * channels
    return 4 * max(layernorm, bias, embedding)
