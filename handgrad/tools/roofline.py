"""The time of a training step on a GPU by its data sheet: a roofline with a few measured shares.

GEMMs run at a share of the tensor cores' peak, or at the memory's rate if their operands take longer; attention at its
own share; all other kernels at the rate of the memory; then the optimizer. docs/planning.md holds it beside measurements.
"""

from dataclasses import dataclass

from handgrad.joins.fp8.dropout import more_passes
from handgrad.machine.gpus import Gpu
from handgrad.memory.lifetimes import WHOLE_BLOCKS
from handgrad.memory.rows import count_parameters
from handgrad.networks.fp8 import HEAD_GEMMS
from handgrad.settings.config import RunConfig
from handgrad.training.design import Design

# Fitted to steps of 124M and 1558M on an H200 at its power limit; the other sizes and GPUs are predictions.
PRODUCT_SHARE = {"fp8": 0.57}  # of the peak, in a whole step
USUAL_PRODUCT_SHARE = 0.62
# Measured: the memory-bound kernels' share of the data sheet's bandwidth, attention's of the bf16 peak, the time of
# attention that also quantises.
MEMORY_SHARE = 0.80
ATTENTION_SHARE = 0.30
QUANTISING = 1.17
# Of several GPUs: fitted to four H200s at 124M, and the share of the link that the exchange reached there.
TOGETHER_SHARE = 0.985
LINK_SHARE = 0.55

# Bytes per token and channel of a block's kernels but for GEMMs and attention: two layer norms forward (2 elements
# each) and backward (4 each), the bias sums of qkv and fc (3 and 4); in fp8 the list of benchmarks/fp8_bytes.py.
ELEMENTS, FP8_BYTES = 19, 79
AGAIN_ELEMENTS, FP8_AGAIN_BYTES = (0, 0, 4, 4), (0, 12, 18, 18)  # by level of recomputation
DROPOUT_PASSES = 10


@dataclass(frozen=True)
class StepTime:
    """Seconds of an optimizer step, by what it waits for."""

    products: float
    attention: float
    memory: float
    optimizer: float
    exchange: float  # between GPUs, with the wait for the slowest

    @property
    def total(self) -> float:
        return self.products + self.attention + self.memory + self.optimizer + self.exchange


def step_time(gpu: Gpu, config: RunConfig, design: Design, ranks: int = 1) -> StepTime:
    """Predicts a step on `ranks` such GPUs, which share the lanes. The precision must not be auto."""
    shape, precision = design.shape, config.precision
    layers, channels, length = shape.num_layers, shape.channels, shape.sequence_length
    tokens = config.tokens_per_step / ranks
    micro_batches = tokens / (config.micro_batch * length)
    size = design.dtype.itemsize
    rate = MEMORY_SHARE * gpu.terabytes_per_second * 1e12
    parameters = count_parameters(design.parameters)
    in_fp8 = fp8_share(design)
    products = tokens * product_seconds_per_token(gpu, design, precision, rate)
    kind = "bf16" if precision == "fp8" else "fp32" if precision == "tf32" else precision
    products_of_attention = 7 + 2 * (config.recompute >= WHOLE_BLOCKS)  # two forward, five backward
    attended = shape.num_heads * shape.head_width
    attention = products_of_attention * layers * attended * (length + 1) / (ATTENTION_SHARE * gpu.flops(kind))
    attention *= tokens * (1 + (QUANTISING - 1) * in_fp8)
    level = config.recompute
    per_channel = (1 - in_fp8) * size * (ELEMENTS + AGAIN_ELEMENTS[level])
    per_channel += in_fp8 * (FP8_BYTES + FP8_AGAIN_BYTES[level])
    if config.dropout:
        more = more_passes(design.fp8.gemms.blocks) / layers if design.fp8 else 0.0
        per_channel += (DROPOUT_PASSES + more) * size
    # Beside the blocks: embedding, last layer norm, loss.
    ends = (10 * size + 8) * channels + 2 * size * shape.padded_vocab_size
    # Per micro-batch: weights read forward and backward, gradients read and written in float32.
    moved = tokens * (layers * channels * per_channel + ends) + micro_batches * parameters * (2 * size + 8)
    moved += micro_batches * count_parameters(design.base) * 2 * size
    return StepTime(
        products=products,
        attention=attention,
        memory=moved / rate,
        optimizer=optimizer_bytes(config, parameters, size, ranks) / rate + offload_seconds(gpu, design),
        exchange=exchange_seconds(gpu, config, parameters, size, ranks)
        + (ranks > 1) * (1 / TOGETHER_SHARE - 1) * (products + attention + moved / rate),
    )


