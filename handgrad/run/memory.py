"""The memory of a run: of its training, and of the texts that it writes."""

from handgrad.arena import Plan, make_plan
from handgrad.generation.decode import decode_buffers, with_cache
from handgrad.training.design import Design


def generation_plan(design: Design) -> Plan:
    """The plan of one text at a time, for the token that starts a document and the ones that follow. The cache
    has their length, not the context's."""
    shape = with_cache(design.shape, 1 + design.sample_tokens)
    return make_plan(decode_buffers(shape, 1, design.dtype, design.plain_ops))


def memory_bytes(design: Design) -> dict[str, int]:
    """Bytes of every allocation that a rank of this run makes on its device."""
    return design.plan.size_bytes | generation_plan(design).size_bytes
