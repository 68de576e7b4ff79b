"""The peer on a CPU: the twin by PyTorch's own means, one switch per choice.

Everything off is the twin as it comes. Everything on is the fastest PyTorch step found: AdamW in one kernel, the BLAS that
handgrad calls, memory that the process keeps, the C++ that `torch.compile` generates.
"""

import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.twin import Block, Twin, optimizer_of, twin_step
from handgrad.errors import UsageError
from handgrad.memory.rows import ParameterRow, initialize
from handgrad.models import parameter_table
from handgrad.settings.config import ModelShape, RunConfig

# PyTorch returns a freed tensor's memory to the system, and the next one is zeroed page by page. These variables of glibc's
# allocator, which it reads when the process starts, keep it.
KEEP_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}
# g++ runs within the contender: no idle compile workers stay beside the next one.
COMPILE_HERE = {"TORCHINDUCTOR_COMPILE_THREADS": "1"}


@dataclass(frozen=True)
class CpuSwitches:
    """The choices of the twin."""

    fused: bool = True  # AdamW in one kernel
    onednn: bool = False  # float32 linear layers by oneDNN; under bf16 autocast torch calls it itself
    kept_memory: bool = False
    compiled: bool = False

    @property
    def environment(self) -> dict[str, str]:
        """The variables of the twin's process."""
        return {**(KEEP_MEMORY if self.kept_memory else {}), **(COMPILE_HERE if self.compiled else {})}


# oneDNN's product as an operator of its own: the compiler lowers `mkldnn._linear_pointwise` with constant weights only, as
# in inference. It calls this one as it is.
LIBRARY = torch.library.Library("handgrad_benchmarks", "DEF")
LIBRARY.define("product(Tensor left, Tensor right, Tensor? bias) -> Tensor")


def library_product(left: Tensor, right: Tensor, bias: Tensor | None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(left, right, bias, "none", [], "")


def shape_of_product(left: Tensor, right: Tensor, bias: Tensor | None) -> Tensor:
    return left.new_empty((*left.shape[:-1], right.shape[0]))


LIBRARY.impl("product", library_product, "CPU")
torch.library.register_fake("handgrad_benchmarks::product", shape_of_product, lib=LIBRARY)


def product(left: Tensor, right: Tensor, bias: Tensor | None = None) -> Tensor:
    """left (..., K) right (N, K)^T + bias (N) in float32, by oneDNN, as in `handgrad.ops.cpu.linear`."""
    return torch.ops.handgrad_benchmarks.product(left, right, bias)


class OneDnnProduct(torch.autograd.Function):
    """F.linear whose three products, forward and backward, are oneDNN's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.has_bias = bias is not None
        return product(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        x, weight = ctx.saved_tensors
        rows, inputs = dout.reshape(-1, dout.shape[-1]), x.reshape(-1, x.shape[-1])
        dx, dweight = product(rows, weight.t()), product(rows.t(), inputs.t())
        return dx.view(x.shape), dweight, rows.sum(0) if ctx.has_bias else None


class OneDnnLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return OneDnnProduct.apply(x, self.weight, self.bias)


class OneDnnTwin(Twin):
    """The twin whose linear layers, blocks' and head's, call oneDNN in float32."""

    def __init__(self, shape: ModelShape):
        super().__init__(shape)
        if not torch.backends.mkldnn.is_available():
            raise UsageError("the oneDNN twins need a torch built with oneDNN; this one has none")
        self.blocks = nn.ModuleList(Block(shape.channels, shape.num_heads, OneDnnLinear) for _ in range(shape.num_layers))

    def head(self, x: Tensor) -> Tensor:
        return OneDnnProduct.apply(x, self.wte.weight, None)


def check_compiler() -> None:
    """Raises `UsageError` where `torch.compile` finds no C++ compiler."""
    compiler = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")
    if shutil.which(compiler) is None:
        raise UsageError(f"the compiled twins need a C++ compiler, {compiler} is not there; install it or set CXX")


def load_initial(twin: Twin, table: tuple[ParameterRow, ...], seed: int) -> None:
    """handgrad's initial weights of `seed`, number for number."""

    def put(row: ParameterRow, values: Tensor) -> None:
        twin.parameter_of(row).data.copy_(values)

    for row in table:
        twin.parameter_of(row).data.zero_()
    initialize(table, seed, put)


def make_twin(config: RunConfig, vocab_size: int, switches: CpuSwitches) -> Twin:
    """The twin with handgrad's initial weights; it compiles in its first step."""
    shape = config.shape(vocab_size)
    twin = OneDnnTwin(shape) if switches.onednn and config.precision == "fp32" else Twin(shape)
    load_initial(twin, parameter_table(shape), config.seed)
    if switches.compiled:
        check_compiler()
        twin.compile()
    return twin


def twin_steps(
    config: RunConfig, vocab_size: int, switches: CpuSwitches, batch: tuple[Tensor, Tensor]
) -> Callable[[int], float]:
    """Returns a function that makes step n on the batch of (tokens, targets) and returns its loss."""
    twin = make_twin(config, vocab_size, switches)
    optimizer = optimizer_of(twin, config, fused=switches.fused)
    return lambda step: twin_step(twin, optimizer, config, [batch], step, autocast=config.precision == "bf16")[0]