def fp8_share(design: Design) -> float:
    """The share of the blocks' GEMMs that run in fp8."""
    if design.fp8 is None:
        return 0.0
    return len(design.fp8.gemms.blocks) / (design.shape.num_layers * len(design.shape.fp8_parts))


def product_seconds_per_token(gpu: Gpu, design: Design, precision: str, rate: float) -> float:
    """Seconds of all GEMMs of blocks and head: forward, input gradient, weight gradient. Frozen weights have no weight
    gradient; adapters are not counted."""
    shape, size = design.shape, design.dtype.itemsize
    C, plain = shape.channels, "bf16" if precision == "fp8" else precision
    gemms = design.fp8.gemms if design.fp8 else None

    def seconds(inputs: int, outputs: int, kind: str) -> float:
        """One GEMM: 2 I O operations per token, and its operands once."""
        operations = 2 * inputs * outputs / (PRODUCT_SHARE.get(kind, USUAL_PRODUCT_SHARE) * gpu.flops(kind))
        return max(operations, (inputs + outputs) * (1 if kind == "fp8" else size) / rate)

    total, passes = 0.0, 2 if design.base else 3
    *others, hidden, last = shape.gemms
    for gemm in (*others, hidden, last):
        again = gemm is not last and (design.recompute >= WHOLE_BLOCKS or (design.recompute >= 1 and gemm is hidden))
        fp8_layers = sum(name == gemm.part for _, name in gemms.blocks) if gemms else 0
        for kind, layers in (("fp8", fp8_layers), (plain, shape.num_layers - fp8_layers)):
            if layers:
                total += layers * (passes + again) * seconds(gemm.inputs, sum(gemm.outputs.values()), kind)
    head = gemms.head if gemms else frozenset()
    kinds = ["fp8" if name in head else plain for name in HEAD_GEMMS[:passes]]
    return total + sum(seconds(C, shape.padded_vocab_size, kind) for kind in kinds)


def optimizer_bytes(config: RunConfig, parameters: int, size: int, ranks: int) -> float:
    """Bytes a step: the norm and the clearing of the gradients, and AdamW, which the ranks share from ZeRO 1 on: the
    gradient, the master weights, two moments, and the weights that the model reads; in fp8 also their forms."""
    share = ranks if config.zero else 1
    adamw = 28 - 8 * (config.moments == "bf16") + (size if size < 4 else 0)
    return parameters * (8 + adamw / share + (4 if config.precision == "fp8" else 0))


def offload_seconds(gpu: Gpu, design: Design) -> float:
    """Seconds to copy the state on the host in and out, both ways at once."""
    return design.host_plan.total_bytes / (LINK_SHARE * gpu.host_gigabytes_per_second * 1e9)


def exchange_seconds(gpu: Gpu, config: RunConfig, parameters: int, size: int, ranks: int) -> float:
    """Seconds to send gradients to their ranks and weights back, without overlap."""
    wire = 2 if config.reduce_precision == "bf16" else 4
    moved = parameters * (wire + size) * (ranks - 1) / ranks
    return moved / (LINK_SHARE * gpu.link_gigabytes_per_second * 1e9)
