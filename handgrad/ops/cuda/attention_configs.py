"""How attention's kernels are cut, on which GPU."""

import functools
from typing import NamedTuple

import torch
from torch import Tensor


class Config(NamedTuple):
    """How one kernel is cut: queries and keys per tile, warps per program, depth of the load pipeline (3 loads one tile
    ahead of the products), and a cap on the registers of a thread where it lets one more program run beside."""

    queries: int
    keys: int
    warps: int
    stages: int
    registers: int | None = None


# Fixed: choosing at run time would change the order of the sums, and so the bits. The key is (kernel, head width up to,
# inputs of 16 bits, a data-centre GPU with the shared memory and the tensor cores of Hopper or Blackwell). The rows for
# the others fit in the 99 KB of shared memory of sm_86, sm_89 and sm_120.
CONFIGS: dict[tuple[str, int, bool, bool], Config] = {
    ("forward", 64, True, True): Config(64, 64, 4, 3, 128),
    ("forward", 128, True, True): Config(64, 64, 4, 3),
    ("forward", 64, True, False): Config(128, 64, 8, 2),
    ("forward", 128, True, False): Config(128, 32, 8, 2),
    ("forward", 64, False, True): Config(32, 32, 8, 2),
    ("forward", 128, False, True): Config(32, 16, 8, 2),
    ("forward", 64, False, False): Config(32, 32, 8, 2),
    ("forward", 128, False, False): Config(32, 16, 8, 2),
    ("dq", 64, True, True): Config(64, 64, 4, 2, 128),
    ("dq", 128, True, True): Config(128, 64, 8, 3),
    ("dq", 64, True, False): Config(64, 64, 4, 2),
    ("dq", 128, True, False): Config(64, 32, 4, 2),
    ("dq", 64, False, True): Config(32, 32, 8, 2),
    ("dq", 128, False, True): Config(32, 16, 8, 2),
    ("dq", 64, False, False): Config(32, 32, 8, 2),
    ("dq", 128, False, False): Config(32, 16, 8, 2),
    ("dkdv", 64, True, True): Config(64, 64, 4, 3),
    ("dkdv", 128, True, True): Config(64, 64, 8, 3),
    ("dkdv", 64, True, False): Config(32, 64, 8, 2),
    ("dkdv", 128, True, False): Config(32, 32, 4, 2),
    ("dkdv", 64, False, True): Config(32, 32, 8, 2),
    ("dkdv", 128, False, True): Config(16, 16, 4, 2),
    ("dkdv", 64, False, False): Config(32, 32, 8, 2),
    ("dkdv", 128, False, False): Config(16, 16, 4, 2),
}


@functools.cache
def is_hopper_or_newer(device: torch.device) -> bool:
    """Whether the rows for data-centre GPUs apply. sm_120 has Blackwell's name, but not its shared memory."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] in (9, 10)


def choose_config(kernel: str, qkv: Tensor, D: int) -> Config:
    return CONFIGS[kernel, 64 if D <= 64 else 128, qkv.element_size() == 2, is_hopper_or_newer(qkv.device)]


def rows_of(kernel: str, config: Config) -> int:
    """Rows of the tile that a program writes."""
    return config.keys if kernel == "dkdv" else config.queries
