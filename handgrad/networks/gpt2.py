"""GPT-2 (Radford et al. 2019). models/gpt2.py computes it.

Conv1D in transformers stores a matrix as (in, out); ours is (out, in). The head is the token embedding.
"""

from typing import TYPE_CHECKING

from handgrad.networks.network import COMMON_FORMS, Fp8, Gemm, Network

if TYPE_CHECKING:
    from handgrad.networks import ModelShape

# The GPT-2 report, and Table 2.1 of the GPT-3 paper (Brown et al. 2020): layers, heads, channels.
MODELS = {
    "tiny": (2, 4, 64),
    "d4": (4, 4, 256),  # 16M; the widths of m4 and m6, heads of 64 as in d12
    "d6": (6, 6, 384),  # 30M
    "d12": (12, 12, 768),  # 124M
    "d24": (24, 16, 1024),  # 350M
    "d36": (36, 20, 1280),  # 774M
    "d48": (48, 25, 1600),  # 1558M
    "gpt3-125m": (12, 12, 768),
    "gpt3-350m": (24, 16, 1024),
    "gpt3-760m": (24, 16, 1536),
    "gpt3-1300m": (24, 32, 2048),
}
FP8 = {
    **COMMON_FORMS,
    "ln1": Fp8("qkv"),
    "ln2": Fp8("mlp", rerun_from=1),
    "gelu": Fp8("mlp", late_columns=True),
    "dqkv": Fp8("qkv", gradient=True, wide=True),
    "dhidden": Fp8("mlp", gradient=True, workspace="dgelu"),
}


def gemms(shape: "ModelShape") -> tuple[Gemm, ...]:
    """fc and fcproj share the GELU kernels and therefore an fp8 part."""
    C, F = shape.channels, shape.feed_forward
    return (
        Gemm("qkv_weight", "qkv", C, {"qkv": 3 * C}),
        Gemm("proj_weight", "proj", C, {"o": C}),
        Gemm("fc_weight", "mlp", C, {"up": F}),
        Gemm("fcproj_weight", "mlp", F, {"down": C}),
    )


def counted(shape: "ModelShape") -> int:
    """Positions, biases and layer norms. llm.c also counts every parameter."""
    C, biases = shape.channels, sum(sum(gemm.outputs.values()) for gemm in shape.gemms)
    return shape.sequence_length * C + shape.num_layers * (biases + 4 * C) + 2 * C


GPT2 = Network(
    title="GPT-2",
    gemms=gemms,
    models=MODELS,
    variant=lambda shape: "",
    dropout=True,
    counted=counted,
    fp8=lambda shape: FP8,
    model_types=("gpt2",),
    prefix="transformer.",
    blocks="h",
    modules={
        "qkv": ("attn.c_attn",),
        "proj": ("attn.c_proj",),
        "fc": ("mlp.c_fc",),
        "fcproj": ("mlp.c_proj",),
        "ln1": ("ln_1",),
        "ln2": ("ln_2",),
        "lnf": ("ln_f",),
    },
    transposed=True,
)
