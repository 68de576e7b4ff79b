"""Weights with their adapters added."""

from collections.abc import Callable

import torch
from torch import Tensor

from handgrad.joins.lora.tables import Adapter
from handgrad.training.state import TrainingState


def merged(weight: Tensor, adapter: Adapter, tensor: Callable[[str], Tensor]) -> Tensor:
    """W (O, I) + s B A in float32, the parts in their rows. `tensor`: A's and B's by the names of their rows."""
    found = weight.to(torch.float32, copy=True)
    a, b = (tensor(name).to(found) for name in (adapter.a, adapter.b))
    for part, ranks, rows in adapter.places():
        found[part.outputs].addmm_(b[rows], a[ranks], alpha=adapter.scale)
    return found


def merged_state(state: TrainingState) -> dict[str, Tensor]:
    """The model's weights of a run on one rank, by name, their adapters merged in; frozen ones as the run reads them."""
    trained = {row.name: row.view(state.master) for row in state.design.parameters}
    found = {row.name: state.named_weights[row.name][: row.stored_rows] for row in state.design.base}
    found |= {name: found[name].rows.float() * found[name].inverse_scale for name in state.design.rounded}
    for adapter in state.design.lora.adapters:
        found[adapter.weight] = merged(found[adapter.weight], adapter, trained.__getitem__)
    return found
