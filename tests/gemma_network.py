"""A network that handgrad lacks, as `handgrad.networks` has one: half as many heads of keys and values, heads twice as
wide as channels / num_heads, a gated GELU, a norm behind each half of a block beside the one before it."""

from handgrad.networks import ModelShape
from handgrad.networks.network import Gemm, Network


def gemms(shape: ModelShape) -> tuple[Gemm, ...]:
    C, F, D = shape.channels, shape.feed_forward, shape.head_width
    queries, keys = shape.num_heads * D, shape.kv_heads * D
    return (
        Gemm("qkv_weight", "qkv", C, {"q": queries, "k": keys, "v": keys}),
        Gemm("proj_weight", "proj", queries, {"o": C}),
        Gemm("gate_up_weight", "mlp", C, {"gate": F, "up": F}),
        Gemm("down_weight", "mlp", F, {"down": C}),
    )


GEMMA = Network(
    title="Gemma",
    gemms=gemms,
    head_width=lambda shape: 2 * shape.channels // shape.num_heads,
    kv_heads=lambda shape: shape.num_heads // 2,
    feed_forward=lambda shape: 3 * shape.channels,
    adapters=False,
    any_context=True,
)
