"""Weights with their adapters added."""

from collections.abc import Callable

import torch
from torch import Tensor

from handgrad.lora.tables import Adapter


def merged(weight: Tensor, adapter: Adapter, tensor: Callable[[str], Tensor]) -> Tensor:
    """W (O, I) + s B A in float32, the parts in their rows. `tensor`: A's and B's by the names of their rows."""
    found = weight.to(torch.float32, copy=True)
    a, b = (tensor(name).to(found) for name in (adapter.a, adapter.b))
    for part, ranks, rows in adapter.places():
        found[part.outputs].addmm_(b[rows], a[ranks], alpha=adapter.scale)
    return found
