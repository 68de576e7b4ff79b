"""One GPT-2 block, forward and backward: two halves, each `x + f(LN(x))`.

    a = x + Attention(LN1(x) Wqkv^T + bqkv) Wproj^T + bproj
    y = a + GELU(LN2(a) Wfc^T + bfc) Wfcproj^T + bfcproj

The backward is the mirror image, bottom line first. The gradient of the residual stream runs through in place: the
stream's identity path leaves it as it is, and each layer norm adds its own path.
"""

from types import ModuleType

from torch import Tensor

from handgrad.fp8.formats import Form
from handgrad.models.activations import Activations, BlockActivations, BlockGradients
from handgrad.models.parameters import BlockTensors


def forward(ops: ModuleType, w: BlockTensors, act: BlockActivations, shared: Activations, x: Tensor) -> None:
    """x (N, C) -> act.residual_out (N, C)."""
    s = shared.scratch
    ops.layernorm_forward(act.ln1, act.ln1_mean, act.ln1_rstd, x, w.ln1_weight, w.ln1_bias)
    ops.linear_forward(act.qkv, act.ln1, w.qkv_weight, w.qkv_bias, scratch=s)
    ops.attention_forward(act.atty, act.lse, act.qkv, scratch=s)
    proj = act.atty, w.proj_weight, w.proj_bias
    ops.linear_residual_forward(act.residual_mid, x, *proj, scratch=s)

    ops.layernorm_forward(act.ln2, act.ln2_mean, act.ln2_rstd, act.residual_mid, w.ln2_weight, w.ln2_bias)
    ops.linear_gelu_forward(act.gelu, act.fc, act.ln2, w.fc_weight, w.fc_bias, scratch=s)
    fcproj = act.gelu, w.fcproj_weight, w.fcproj_bias
    ops.linear_residual_forward(act.residual_out, act.residual_mid, *fcproj, scratch=s)


def backward(
    ops: ModuleType,
    w: BlockTensors,
    g: BlockTensors,
    act: BlockActivations,
    d: BlockGradients,
    shared: Activations,
    x: Tensor,
    dx: Form,
    dbias_below: Tensor | None,
    *,
    recompute: int,
) -> None:
    """shared.dresidual: from dL/dresidual_out to dL/dx, in place; adds the weights' gradients to `g`.

    That buffer's forms are d.dresidual_out at the beginning, d.dresidual_mid in the middle, and dx at the end. The bias
    gradient of a product that writes into the stream is made by the layer norm backward above it, which has that gradient
    in its hands: this block's `fcproj_bias` came with the call before, and `dbias_below` is the one of the block below
    (None in the lowest). What was not kept is computed again with the operation that made it, so every recompute level
    gives the same bits.
    """
    s = shared.scratch
    if recompute >= 2:
        ops.layernorm_forward(act.ln2, act.ln2_mean, act.ln2_rstd, act.residual_mid, w.ln2_weight, w.ln2_bias)
    if recompute >= 1:
        ops.linear_gelu_forward(act.gelu, act.fc, act.ln2, w.fc_weight, w.fc_bias, scratch=s)
    dgelu = {} if shared.dgelu is None else {"dgelu": shared.dgelu}
    fcproj = d.dresidual_out, act.gelu, act.fc, w.fcproj_weight
    ops.gelu_linear_backward(d.dhidden, g.fcproj_weight, *fcproj, **dgelu, scratch=s)
    ops.linear_backward(shared.dln, g.fc_weight, g.fc_bias, d.dhidden, act.ln2, w.fc_weight, scratch=s)
    ln2 = act.residual_mid, act.ln2_mean, act.ln2_rstd, w.ln2_weight
    ops.layernorm_backward(d.dresidual_mid, g.ln2_weight, g.ln2_bias, shared.dln, *ln2, g.proj_bias, scratch=s)

    if recompute >= 2:
        ops.layernorm_forward(act.ln1, act.ln1_mean, act.ln1_rstd, x, w.ln1_weight, w.ln1_bias)
    ops.linear_backward(shared.datty, g.proj_weight, None, d.dresidual_mid, act.atty, w.proj_weight, scratch=s)
    attention = shared.datty, act.atty, act.lse, act.qkv
    ops.attention_backward(d.dqkv, *attention, scratch=shared.attention_scratch)
    ops.linear_backward(shared.dln, g.qkv_weight, g.qkv_bias, d.dqkv, act.ln1, w.qkv_weight, scratch=s)
    ln1 = x, act.ln1_mean, act.ln1_rstd, w.ln1_weight
    ops.layernorm_backward(dx, g.ln1_weight, g.ln1_bias, shared.dln, *ln1, dbias_below, scratch=s)
