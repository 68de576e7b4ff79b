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


# Tokens only, for models that encode positions elsewhere: x[n] = s wte[token[n]], with a number s, 1 but in Gemma. The
# backward adds equal tokens in text order, so its bits repeat. A parallel kernel needs sorted_positions (N) int32 for that:
# 0..N-1 stably sorted by token. In torch, `index_put_` keeps the order on a GPU, where it sorts, and `index_add_` on a CPU;
# not the other way round.


def token_embedding_forward(out: Tensor, tokens: Tensor, wte: Tensor, *, scale: float = 1.0) -> None:
    """out (N, C) = scale * wte (Vp, C) at tokens (B, T)."""
    torch.index_select(wte, 0, tokens.view(-1), out=out)
    if scale != 1:
        out.mul_(scale)


def token_embedding_backward(
    dwte_acc: Tensor,
    dout: Tensor,
    tokens: Tensor,
    sorted_positions: Tensor,
    *,
    scale: float = 1.0,
    scratch: Tensor | None = None,
) -> None:
    """dwte_acc[token[n]] += scale * dout[n], dout (N, C)."""
    rows = dout.to(dwte_acc.dtype)
    rows = rows if scale == 1 else rows * scale
    if dwte_acc.is_cuda:
        dwte_acc.index_put_((tokens.view(-1),), rows, accumulate=True)
    else:
        dwte_acc.index_add_(0, tokens.view(-1), rows)
