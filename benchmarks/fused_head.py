"""Liger's head for the peers, in a module of its own: the decorator imports the whole compiler, which takes a second."""

import inspect

import torch
from torch import Tensor

LIGER_CHUNKS = 4  # times Liger's own chunk of the logits: its smallest leave the GEMMs short


@torch.compiler.disable
def fused_head(x: Tensor, weight: Tensor, targets: Tensor, softcap: float | None) -> Tensor:
    """Liger's fused linear cross-entropy. The compiler does not look inside: its kernels are Triton already."""
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction

    parameters = inspect.signature(LigerFusedLinearCrossEntropyFunction.forward).parameters
    options = {"accum_dtype": torch.float32, "chunk_mem_const": LIGER_CHUNKS, "softcap": softcap}
    arguments = [options.get(name, parameters[name].default) for name in [*parameters][4:]]
    return LigerFusedLinearCrossEntropyFunction.apply(x, weight, targets, *arguments)[0]
