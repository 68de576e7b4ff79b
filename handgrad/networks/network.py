"""A network without its equations: the record that each file of this folder makes."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from handgrad.networks import ModelShape

NEVER = 4  # above every recompute level


class Gemm(NamedTuple):
    """A GEMM of a block."""

    weight: str  # its matrix, like qkv_weight
    part: str  # the GEMMs of one part go to fp8 together
    inputs: int  # I
    outputs: dict[str, int]  # of each projection in the matrix, one above the other, by the name that adapters have for it


@dataclass(frozen=True)
class Fp8:
    """The fp8 forms of a tensor: `rows` as it is, for forward and input gradient, and `columns`, transposed, for the weight
    gradient. Which GEMMs read them is named by `part`; parts are switched to bf16 one by one."""

    part: str
    gradient: bool = False  # of an activation; the blocks make theirs one after another in the same memory
    keeps_16bit: bool = False  # another reader wants it in 16 bits as well
    rerun_from: int = NEVER  # recompute level from which the GEMM that reads `rows` runs again in the backward
    late_columns: bool = False  # `columns` are made in the backward
    wide: bool = False  # a gradient whose parts differ in size by more than e4m3's range
    workspace: str = ""  # a 16-bit tensor that its producer passes through


# Of tensors that every network here has: attention's output, the head's input, the gradient of the stream.
COMMON_FORMS = {
    "atty": Fp8("proj", keeps_16bit=True),
    "lnf": Fp8("head", keeps_16bit=True),
    "logits": Fp8("head", gradient=True, keeps_16bit=True),
    "dresidual_mid": Fp8("proj", gradient=True, keeps_16bit=True),
    "dresidual_out": Fp8("mlp", gradient=True, keeps_16bit=True),
}


@dataclass(frozen=True)
class Network:
    """A network, for all code that does not compute it. Functions take the model's shape."""

    title: str  # in a sentence
    gemms: Callable[["ModelShape"], tuple[Gemm, ...]]  # of a block, in the order of its forward
    # Sizes.
    models: Mapping[str, tuple[int, int, int]] = field(default_factory=dict)  # (layers, heads, channels) by name
    head_width: Callable[["ModelShape"], int] | None = None  # D; None: channels / num_heads
    kv_heads: Callable[["ModelShape"], int] = lambda shape: shape.num_heads  # K
    feed_forward: Callable[["ModelShape"], int] = lambda shape: 4 * shape.channels  # F
    softcap: Callable[["ModelShape"], float] = lambda shape: 0.0  # the bound c of logits c tanh(x / c), or 0 for none
    letters: Callable[["ModelShape"], dict[str, int]] = lambda shape: {}  # sizes by letters that it alone has
    # A setting that it alone has.
    setting: str = ""  # its name in a configuration
    settle: Callable[["ModelShape"], str] = lambda shape: ""  # its text, with every default in it
    check: Callable[[Any], None] = lambda config: None  # raises `UsageError` for a configuration that makes no model
    # Texts.
    variant: Callable[["ModelShape"], str] = lambda shape: f"{shape.architecture}, "  # begins a line about a model
    # What runs can do with it.
    dropout: bool = False
    adapters: bool = True
    any_context: bool = False  # positions are computed: a run on shorter samples does not shorten its context
    tied: Callable[["ModelShape"], bool] = lambda shape: True  # the loss head is the token embedding
    counted: Callable[["ModelShape"], int] = lambda shape: 0  # parameters outside GEMMs, 6 FLOPs each like those inside
    sides: Callable[["ModelShape"], dict[str, int]] = lambda shape: {}  # of matrices that do not follow from channels
    # Tensors that fp8 GEMMs read and weights are not, by their names in a block or beside it.
    fp8: Callable[["ModelShape"], Mapping[str, Fp8]] = lambda shape: {}
    # In transformers.
    model_types: tuple[str, ...] = ()
    prefix: str = ""  # of every name, which a file may leave out
    blocks: str = "blocks"
    modules: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # our tensors -> theirs, one above the other
    transposed: bool = False  # a block's matrices are (in, out) there
    brings_code: bool = False  # transformers lacks it, so that an exported folder has its code
