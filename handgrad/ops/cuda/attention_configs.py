"""Tiles of attention's kernels, by GPU."""

import functools
from typing import NamedTuple

import torch
from torch import Tensor


class Config(NamedTuple):
    """The cut of one kernel: queries and keys per tile, warps per program, depth of the load pipeline (3 loads one tile
    ahead of the products), and a cap on the registers of a thread where it lets one more program run beside."""

    queries: int
    keys: int
    warps: int
    stages: int
    registers: int | None = None


# Fixed: choosing at run time would change the order of the sums, and so the bits. The key is (kernel, head width up to). Of
# 16-bit inputs on a data-centre GPU, with the shared memory and the tensor cores of Hopper or Blackwell; on the others,
# within the 99 KB of shared memory of sm_86, sm_89 and sm_120; and of float32 on any.
CONFIGS: dict[tuple[str, int], tuple[Config, Config, Config]] = {
    ("forward", 64): (Config(64, 64, 4, 3, 128), Config(128, 64, 8, 2), Config(32, 32, 8, 2)),
    ("forward", 128): (Config(64, 64, 4, 3), Config(128, 32, 8, 2), Config(32, 16, 8, 2)),
    ("forward", 256): (Config(128, 64, 8, 2), Config(64, 32, 8, 2), Config(32, 16, 8, 2)),
    ("dq", 64): (Config(64, 64, 4, 2, 128), Config(64, 64, 4, 2), Config(32, 32, 8, 2)),
    ("dq", 128): (Config(128, 64, 8, 3), Config(64, 32, 4, 2), Config(32, 16, 8, 2)),
    ("dq", 256): (Config(128, 32, 8, 2), Config(32, 32, 4, 2), Config(32, 16, 8, 2)),
    ("dkdv", 64): (Config(64, 64, 4, 3), Config(32, 64, 8, 2), Config(32, 32, 8, 2)),
    ("dkdv", 128): (Config(64, 64, 8, 3), Config(32, 32, 4, 2), Config(16, 16, 4, 2)),
    # Sums of 64 keys and 256 channels, two of them, spill: so 32 keys, too few rows for Hopper's own instructions (wgmma).
    ("dkdv", 256): (Config(64, 32, 8, 2), Config(32, 32, 8, 2), Config(16, 16, 8, 2)),
}
# Where queries' heads share keys, of 16-bit inputs on a data-centre GPU: with one stage or half of the queries less
# nothing spills.
GROUPED = {("dkdv", 128): Config(64, 64, 8, 2), ("dkdv", 256): Config(32, 32, 8, 2)}
WIDEST_HEAD = max(width for _, width in CONFIGS)
# With documents in a row. The tiles are the same, so that one document has the plain kernels' bits; without a cap on the
# registers the tensor-core instructions overlap, and eight warps do not spill.
DOCUMENTS: dict[tuple[str, int], tuple[Config, Config, Config]] = {
    ("dq", 64): (Config(64, 64, 4, 2), Config(64, 64, 4, 2), Config(32, 32, 8, 2)),
    ("dkdv", 128): (Config(64, 64, 8, 3), Config(32, 32, 4, 2), Config(16, 16, 8, 2)),
}

# Before Ampere, of 16-bit inputs and of float32. Triton has no tensor-core instructions there
# (https://github.com/triton-lang/triton/pull/5066): a product is unrolled into multiply-adds, so that larger tiles spill;
# and shared memory ends at 64 KB, where float32 heads of 256 channels do not fit.
TURING: dict[tuple[str, int], Config] = {
    ("forward", 64): Config(32, 32, 8, 1),
    ("forward", 128): Config(16, 16, 4, 1),
    ("dq", 64): Config(32, 32, 8, 1),
    ("dq", 128): Config(16, 16, 8, 1),
    ("dkdv", 64): Config(32, 32, 8, 1),
    ("dkdv", 128): Config(16, 16, 8, 1),
}


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
    return max(width for _, width in (TURING if is_before_ampere(found) else CONFIGS))


def shipped(
    kernel: str,
    D: int,
    *,
    narrow: bool,
    newer: bool,
    turing: bool = False,
    grouped: bool = False,
    documents: bool = False,
) -> Config:
    """`narrow`: inputs of 16 bits; `newer`: on a data-centre GPU; `turing`: on one before Ampere; `grouped`: heads of
    queries share keys; `documents`: in a row."""
    key = kernel, min(width for name, width in CONFIGS if name == kernel and width >= D)
    if turing:
        return TURING[key]
    data_centre, others, float32 = (CONFIGS | DOCUMENTS if documents else CONFIGS)[key]
    if grouped:
        data_centre = GROUPED.get(key, data_centre)
    return (data_centre if newer else others) if narrow else float32


def choose_config(kernel: str, qkv: Tensor, D: int, grouped: bool = False, documents: bool = False) -> Config:
    found = capability(qkv.device)
    kind = {"narrow": qkv.element_size() == 2, "newer": is_data_centre(found), "turing": is_before_ampere(found)}
    return shipped(kernel, D, **kind, grouped=grouped, documents=documents)


def rows_of(kernel: str, config: Config) -> int:
    """Rows of the tile that a program writes."""
    return config.keys if kernel == "dkdv" else config.queries
