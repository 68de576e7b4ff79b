"""Token and position embedding."""

import torch
from torch import Tensor

# Embedding: x[n] = wte[token[n]] + wpe[position[n]].


def embedding_forward(out: Tensor, tokens: Tensor, wte: Tensor, wpe: Tensor) -> None:
    """out (N, C) = wte (Vp, C) at tokens (B, T) + wpe (maxT, C) at 0..T-1."""
    B, T = tokens.shape
    torch.index_select(wte, 0, tokens.view(-1), out=out)
    out.view(B, T, -1).add_(wpe[:T])


def embedding_backward(
    dwte_acc: Tensor,
    dwpe_acc: Tensor,
    dout: Tensor,
    tokens: Tensor,
    sorted_positions: Tensor,
    *,
    scratch: Tensor | None = None,
) -> None:
    """dwte_acc[token[n]] += dout[n]; dwpe_acc[t] += sum over the batch of dout[b, t]. dout is (N, C).

    `sorted_positions` (N) int32 holds 0..N-1 ordered by token, equal tokens in their order: what a parallel kernel needs
    to add equal tokens in a fixed order. `index_put_` sorts by itself.
    """
    B, T = tokens.shape
    dout = dout.to(dwte_acc.dtype)
    dwte_acc.index_put_((tokens.view(-1),), dout, accumulate=True)
    dwpe_acc[:T].add_(dout.view(B, T, -1).sum(0))
