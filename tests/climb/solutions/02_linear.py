from torch import Tensor


def linear(x: Tensor, weight: Tensor, bias: Tensor, dy: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    y = x @ weight.T + bias
    dx = dy @ weight
    dweight = dy.T @ x
    dbias = dy.sum(0)
    return y, dx, dweight, dbias
