"""Token and position embedding."""

import torch
from torch import Tensor

# Embedding: x[n] = wte[token[n]] + wpe[position[n]].


def embedding_forward(out: Tensor, tokens: Tensor, wte: Tensor, wpe: Tensor) -> None:
    """out (N, C) = wte (Vp, C) at tokens (B, T) + wpe (maxT, C) at 0..T-1."""
    token_embedding_forward(out, tokens, wte)
    out.view(*tokens.shape, -1).add_(wpe[: tokens.shape[1]])


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
    token_embedding_backward(dwte_acc, dout, tokens, sorted_positions)
    dwpe_acc[: tokens.shape[1]].add_(dout.to(dwpe_acc.dtype).view(*tokens.shape, -1).sum(0))


# Tokens only, for models that encode positions elsewhere: x[n] = wte[token[n]]. The backward adds equal tokens in text
# order, so its bits repeat. A parallel kernel needs sorted_positions (N) int32 for that: 0..N-1 stably sorted by token. In
# torch, `index_put_` keeps the order on a GPU, where it sorts, and `index_add_` on a CPU; not the other way round.


def token_embedding_forward(out: Tensor, tokens: Tensor, wte: Tensor) -> None:
    """out (N, C) = wte (Vp, C) at tokens (B, T)."""
    torch.index_select(wte, 0, tokens.view(-1), out=out)


def token_embedding_backward(
    dwte_acc: Tensor, dout: Tensor, tokens: Tensor, sorted_positions: Tensor, *, scratch: Tensor | None = None
) -> None:
    """dwte_acc[token[n]] += dout[n], dout (N, C)."""
    if dwte_acc.is_cuda:
        dwte_acc.index_put_((tokens.view(-1),), dout.to(dwte_acc.dtype), accumulate=True)
    else:
        dwte_acc.index_add_(0, tokens.view(-1), dout.to(dwte_acc.dtype))
