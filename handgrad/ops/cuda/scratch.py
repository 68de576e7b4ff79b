"""What the memory-bound kernels need beside their buffers."""

from handgrad.fp8.cuda import attention, gelu, quantize
from handgrad.ops.cuda import layernorm
from handgrad.ops.cuda.column_sums import row_split
from handgrad.ops.cuda.embedding import chunks_of
from handgrad.ops.cuda.layernorm import BACKWARD_PROGRAMS


def scratch_bytes(*, batch: int, length: int, channels: int) -> int:
    """Bytes of `scratch` that the largest of them needs: rows of float32 partial sums."""
    tokens = batch * length
    layernorm = BACKWARD_PROGRAMS * 3 * channels
    bias = row_split(tokens) * 4 * channels  # the widest output of a block: the feed-forward's
    embedding = chunks_of(tokens) * 2 * channels
    return 4 * max(layernorm, bias, embedding)


def statistics_parts(*, batch: int, length: int, num_heads: int, channels: int, padded_vocab_size: int) -> int:
    """Parts in which a tensor's statistics come at most: one for each program of the kernel with the most of them."""
    tokens, hidden = batch * length, 4 * channels
    heads = batch, num_heads, length, channels // num_heads
    return max(
        quantize.quantize_parts(max(tokens, hidden), hidden),
        quantize.quantize_parts(padded_vocab_size, channels),
        layernorm.forward_parts(tokens, channels),
        layernorm.backward_parts(tokens, channels),
        attention.forward_parts(*heads),
        attention.backward_parts(*heads),
        gelu.forward_parts(tokens, hidden),
        gelu.backward_parts(tokens, hidden),
    )
