"""One GPT-2 block, forward and backward: two halves, each `x + f(LN(x))`.

    a = x + Attention(LN1(x) Wqkv^T + bqkv) Wproj^T + bproj
    y = a + GELU(LN2(a) Wfc^T + bfc) Wfcproj^T + bfcproj

Dropout, in training, takes numbers out of attention's probabilities and out of what is added to x and to a.

The backward is the mirror image, bottom line first. The gradient of the residual stream runs through in place: the
stream's identity path leaves it as it is, and each layer norm adds its own path.
"""

from types import ModuleType

from torch import Tensor

from handgrad.dropout.masks import Dropout
from handgrad.dropout.model import BlockDropout
from handgrad.fp8.formats import Form, plain
from handgrad.models.activations import Activations, BlockActivations, BlockGradients
from handgrad.models.parameters import BlockTensors


def forward(
    ops: ModuleType, w: BlockTensors, act: BlockActivations, shared: Activations, x: Tensor, dropout: BlockDropout
) -> None:
    """x (N, C) -> act.residual_out (N, C)."""
    s = shared.scratch
    ops.layernorm_forward(act.ln1, act.ln1_mean, act.ln1_rstd, x, w.ln1_weight, w.ln1_bias)
    ops.linear_forward(act.qkv, act.ln1, w.qkv_weight, w.qkv_bias, scratch=s)
    ops.attention_forward(act.atty, act.lse, act.qkv, **masked(dropout.attention), scratch=s)
    proj = act.atty, w.proj_weight, w.proj_bias
    add_branch(ops, act.residual_mid, x, *proj, dropout.proj, s)

    ops.layernorm_forward(act.ln2, act.ln2_mean, act.ln2_rstd, act.residual_mid, w.ln2_weight, w.ln2_bias)
    ops.linear_gelu_forward(act.gelu, act.fc, act.ln2, w.fc_weight, w.fc_bias, scratch=s)
    fcproj = act.gelu, w.fcproj_weight, w.fcproj_bias
    add_branch(ops, act.residual_out, act.residual_mid, *fcproj, dropout.fcproj, s)


def masked(dropout: Dropout | None) -> dict[str, Dropout]:
    return {} if dropout is None else {"dropout": dropout}


def add_branch(
    ops: ModuleType, out: Tensor, stream: Tensor, inp: Form, weight: Form, bias: Tensor, dropout: Dropout | None, s: Tensor
) -> None:
    if dropout is None:
        ops.linear_residual_forward(out, stream, inp, weight, bias, scratch=s)
    else:
        ops.linear_forward(out, inp, weight, bias, scratch=s)
        ops.dropout_residual_forward(out, stream, dropout)


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
    dropout: BlockDropout,
    *,
    recompute: int,
) -> None:
    """shared.dresidual: from dL/dresidual_out to dL/dx, in place; adds the weights' gradients to `g`.

    That buffer's forms are d.dresidual_out at the beginning, d.dresidual_mid in the middle, and dx at the end. The bias
    gradient of a product that writes into the stream is made by the layer norm backward above it, which has that gradient
    in its hands: this block's `fcproj_bias` came with the call before, and `dbias_below` is the one of the block below
    (None in the lowest). With dropout the product's output gradient is another one, `dbranch`, from which its bias gradient
    is made here: `fcproj_bias` did not come before, and `dbias_below` is None. What was not kept is computed again with the
    operation that made it, so every recompute level gives the same bits.
    """
    s = shared.scratch
    if recompute >= 2:
        ops.layernorm_forward(act.ln2, act.ln2_mean, act.ln2_rstd, act.residual_mid, w.ln2_weight, w.ln2_bias)
    if recompute >= 1:
        ops.linear_gelu_forward(act.gelu, act.fc, act.ln2, w.fc_weight, w.fc_bias, scratch=s)
    dout, dbias = branch_gradient(ops, shared, d.dresidual_out, g.fcproj_bias, dropout.fcproj)
    fcproj = dout, act.gelu, act.fc, w.fcproj_weight
    ops.gelu_linear_backward(d.dhidden, g.fcproj_weight, *fcproj, scratch=s)
    if dbias is not None:
        ops.bias_backward(dbias, dout, scratch=s)
    ops.linear_backward(shared.dln, g.fc_weight, g.fc_bias, d.dhidden, act.ln2, w.fc_weight, scratch=s)
    ln2 = act.residual_mid, act.ln2_mean, act.ln2_rstd, w.ln2_weight
    dbias_mid = g.proj_bias if dropout.proj is None else None
    ops.layernorm_backward(d.dresidual_mid, g.ln2_weight, g.ln2_bias, shared.dln, *ln2, dbias_mid, scratch=s)

    if recompute >= 2:
        ops.layernorm_forward(act.ln1, act.ln1_mean, act.ln1_rstd, x, w.ln1_weight, w.ln1_bias)
    dout, dbias = branch_gradient(ops, shared, d.dresidual_mid, g.proj_bias, dropout.proj)
    ops.linear_backward(shared.datty, g.proj_weight, dbias, dout, act.atty, w.proj_weight, scratch=s)
    attention = shared.datty, act.atty, act.lse, act.qkv
    ops.attention_backward(d.dqkv, *attention, **masked(dropout.attention), scratch=shared.attention_scratch)
    ops.linear_backward(shared.dln, g.qkv_weight, g.qkv_bias, d.dqkv, act.ln1, w.qkv_weight, scratch=s)
    ln1 = x, act.ln1_mean, act.ln1_rstd, w.ln1_weight
    ops.layernorm_backward(dx, g.ln1_weight, g.ln1_bias, shared.dln, *ln1, dbias_below, scratch=s)


def branch_gradient(
    ops: ModuleType, shared: Activations, dresidual: Form, dbias: Tensor, dropout: Dropout | None
) -> tuple[Form, Tensor | None]:
    """The output gradient of a product whose result joined the stream, and where to add its bias gradient: nowhere without
    dropout, where the stream's gradient is the product's, too, and its column sums were taken in passing."""
    if dropout is None:
        return dresidual, None
    ops.dropout_backward(shared.dbranch, plain(dresidual), dropout)
    return shared.dbranch, dbias
