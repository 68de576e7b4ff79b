"""The memory of the texts that a run writes."""

from handgrad.arena import Plan, make_plan
from handgrad.generation.decode import decode_buffers, with_cache
from handgrad.training.design import Design


def generation_plan(design: Design) -> Plan:
    """The plan of one text at a time, for the token that starts a document and those that follow. The cache
    has their length, not that of the context."""
    shape = with_cache(design.shape, 1 + design.sample_tokens)
    return make_plan(decode_buffers(shape, 1, design.dtype, design.plain_ops))
