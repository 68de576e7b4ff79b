"""The record of a network, without its equations. Each file of this folder defines one."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from handgrad.networks import ModelShape

NEVER = 4  # above every recompute level


class Gemm(NamedTuple):
    """A GEMM of a block."""

    weight: str  # its matrix, like qkv_weight
    part: str  # GEMMs of one part switch to fp8 together
    inputs: int  # I
    outputs: dict[str, int]  # of each projection stacked in the matrix, by its name for adapters


@dataclass(frozen=True)
class Fp8:
    """The fp8 forms of a tensor: `rows` in its own layout, for forward and input gradient, and `columns`, transposed, for
    the weight gradient. `part` names the GEMMs that read them; a run can switch each part to bf16."""

    part: str
    gradient: bool = False  # an activation's gradient, in memory that all blocks use in turn
    keeps_16bit: bool = False  # another reader also needs it in 16 bits
    rerun_from: int = NEVER  # from this recompute level on, the backward reruns the GEMM that reads `rows`
    late_columns: bool = False  # the backward writes `columns`
    wide: bool = False  # a gradient whose values span more than e4m3's range
    workspace: str = ""  # a 16-bit intermediate of its producer


# Tensors that every network has: attention's output, the head's input, the stream's gradient.
COMMON_FORMS = {
    "atty": Fp8("proj", keeps_16bit=True),
    "lnf": Fp8("head", keeps_16bit=True),
    "logits": Fp8("head", gradient=True, keeps_16bit=True),
    "dresidual_mid": Fp8("proj", gradient=True, keeps_16bit=True),
    "dresidual_out": Fp8("mlp", gradient=True, keeps_16bit=True),
}


HEAD_FORMS = {name: COMMON_FORMS[name] for name in ("lnf", "logits")}


@dataclass(frozen=True)
class Network:
    """A network, for all code that does not compute it. The functions take the model's shape."""

    title: str  # in a sentence
    gemms: Callable[["ModelShape"], tuple[Gemm, ...]]  # of a block, in the order of its forward
    # Sizes.
    models: Mapping[str, tuple[int, int, int]] = field(default_factory=dict)  # (layers, heads, channels) by name
    head_width: Callable[["ModelShape"], int] | None = None  # D; None: channels / num_heads
    kv_heads: Callable[["ModelShape"], int] = lambda shape: shape.num_heads  # K
    feed_forward: Callable[["ModelShape"], int] = lambda shape: 4 * shape.channels  # F
    windows: Callable[["ModelShape"], tuple[int, ...]] = lambda shape: (0,) * shape.num_layers  # see `ModelShape.windows`
    softcap: Callable[["ModelShape"], float] = lambda shape: 0.0  # the bound c of logits c tanh(x / c), or 0 for none
    letters: Callable[["ModelShape"], dict[str, int]] = lambda shape: {}  # sizes of letters that only it has
    # A setting that only it has.
    setting: str = ""  # its name in a configuration
    settle: Callable[["ModelShape"], str] = lambda shape: ""  # its text, with every default in it
    check: Callable[[Any], None] = lambda config: None  # raises `UsageError` for an invalid configuration
    # Texts.
    variant: Callable[["ModelShape"], str] = lambda shape: f"{shape.architecture}, "  # begins a line about a model
    # Features that it supports.
    dropout: bool = False
    adapters: bool = True
    pictures: bool = False  # pictures in and out, a sample each; no loss head, no text
    any_context: bool = False  # positions are computed: training on shorter samples keeps the context length
    tied: Callable[["ModelShape"], bool] = lambda shape: True  # the loss head is the token embedding
    counted: Callable[["ModelShape"], int] = lambda shape: 0  # parameters outside GEMMs that also count 6 FLOPs each
    flops: Callable[["ModelShape"], float] | None = None  # per token, forward and backward; None: of GEMMs and attention
    sides: Callable[["ModelShape"], dict[str, int]] = lambda shape: {}  # matrix sides that are not derived from channels
    # Tensors other than weights that fp8 GEMMs read, by name, inside and outside the blocks.
    fp8: Callable[["ModelShape"], Mapping[str, Fp8]] = lambda shape: {}
    fp8_gradients: str = "e4m3"  # the blocks'; e5m2 where e4m3 raises the loss (docs/results.md)
    # In transformers.
    model_types: tuple[str, ...] = ()
    prefix: str = ""  # of every name; a file may omit it
    blocks: str = "blocks"
    modules: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # our tensor -> theirs, stacked by rows
    transposed: bool = False  # transformers stores a block's matrices as (in, out)
    brings_code: bool = False  # transformers lacks it, so an exported folder includes its code

    def precision(self, name: str) -> str:
        """The precision for a name. "auto" is fp32 for pictures, and otherwise stays: the device decides."""
        return "fp32" if self.pictures and name == "auto" else name
