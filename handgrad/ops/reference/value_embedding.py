"""Value embeddings: every token adds its row of a table, times a gate, to its values."""

import torch
from torch import Tensor

from handgrad.machine.devices import accumulation_dtype
from handgrad.ops.reference.rmsnorm import rmsnorm_forward

# Value embeddings (after Zhou et al. 2024, https://arxiv.org/abs/2410.17897; tables from modded-nanogpt, this gate from
# nanochat): per head, v = u + g e, e = table[token], g = 2 sigmoid(z), z = sum_j W_j n_j over the first G channels
# of the block's normalised stream n.  Backward: du = dv,  de = g dv,  dz = g (1 - g / 2) sum(dv e),  dW_j = sum(dz n_j)
# over the tokens,  dn_j += sum(dz W_j) over the heads.


def value_embedding_forward(
    qkv_inout: Tensor, gate: Tensor, norm: Tensor, gate_weight: Tensor, tokens: Tensor, table: Tensor
) -> None:
    """qkv_inout (N, 3C), only its values change; gate (N, H); norm (N, C); gate_weight (H, G); tokens, N in any shape;
    table (Vp, C)."""
    wide, (H, G) = gate.dtype, gate_weight.shape
    gate.copy_(2 * torch.sigmoid(norm[:, :G].to(wide) @ gate_weight.to(wide).t()))
    values = heads_of_values(qkv_inout, H)
    values.copy_(values.to(wide) + gate.unsqueeze(-1) * looked_up(table, tokens, H).to(wide))


def value_embedding_backward(
    dvalues: Tensor,
    dnorm_inout: Tensor,
    dgate_weight_acc: Tensor,
    dqkv: Tensor,
    gate: Tensor,
    norm: Tensor,
    gate_weight: Tensor,
    tokens: Tensor,
    table: Tensor,
    *,
    scratch: Tensor | None = None,
) -> None:
    """dvalues (N, C): the gradient of the looked-up rows, for `token_embedding_backward`; dqkv (N, 3C) does not change.
    Adds the gate's share to dnorm_inout (N, C)."""
    wide, (H, G) = gate.dtype, gate_weight.shape
    dv = heads_of_values(dqkv, H).to(wide)
    dvalues.view(dv.shape).copy_(gate.unsqueeze(-1) * dv)
    dz = (dv * looked_up(table, tokens, H).to(wide)).sum(-1) * gate * (1 - gate / 2)
    # A sum over the tokens, not a GEMM: a BLAS would split so long and thin a GEMM by threads.
    dgate_weight_acc.add_((dz.unsqueeze(2) * norm[:, :G].to(wide).unsqueeze(1)).sum(0))
    dnorm_inout[:, :G].add_(dz @ gate_weight.to(wide))


def heads_of_values(qkv: Tensor, num_heads: int) -> Tensor:
    """A view (N, H, D) of the values in the packed (N, 3C)."""
    return qkv.view(qkv.shape[0], 3 * num_heads, -1)[:, 2 * num_heads :]


def looked_up(table: Tensor, tokens: Tensor, num_heads: int) -> Tensor:
    """The table rows (N, H, D) of the tokens."""
    return table.index_select(0, tokens.view(-1)).unflatten(1, (num_heads, -1))


def value_embedding_decode(qkv_inout: Tensor, stream: Tensor, gate_weight: Tensor, tokens: Tensor, table: Tensor) -> None:
    """The forward of one token per sequence. It reads the stream (B, C) itself, since generation keeps no norms."""
    wide = accumulation_dtype(stream.dtype)
    norm, rstd = torch.empty_like(stream), stream.new_empty(len(stream), dtype=wide)
    rmsnorm_forward(norm, rstd, stream)
    gate = stream.new_empty(len(stream), gate_weight.shape[0], dtype=wide)
    value_embedding_forward(qkv_inout, gate, norm, gate_weight, tokens, table)
