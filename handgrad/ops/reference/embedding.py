"""Token and position embedding."""

import torch
from torch import Tensor

# Embedding: x[n] = wte[token[n]] + wpe[position[n]].


def embedding_forward(out: Tensor, tokens: Tensor, wte: Tensor, wpe: Tensor) -> None:
    """out (N, C) = wte (Vp, C) at tokens (B, T) + wpe (maxT, C) at 0..T-1."""
    B, T = tokens.shape
    token_embedding_forward(out, tokens, wte)
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
    """dwte_acc[token[n]] += dout[n]; dwpe_acc[t] += sum over the batch of dout[b, t]. dout is (N, C)."""
    B, T = tokens.shape
    token_embedding_backward(dwte_acc, dout, tokens, sorted_positions)
    dwpe_acc[:T].add_(dout.to(dwpe_acc.dtype).view(B, T, -1).sum(0))


# Tokens alone, for models that encode positions elsewhere: x[n] = wte[token[n]].


def token_embedding_forward(out: Tensor, tokens: Tensor, wte: Tensor) -> None:
    """out (N, C) = wte (Vp, C) at tokens (B, T)."""
    torch.index_select(wte, 0, tokens.view(-1), out=out)


def token_embedding_backward(
    dwte_acc: Tensor, dout: Tensor, tokens: Tensor, sorted_positions: Tensor, *, scratch: Tensor | None = None
) -> None:
    """dwte_acc[token[n]] += dout[n], dout (N, C).

    `sorted_positions` (N) int32 holds 0..N-1 ordered by token, equal tokens in their order: a parallel kernel adds equal
    tokens in that order. `index_put_` sorts by itself.
    """
    dwte_acc.index_put_((tokens.view(-1),), dout.to(dwte_acc.dtype), accumulate=True)
