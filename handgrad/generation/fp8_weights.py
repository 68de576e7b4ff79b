"""Weights in fp8 for generation: half the bytes that a step of one text reads.

Every matrix of a GEMM is rounded to e4m3, each row with a scale of its own, a power of two, so that nothing but the
rounding to four significant bits changes: a weight is at most 2^-4 of itself off, below 2^-15 of its row's largest more. A
16-bit number holds each product of scale and e4m3 number exactly. Therefore any backend, prompts and several texts use the
rounded weights as they use others; the GEMMs of one text read the e4m3 numbers themselves, with the kernels on a GPU
that converts them (compute capability 8.9).
"""

from collections.abc import Callable, Mapping
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from handgrad.memory.arena import Buffer
from handgrad.memory.rows import ParameterRow
from handgrad.models import parameter_table
from handgrad.networks import ModelShape
from handgrad.ops.compose import Overlay

KIND = "fp8 weights"
E4M3, LARGEST_EXPONENT, LARGEST = torch.float8_e4m3fn, 9, 448.0  # 448 = 7/8 of 2^9
OLDEST_CAPABILITY = (8, 9)

# The operations of generation that are GEMMs with a weight.
PRODUCTS = (
    *("layernorm_linear_forward", "layernorm_linear_gelu_forward", "linear_residual_forward"),
    *("rmsnorm_linear_forward", "rmsnorm_linear_relu2_forward", "rmsnorm_linear_swiglu_forward"),
    *("mix_rmsnorm_linear_forward", "attention_linear_residual_forward"),
)


def row_scales(weight: Tensor) -> Tensor:
    """(O) float32: the powers of two that make the largest number of each row of weight (O, K) one from 224 to 448; 1 for a
    row of zeros."""
    mantissa, exponent = torch.frexp(weight.float().abs().amax(1))
    exponent = exponent - LARGEST_EXPONENT + (mantissa > LARGEST / 2**LARGEST_EXPONENT)
    return torch.where(mantissa > 0, torch.exp2(exponent.float()), 1.0)


def quantized(weight: Tensor) -> tuple[Tensor, Tensor]:
    """(rows (O, K) e4m3, scales (O) float32), whose product is the rounded weight."""
    scales = row_scales(weight)
    return (weight.float() / scales.unsqueeze(1)).to(E4M3), scales


def rounded(shape: ModelShape, weight: Callable[[ParameterRow], Tensor]) -> Callable[[ParameterRow], Tensor]:
    """Returns `weight`, which gives the stored weight of a row of the model's table, with GEMMs' matrices rounded."""
    names = {row.name for row in fp8_rows(shape)}

    def rounded_weight(row: ParameterRow) -> Tensor:
        found = weight(row)
        if row.name not in names:
            return found
        rows, scales = quantized(found)
        return rows.float() * scales.unsqueeze(1)

    return rounded_weight


def fp8_buffers(shape: ModelShape, ops: ModuleType, device: torch.device) -> list[Buffer]:
    """The e4m3 numbers and scales of all matrices, beside the rounded weights; none where no GEMM reads them."""
    if ops.BACKEND.name != "cuda" or device.type != "cuda":
        return []
    if torch.cuda.get_device_capability(device) < OLDEST_CAPABILITY:
        return []
    return buffers_of(shape)


def buffers_of(shape: ModelShape) -> list[Buffer]:
    found = []
    for row in fp8_rows(shape):
        found.append(Buffer(f"{KIND}.{row.name}", row.shape, E4M3, KIND))
        found.append(Buffer(f"{KIND}.{row.name}.scales", row.shape[:1], torch.float32, KIND))
    return found


def fp8_rows(shape: ModelShape) -> list[ParameterRow]:
    """The matrices of the blocks, and the loss head, or the embedding that it shares."""
    return [row for row in parameter_table(shape) if row.name.rpartition(".")[2] in shape.forms]


class WithFp8Weights(Overlay):
    """The operations `ops` of generation for a model that writes one text. GEMMs read its matrices in fp8: each is known
    by the weight that it carries, the very object that the model passes."""

    def __init__(self, ops: ModuleType, found: Mapping[Tensor, Any]):
        super().__init__(ops)
        self.found = found

    def __getattr__(self, name: str) -> Any:
        operation: Callable[..., None] = getattr(self.ops, name)
        return partial(self.call, operation) if name in PRODUCTS else operation

    def call(self, operation: Callable[..., None], *tensors: Any, **options: Any) -> None:
        operation(*(self.found.get(tensor, tensor) for tensor in tensors), **options)


def with_fp8_weights(ops: ModuleType, shape: ModelShape, weights: Any, views: Mapping[str, Tensor]) -> ModuleType:
    """Fills `fp8_buffers` from the rounded `weights` and returns the operations that read them; `ops` as it is without
    these buffers."""
    if not any(name.startswith(KIND) for name in views):
        return ops
    from handgrad.ops.cuda.row_gemms import ScaledRows  # imports the library of a GPU

    found: dict[Tensor, Any] = {}
    for row in fp8_rows(shape):
        rows, scales = views[f"{KIND}.{row.name}"], views[f"{KIND}.{row.name}.scales"]
        for weight in tensors_of(weights, row.name):
            for target, value in zip((rows, scales), quantized(weight), strict=True):
                target.copy_(value)
            found[weight] = ScaledRows(rows, scales)
    reading = Overlay(ops)
    reading.decode = WithFp8Weights(ops.decode, found)  # type: ignore[attr-defined]
    return reading


def tensors_of(weights: Any, name: str) -> list[Tensor]:
    """The tensors of a row among an architecture's `Weights`: the loss head may share the embedding's."""
    *path, last = name.split(".")
    if not path:
        alone = getattr(weights, last)
        return [alone] if weights.head is alone or weights.head.data_ptr() != alone.data_ptr() else [alone, weights.head]
    _, layer = path
    return [getattr(weights.blocks[int(layer)], last)]
