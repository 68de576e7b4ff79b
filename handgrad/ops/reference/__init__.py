"""Every operation of GPT-2 in plain torch, on any device: the specification that other backends are tested against.

On a CPU it is also the fast path: products, layer norm, GELU and attention call the library's own kernels with our
buffers. No autograd anywhere: the forward and the backward of an operation stand next to each other.
"""

# ruff: noqa: F401

from handgrad.ops.compose import after_layernorm
from handgrad.ops.reference import decode
from handgrad.ops.reference.attention import attention_backward, attention_forward, attention_scratch_bytes
from handgrad.ops.reference.classifier import classifier_forward, classifier_forward_backward
from handgrad.ops.reference.decode import store_keys_values
from handgrad.ops.reference.embedding import embedding_backward, embedding_forward
from handgrad.ops.reference.gelu import (
    gelu_backward,
    gelu_forward,
    gelu_linear_backward,
    linear_gelu_forward,
    linear_residual_forward,
    residual_forward,
)
from handgrad.ops.reference.layernorm import layernorm_backward, layernorm_forward
from handgrad.ops.reference.linear import bias_backward, linear_backward, linear_forward
from handgrad.ops.reference.optimizer import adamw_update, loss_sum, squared_norms, verdict
from handgrad.ops.reference.reduction import checksum, tree_sum
from handgrad.ops.reference.scratch import check_sizes, compile_ahead, scratch_bytes, versions

layernorm_linear_forward = after_layernorm(layernorm_forward, linear_forward)  # out = LN(x) W^T + b
layernorm_linear_gelu_forward = after_layernorm(layernorm_forward, linear_gelu_forward)  # h = LN(x) W^T + b, out = GELU(h)

CAPTURABLE = False  # the verdict and the update ask the host
