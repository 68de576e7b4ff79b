"""Every operation by its formula, in plain torch, on any device: the specification of all other backends.

The forward and the backward of an operation stand next to each other under their equation. They use neither autograd nor
its kernels; `handgrad.ops.cpu` calls the CPU ones.
"""

# ruff: noqa: F401

from collections.abc import Callable

from handgrad.ops import Backend, compose
from handgrad.ops.reference import decode
from handgrad.ops.reference.activations import (
    geglu_backward,
    geglu_forward,
    gelu_backward,
    gelu_forward,
    gelu_linear_backward,
    linear_gelu_forward,
    linear_relu2_forward,
    linear_residual_forward,
    linear_swiglu_forward,
    relu2_backward,
    relu2_forward,
    relu2_linear_backward,
    residual_forward,
    silu_backward,
    silu_forward,
    swiglu_backward,
    swiglu_forward,
    swiglu_linear_backward,
)
from handgrad.ops.reference.attention import attention_backward, attention_forward, attention_scratch_bytes
from handgrad.ops.reference.classifier import (
    classifier_forward,
    classifier_forward_backward,
    distill_forward_backward,
    softcap_forward,
)
from handgrad.ops.reference.convolution import (
    conv_backward,
    conv_forward,
    transposed_conv_backward,
    transposed_conv_forward,
)
from handgrad.ops.reference.decode import store_keys_values
from handgrad.ops.reference.embedding import (
    embedding_backward,
    embedding_forward,
    token_embedding_backward,
    token_embedding_forward,
)
from handgrad.ops.reference.fsq import fsq_backward, fsq_forward, fsq_round, fsq_values
from handgrad.ops.reference.groupnorm import groupnorm_backward, groupnorm_forward
from handgrad.ops.reference.layernorm import layernorm_backward, layernorm_forward
from handgrad.ops.reference.linear import bias_backward, linear_backward, linear_forward
from handgrad.ops.reference.mix import mix_rmsnorm_backward, mix_rmsnorm_forward
from handgrad.ops.reference.muon import muon_momentum, muon_polar, muon_scratch_bytes, muon_update
from handgrad.ops.reference.optimizer import adamw_update, loss_sum, squared_norms, verdict
from handgrad.ops.reference.pixels import pixels_forward, squared_error_forward, squared_error_forward_backward
from handgrad.ops.reference.reduction import checksum, digest, tree_sum
from handgrad.ops.reference.rmsnorm import rmsnorm_backward, rmsnorm_forward
from handgrad.ops.reference.rotary import (
    gained_qk_norm_rotary_backward,
    gained_qk_norm_rotary_forward,
    qk_norm_backward,
    qk_norm_forward,
    qk_norm_rotary_backward,
    qk_norm_rotary_forward,
    rotary_backward,
    rotary_forward,
)
from handgrad.ops.reference.value_embedding import value_embedding_backward, value_embedding_forward
from handgrad.ops.reference.vq import vq_backward, vq_forward, vq_update, vq_values

compose.bind_norms_and_gemms(__name__)
mix_rmsnorm_linear_forward = compose.after_mix_rmsnorm(mix_rmsnorm_forward, linear_forward)  # out = RMSnorm(r x + s x0) W^T

BACKEND = Backend("reference")  # not capturable: the verdict and the update read tensors on the host


def versions() -> dict[str, str]:
    """No library versions: the bits depend only on torch and the device."""
    return {}


def check_sizes(*, length: int, num_heads: int, channels: int, head_width: int = 0) -> None:
    """Accepts any model."""


def compile_ahead(*launches: Callable[[], None]) -> None:
    """The reference has no kernels to compile."""


def scratch_bytes(*, tokens: int, channels: int, widest: int) -> int:
    """Bytes of `scratch` that a model's operations need: none. `widest`: columns of the widest GEMM in a block."""
    return 0
