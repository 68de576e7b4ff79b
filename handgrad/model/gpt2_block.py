"""One GPT-2 block, forward and backward: two halves, each `x + f(LN(x))`.

    a = x + Attention(LN1(x) Wqkv^T + bqkv) Wproj^T + bproj
    y = a + GELU(LN2(a) Wfc^T + bfc) Wfcproj^T + bfcproj

The backward is the mirror image, bottom line first. The gradient of the residual stream runs through in place: the
stream's identity path leaves it as it is, and each layer norm adds its own path.
"""

from types import ModuleType

from torch import Tensor

from handgrad.model.activations import Activations, BlockActivations
from handgrad.model.parameters import BlockTensors


def forward(ops: ModuleType, w: BlockTensors, act: BlockActivations, shared: Activations, x: Tensor) -> None:
    """x (N, C) -> act.residual_out (N, C)."""
    s = shared.scratch
    ops.layernorm_forward(act.ln1, act.ln1_mean, act.ln1_rstd, x, w.ln1_weight, w.ln1_bias)
    ops.linear_forward(act.qkv, act.ln1, w.qkv_weight, w.qkv_bias, scratch=s)
    ops.attention_forward(act.atty, act.lse, act.qkv, scratch=s)
    ops.linear_residual_forward(act.residual_mid, x, act.atty, w.proj_weight, w.proj_bias, scratch=s)

    ops.layernorm_forward(act.ln2, act.ln2_mean, act.ln2_rstd, act.residual_mid, w.ln2_weight, w.ln2_bias)
    ops.linear_gelu_forward(act.gelu, act.fc, act.ln2, w.fc_weight, w.fc_bias, scratch=s)
    ops.linear_residual_forward(act.residual_out, act.residual_mid, act.gelu, w.fcproj_weight, w.fcproj_bias, scratch=s)


def backward(
    ops: ModuleType,
    w: BlockTensors,
    g: BlockTensors,
    act: BlockActivations,
    shared: Activations,
    x: Tensor,
    dbias_below: Tensor | None,
    *,
    recompute: int,
) -> None:
    """shared.dresidual: from dL/dresidual_out to dL/dx, in place; adds the weights' gradients to `g`.

    The bias gradient of a product that writes into the stream is made by the layer norm backward above it, which has
    that gradient in its hands: this block's `fcproj_bias` came with the call before, and `dbias_below` is the one of the
    block below (None in the lowest). What was not kept is computed again with the operation that made it, so every
    recompute level gives the same bits.
    """
    d, s = shared.dresidual, shared.scratch
    if recompute >= 2:
        ops.layernorm_forward(act.ln2, act.ln2_mean, act.ln2_rstd, act.residual_mid, w.ln2_weight, w.ln2_bias)
    if recompute >= 1:
        ops.linear_gelu_forward(act.gelu, act.fc, act.ln2, w.fc_weight, w.fc_bias, scratch=s)
    ops.gelu_linear_backward(shared.dhidden, g.fcproj_weight, None, d, act.gelu, act.fc, w.fcproj_weight, scratch=s)
    ops.linear_backward(shared.dln, g.fc_weight, g.fc_bias, shared.dhidden, act.ln2, w.fc_weight, scratch=s)
    statistics = act.ln2_mean, act.ln2_rstd
    ops.layernorm_backward(
        d, g.ln2_weight, g.ln2_bias, shared.dln, act.residual_mid, *statistics, w.ln2_weight, g.proj_bias, scratch=s
    )

    if recompute >= 2:
        ops.layernorm_forward(act.ln1, act.ln1_mean, act.ln1_rstd, x, w.ln1_weight, w.ln1_bias)
    ops.linear_backward(shared.datty, g.proj_weight, None, d, act.atty, w.proj_weight, scratch=s)
    ops.attention_backward(shared.dqkv, shared.datty, act.atty, act.lse, act.qkv, scratch=shared.attention_scratch)
    ops.linear_backward(shared.dln, g.qkv_weight, g.qkv_bias, shared.dqkv, act.ln1, w.qkv_weight, scratch=s)
    statistics = act.ln1_mean, act.ln1_rstd
    ops.layernorm_backward(d, g.ln1_weight, g.ln1_bias, shared.dln, x, *statistics, w.ln1_weight, dbias_below, scratch=s)
