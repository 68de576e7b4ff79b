"""Every operation of GPT-2 in plain torch, on any device: the specification that other backends are tested against.

On a CPU it is also the fast path: products, layer norm, GELU and attention call the library's own kernels with our
buffers. No autograd anywhere: the forward and the backward of an operation stand next to each other.
"""

from handgrad.fp8.reference import fold_statistics, quantize, update_scaling
from handgrad.ops.reference.attention import attention_backward, attention_forward, attention_scratch_bytes
from handgrad.ops.reference.classifier import classifier_forward, classifier_forward_backward
from handgrad.ops.reference.decode import (
    attention_decode,
    choose_tokens,
    choosing_scratch_bytes,
    embedding_decode,
    layernorm_linear_decode,
    layernorm_linear_gelu_decode,
    linear_residual_decode,
    store_keys_values,
)
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
from handgrad.ops.reference.scratch import (
    check_sizes,
    compile_ahead,
    scratch_bytes,
    statistics_parts,
    tuned_keep_bf16,
    versions,
)

CAPTURABLE = False  # the verdict and the update ask the host

__all__ = [
    "adamw_update",
    "attention_backward",
    "attention_decode",
    "attention_forward",
    "attention_scratch_bytes",
    "bias_backward",
    "check_sizes",
    "checksum",
    "choose_tokens",
    "choosing_scratch_bytes",
    "classifier_forward",
    "classifier_forward_backward",
    "compile_ahead",
    "embedding_backward",
    "embedding_decode",
    "embedding_forward",
    "fold_statistics",
    "gelu_backward",
    "gelu_forward",
    "gelu_linear_backward",
    "layernorm_backward",
    "layernorm_forward",
    "layernorm_linear_decode",
    "layernorm_linear_gelu_decode",
    "linear_backward",
    "linear_forward",
    "linear_gelu_forward",
    "linear_residual_decode",
    "linear_residual_forward",
    "loss_sum",
    "quantize",
    "residual_forward",
    "scratch_bytes",
    "squared_norms",
    "statistics_parts",
    "store_keys_values",
    "tree_sum",
    "tuned_keep_bf16",
    "update_scaling",
    "verdict",
    "versions",
]
