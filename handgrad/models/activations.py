"""Transition."""

from handgrad.models import gpt2
from handgrad.models.rows import named


def activation_buffers(
    shape, batch, length, dtype, *, recompute=0, chunk, scratch_bytes=0, attention_scratch_bytes=0, training=True
):
    from handgrad.ops import reference

    rows = gpt2.activations(shape, batch, length, dtype, reference, chunk=chunk, training=training)
    return [row.buffer(recompute) for row in rows if not row.of]


def activations(views):
    return named(gpt2.Activations, views, sum(name.endswith(".qkv") for name in views))
