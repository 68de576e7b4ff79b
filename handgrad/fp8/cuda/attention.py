"""Attention that also writes fp8."""

from typing import Any

from torch import Tensor

from handgrad.fp8.formats import Form


def attention_forward(out: Form, lse: Tensor, qkv: Tensor, *, scratch: Tensor) -> None:
    from handgrad.ops import cuda

    cuda.attention_forward(out, lse, qkv, scratch=scratch)


def attention_backward(dqkv: Form, dout: Tensor, out: Form, lse: Tensor, qkv: Tensor, *, scratch: Tensor) -> None:
    from handgrad.ops import cuda

    cuda.attention_backward(dqkv, dout, out, lse, qkv, scratch=scratch)


def forward_parts(*heads: int) -> Any:
    from handgrad.ops.cuda import attention

    return attention.forward_parts(*heads)


def backward_parts(*heads: int) -> Any:
    from handgrad.ops.cuda import attention

    return attention.backward_parts(*heads)
