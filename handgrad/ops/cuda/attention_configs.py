"""Attention's tiles on the GPU that is there."""

import functools

import torch
from torch import Tensor

from handgrad.ops.sizes import ATTENTION_TILES, TURING_TILES, AttentionTile, attention_tile

AMPERE = (8, 0)


@functools.cache
def capability(device: torch.device) -> tuple[int, int] | None:
    """Compute capability of a CUDA GPU; None on the CPU, where the interpreter runs the kernels."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None


def capability_here() -> tuple[int, int] | None:
    """Compute capability of the current GPU; None without one."""
    return capability(torch.device("cuda", torch.cuda.current_device())) if torch.cuda.is_available() else None


def is_data_centre(found: tuple[int, int] | None) -> bool:
    """True for Hopper's and Blackwell's data-centre GPUs. sm_120 has Blackwell's name, but not its shared memory."""
    return found is not None and found[0] in (9, 10)


def is_before_ampere(found: tuple[int, int] | None) -> bool:
    return found is not None and found < AMPERE


def widest_head(found: tuple[int, int] | None) -> int:
    """Channels of the widest head that the kernels take on a GPU."""
    return max(width for _, width in (TURING_TILES if is_before_ampere(found) else ATTENTION_TILES))


def choose_config(kernel: str, qkv: Tensor, D: int, grouped: bool = False, documents: bool = False) -> AttentionTile:
    found = capability(qkv.device)
    kind = {"narrow": qkv.element_size() == 2, "newer": is_data_centre(found), "turing": is_before_ampere(found)}
    return attention_tile(kernel, D, **kind, grouped=grouped, documents=documents)
