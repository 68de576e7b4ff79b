"""Operations that are two others in a row, for backends without a kernel for both at once."""

from collections.abc import Callable

from torch import Tensor

Operation = Callable[..., None]


def layernorm_linear(layernorm_forward: Operation, linear_forward: Operation) -> Operation:
    """Returns `layernorm_linear_forward`: out (N, O) = LN(x) weight (O, C)^T + bias (O), x (N, C). `ln` (N, C) receives
    LN(x), `mean` and `rstd` (N) its statistics."""

    def layernorm_linear_forward(
        out: Tensor,
        ln: Tensor,
        mean: Tensor,
        rstd: Tensor,
        x: Tensor,
        ln_weight: Tensor,
        ln_bias: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        *,
        scratch: Tensor | None = None,
    ) -> None:
        layernorm_forward(ln, mean, rstd, x, ln_weight, ln_bias)
        linear_forward(out, ln, weight, bias, scratch=scratch)

    return layernorm_linear_forward


def layernorm_linear_gelu(layernorm_forward: Operation, linear_gelu_forward: Operation) -> Operation:
    """Returns `layernorm_linear_gelu_forward`: out (N, F) = GELU(hidden), hidden (N, F) = LN(x) weight (F, C)^T + bias."""

    def layernorm_linear_gelu_forward(
        out: Tensor,
        hidden: Tensor,
        ln: Tensor,
        mean: Tensor,
        rstd: Tensor,
        x: Tensor,
        ln_weight: Tensor,
        ln_bias: Tensor,
        weight: Tensor,
        bias: Tensor,
        *,
        scratch: Tensor | None = None,
    ) -> None:
        layernorm_forward(ln, mean, rstd, x, ln_weight, ln_bias)
        linear_gelu_forward(out, hidden, ln, weight, bias, scratch=scratch)

    return layernorm_linear_gelu_forward
