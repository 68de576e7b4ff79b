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
    ops.layernorm_forward(act.ln1, act.ln1_mean, act.ln1_rstd, x, w.ln1_weight, w.ln1_bias)
    ops.linear_forward(act.qkv, act.ln1, w.qkv_weight, w.qkv_bias)
    ops.attention_forward(act.atty, act.lse, act.qkv)
    ops.linear_forward(shared.branch, act.atty, w.proj_weight, w.proj_bias)
    ops.residual_forward(act.residual_mid, x, shared.branch)

    ops.layernorm_forward(act.ln2, act.ln2_mean, act.ln2_rstd, act.residual_mid, w.ln2_weight, w.ln2_bias)
    ops.linear_forward(act.fc, act.ln2, w.fc_weight, w.fc_bias)
    ops.gelu_forward(act.gelu, act.fc)
    ops.linear_forward(shared.branch, act.gelu, w.fcproj_weight, w.fcproj_bias)
    ops.residual_forward(act.residual_out, act.residual_mid, shared.branch)


def backward(
    ops: ModuleType,
    w: BlockTensors,
    g: BlockTensors,
    act: BlockActivations,
    shared: Activations,
    x: Tensor,
    *,
    recompute: int,
) -> None:
    """shared.dresidual: from dL/dresidual_out to dL/dx, in place; adds the weights' gradients to `g`.

    What was not kept is computed again with the operation that made it, so every recompute level gives the same bits.
    """
    d = shared.dresidual
    if recompute >= 1:
        ops.gelu_forward(act.gelu, act.fc)
    if recompute >= 2:
        ops.layernorm_forward(act.ln2, act.ln2_mean, act.ln2_rstd, act.residual_mid, w.ln2_weight, w.ln2_bias)
    ops.linear_backward(shared.dhidden, g.fcproj_weight, g.fcproj_bias, d, act.gelu, w.fcproj_weight)
    ops.gelu_backward(shared.dhidden, act.fc)
    ops.linear_backward(shared.dln, g.fc_weight, g.fc_bias, shared.dhidden, act.ln2, w.fc_weight)
    ops.layernorm_backward(
        d, g.ln2_weight, g.ln2_bias, shared.dln, act.residual_mid, act.ln2_mean, act.ln2_rstd, w.ln2_weight
    )

    if recompute >= 2:
        ops.layernorm_forward(act.ln1, act.ln1_mean, act.ln1_rstd, x, w.ln1_weight, w.ln1_bias)
    ops.linear_backward(shared.datty, g.proj_weight, g.proj_bias, d, act.atty, w.proj_weight)
    ops.attention_backward(shared.dqkv, shared.datty, act.atty, act.lse, act.qkv)
    ops.linear_backward(shared.dln, g.qkv_weight, g.qkv_bias, shared.dqkv, act.ln1, w.qkv_weight)
    ops.layernorm_backward(d, g.ln1_weight, g.ln1_bias, shared.dln, x, act.ln1_mean, act.ln1_rstd, w.ln1_weight)
