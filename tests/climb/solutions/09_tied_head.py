from torch import Tensor


def tied_head(x: Tensor, dlogits: Tensor, tokens: Tensor, dembedded: Tensor, wte: Tensor) -> tuple[Tensor, Tensor]:
    dx = dlogits @ wte
    dwte = dlogits.T @ x
    dwte.index_add_(0, tokens, dembedded)
    return dx, dwte
