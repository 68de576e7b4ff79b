"""The operations on NVIDIA GPUs, with forwards that give a token the same bits for any number of tokens beside it.

A run on rewards decodes and trains with these, so that the training forward chooses nearly every drafted token
(`generation.rollouts`). A GEMM adds up its inner dimension in order, in one accumulator, unless the library splits it among
programs, as it likes to for few rows. The library does not promise equal bits for few rows and
many: `tests/gpu/test_invariant_on_gpu.py` shows them for the algorithms taken here, and the check of every draft needs no
promise. Attention over a cache takes the tiles and the steps of the training kernel, which is Triton's for every head.
"""

from functools import partial
from types import ModuleType
from typing import Any

from torch import Tensor

from handgrad.ops import DECODE_OPERATIONS, compose, cuda
from handgrad.ops.cuda import attention_triton, linear
from handgrad.ops.cuda.attention_decode import attention_in_tiles
from handgrad.ops.reference.attention import CAUSAL, Mask

BACKEND = cuda.BACKEND


def __getattr__(name: str) -> Any:
    """Takes all other operations from `handgrad.ops.cuda`."""
    return getattr(cuda, name)


GEMMS = (
    *("linear_forward", "linear_residual_forward", "linear_gelu_forward"),
    *("linear_relu2_forward", "linear_swiglu_forward"),
)
for name in GEMMS:
    globals()[name] = partial(getattr(linear, name), whole_sums=True)
compose.bind_norms_and_gemms(__name__)
mix_rmsnorm_linear_forward = compose.after_mix_rmsnorm(cuda.mix_rmsnorm_forward, globals()["linear_forward"])


def attention_forward(out: Tensor, lse: Tensor, qkv: Tensor, *, scratch: Tensor, mask: Mask = CAUSAL) -> None:
    attention_triton.attention_forward(out, lse, qkv, mask=mask)


def attention_decode(
    out: Tensor,
    keys_inout: Tensor,
    values_inout: Tensor,
    qkv: Tensor,
    positions: Tensor,
    *,
    window: int = 0,
    **options: Any,
) -> None:
    """A window has its own masks in training, and here the usual kernel."""
    if window:
        cuda.decode.attention_decode(out, keys_inout, values_inout, qkv, positions, window=window, **options)
    else:
        attention_in_tiles(out, keys_inout, values_inout, qkv, positions)


own = {name: value for name, value in globals().items() if name in DECODE_OPERATIONS}
own |= {
    "attention_linear_residual_forward": compose.after_attention(attention_decode, own["linear_residual_forward"]),
    "mix_rmsnorm_linear_forward": compose.after_mix(cuda.decode.mix_forward, own["rmsnorm_linear_forward"]),
}
decode = ModuleType(f"{__name__}.decode")
vars(decode).update(vars(cuda.decode) | own)
