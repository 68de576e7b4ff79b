"""Transition."""

from handgrad.models import gpt2
from handgrad.models.rows import named

ModelTensors = gpt2.Weights
flops_per_token = gpt2.flops_per_token


def block_name(layer, name):
    return f"blocks.{layer}.{name}"


def model_tensors(flat, table, forms=None):
    layers = sum(row.name.endswith(".qkv_weight") for row in table)
    views = {row.name: row.view(flat) for row in table}
    return named(gpt2.Weights, views | (forms or {}), layers)
