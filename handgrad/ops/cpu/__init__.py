"""The CPU operations: torch's fused kernels where they are faster than the formula, the reference elsewhere.

Layer norm, GELU and attention, forward and backward, AdamW and float32 GEMMs (oneDNN, MKL) call the library. It has no
kernel for RMS norm, rotation, squared ReLU, SwiGLU and the soft cap; these make fewer passes over memory than the formula.
The tests compare each with `handgrad.ops.reference`, its specification.
"""

# ruff: noqa: F401

from typing import Any

from handgrad.ops import Backend, compose, reference
from handgrad.ops.cpu import decode
from handgrad.ops.cpu.attention import attention_backward, attention_forward
from handgrad.ops.cpu.classifier import classifier_forward, classifier_forward_backward, distill_forward_backward
from handgrad.ops.cpu.convolution import conv_backward, conv_forward, transposed_conv_backward, transposed_conv_forward
from handgrad.ops.cpu.linear import (
    geglu_backward,
    geglu_forward,
    gelu_backward,
    gelu_forward,
    gelu_linear_backward,
    linear_backward,
    linear_forward,
    linear_gelu_forward,
    linear_relu2_forward,
    linear_residual_forward,
    linear_swiglu_forward,
    relu2_backward,
    relu2_forward,
    relu2_linear_backward,
    silu_backward,
    silu_forward,
    swiglu_backward,
    swiglu_forward,
    swiglu_linear_backward,
)
from handgrad.ops.cpu.norms import layernorm_backward, layernorm_forward, rmsnorm_backward, rmsnorm_forward
from handgrad.ops.cpu.optimizer import adamw_update, muon_momentum, muon_polar, muon_update
from handgrad.ops.cpu.rotary import (
    qk_norm_backward,
    qk_norm_forward,
    qk_norm_rotary_backward,
    qk_norm_rotary_forward,
    rotary_backward,
    rotary_forward,
)

compose.bind_norms_and_gemms(__name__)
mix_rmsnorm_linear_forward = compose.after_mix_rmsnorm(reference.mix_rmsnorm_forward, linear_forward)


BACKEND = Backend("cpu")


def __getattr__(name: str) -> Any:
    """Takes all other operations from the reference."""
    return getattr(reference, name)
