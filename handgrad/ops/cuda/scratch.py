"""Bytes that the operations need beside their buffers."""

from handgrad.ops.cuda.column_sums import row_split
from handgrad.ops.cuda.cublaslt import WORKSPACE_BYTES
from handgrad.ops.cuda.embedding import chunks_of
from handgrad.ops.cuda.layernorm import BACKWARD_PROGRAMS


def scratch_bytes(*, tokens: int, channels: int, widest: int) -> int:
    """The largest need of any operation but attention's backward."""
    return max(WORKSPACE_BYTES, partials_bytes(tokens, channels, widest))


def partials_bytes(tokens: int, channels: int, widest: int) -> int:
    """The largest need of a Triton kernel: rows of float32 partial sums."""
    layernorm = BACKWARD_PROGRAMS * 3 * channels
    bias = row_split(tokens) * widest
    embedding = chunks_of(tokens) * 2 * channels
    return 4 * max(layernorm, bias, embedding)
