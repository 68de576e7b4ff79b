"""The switches of the twin on a GPU, one per choice, the names of the contenders that set them, and their needs."""

import importlib.util
from dataclasses import dataclass
from typing import Any

import torch

from handgrad.errors import UsageError
from handgrad.settings.config import RunConfig

ATTENTIONS = ("plain", "flash", "cudnn")
HEADS = ("whole", "chunked", "liger")
FLOAT8S = ("none", "all", "filtered", "rowwise")
FLOAT8_MULTIPLE = 16  # of the sizes of torch's fp8 GEMMs
FLOAT8_CAPABILITY = (8, 9)  # the first GPUs with fp8 tensor cores


@dataclass(frozen=True)
class Switches:
    """The choices of the twin."""

    attention: str = "cudnn"  # plain: products and a softmax; flash, cudnn: that kernel of torch's
    autocast: bool = True  # products in bf16
    tf32: bool = True  # of what stays in float32
    compiled: bool = True
    mode: str = "default"  # torch.compile's
    regional: bool = False  # compiled block by block: one compilation serves all
    padded: bool = True  # the vocabulary, to a multiple of 128
    fused: bool = True  # AdamW in one kernel
    bf16_stream: bool = False  # also the residual stream in bf16; autocast keeps it in float32
    head: str = "whole"  # the logits: all at once, in the compiler's chunks, or in Liger's fused kernel
    float8: str = "none"  # the blocks' GEMMs in fp8, by torchao: all, those its filter selects, all with rowwise scales

    @property
    def precision(self) -> str:
        """The precision of most GEMMs, in handgrad's words."""
        if self.float8 != "none":
            return "fp8"
        return "bf16" if self.autocast else "tf32" if self.tf32 else "fp32"


# A twin on a GPU is called twin-ATTENTION, and +OPTION for each of these.
OPTIONS: dict[str, dict[str, Any]] = {
    "stream": {"bf16_stream": True},
    "graphs": {"mode": "reduce-overhead"},
    "autotuned": {"mode": "max-autotune-no-cudagraphs"},
    "regional": {"regional": True},
    "chunked": {"head": "chunked"},
    "liger": {"head": "liger"},
    "torchao": {"float8": "all"},
    "torchao-filtered": {"float8": "filtered"},
    "torchao-rowwise": {"float8": "rowwise"},
}


def switches_of(name: str) -> Switches | None:
    """The twin of that name, or None if there is no such twin."""
    (kind, _, attention), options = name.split("+")[0].partition("-"), name.split("+")[1:]
    if kind != "twin" or attention not in ATTENTIONS or any(option not in OPTIONS for option in options):
        return None
    return Switches(attention=attention, **{key: value for option in options for key, value in OPTIONS[option].items()})


def check_libraries(switches: Switches) -> None:
    """Raises `UsageError` where a library of the twin is not installed."""
    if switches.float8 != "none" and importlib.util.find_spec("torchao") is None:
        raise UsageError("the torchao twins need torchao, which is not installed: pip install 'torchao>=0.18'")
    if switches.head == "liger" and importlib.util.find_spec("liger_kernel") is None:
        raise UsageError("the liger twins need Liger, which is not installed: pip install 'liger-kernel>=0.8'")


def check_float8(switches: Switches, config: RunConfig, device: torch.device) -> None:
    """Raises `UsageError` for sizes and devices that torch's fp8 GEMMs do not take."""
    if switches.float8 not in FLOAT8S:
        raise UsageError(f"unknown float8 {switches.float8!r}; known: {', '.join(FLOAT8S)}")
    if switches.float8 == "none":
        return
    sizes = {"channels": config.channels, "micro_batch x sequence_length": config.micro_batch * config.sequence_length}
    for name, size in sizes.items():
        if size % FLOAT8_MULTIPLE:
            raise UsageError(f"the torchao twins need {name} to be a multiple of {FLOAT8_MULTIPLE}, found {size}")
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < FLOAT8_CAPABILITY:
        raise UsageError(f"{torch.cuda.get_device_name(device)} has no fp8; the torchao twins need Ada, Hopper or later")
