"""Dropout on NVIDIA GPUs, by Triton: the operations of `handgrad.joins.dropout.reference`."""

# ruff: noqa: F401

from handgrad.joins.dropout.cuda.attention import attention_backward, attention_forward
from handgrad.joins.dropout.cuda.elementwise import dropout_backward, dropout_forward, dropout_residual_forward
from handgrad.ops.sizes import attention_scratch_bytes
