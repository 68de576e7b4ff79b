"""Adapters: gradients against float64 autograd, memory by formula, the text of their numbers, what they do not train."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from handgrad.arena import make_plan
from handgrad.config import ModelShape
from handgrad.lora.bind import WithAdapters, bind
from handgrad.lora.tables import LoraDesign, adapter_buffers, adapters_of
from handgrad.lora_shape import parse_lora
from handgrad.models.rows import named
from handgrad.ops import cpu, reference
from tests import llama_twin
from tests.conftest import Model, make_model
from tests.lora_twin import added, gpt2_logits

GPT2 = ModelShape(57, 19, 2, 4, 24)
SHAPES = {"gpt2": GPT2, **{family: llama_twin.shape_of(family, layers=2) for family in llama_twin.FAMILIES}}


class Adapted:
    """A model with adapters of random numbers, its base without gradients."""

    def __init__(self, shape: ModelShape, text: str, ops: Any, recompute: int = 0, dtype: torch.dtype = torch.float64):
        self.model: Model = make_model(shape, 3, 17, dtype, recompute=recompute, chunk=20, noise=0.3)
        self.adapters = tuple(adapters_of(shape, parse_lora(text)))
        design = LoraDesign(self.adapters)
        self.table = design.table(1)
        generator = torch.Generator().manual_seed(3)
        exact = torch.float64 if dtype == torch.float64 else torch.float32
        self.views = {row.name: torch.randn(row.shape, generator=generator, dtype=exact).to(dtype) for row in self.table}
        self.gradients = {row.name: torch.zeros(row.shape, dtype=exact) for row in self.table}
        bound = bind(self.adapters, self.model.weights, self.views, self.gradients)
        memory = make_plan(adapter_buffers(design, self.model.table, 51, dtype)).allocate(torch.device("cpu"))
        for view in memory.values():
            view.fill_(float("nan"))
        self.model.ops = WithAdapters(ops, bound, memory)
        nothing = {row.name: None for row in self.model.table}
        self.model.gradients = named(self.model.module.Weights, nothing, shape.num_layers)

    def run(self, recompute: int = 0) -> None:
        self.model.forward()
        self.model.backward(torch.tensor([1 / 51], dtype=self.model.act.losses.dtype), recompute)

    def stored(self) -> dict[str, Tensor]:
        return {row.name: row.stored(self.model.flat) for row in self.model.table}


def autograd(adapted: Adapted, on: set[str], r: int, s: float) -> tuple[Tensor, dict[str, Tensor]]:
    shape, act = adapted.model.shape, adapted.model.act
    leaves = {name: values.double().requires_grad_() for name, values in adapted.views.items()}
    weights = added({n: v.double() for n, v in adapted.stored().items()}, leaves, shape, on, r, s)
    twin = gpt2_logits if shape.architecture == "gpt2" else llama_twin.logits
    logits = twin(weights, act.tokens, shape)
    loss = F.cross_entropy(logits.flatten(0, 1), act.targets.flatten())
    return loss.detach(), dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))


EVERY = {"gpt2": "qkv+o+up+down", "llama": "q+k+v+o+gate+up+down"}


@pytest.mark.parametrize("recompute", [0, 1, 2])
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("ops", [reference, cpu], ids=["reference", "cpu"])
def test_gradients_equal_autograd(ops: Any, name: str, recompute: int) -> None:
    shape = SHAPES[name]
    adapted = Adapted(shape, "rank=3,alpha=1.5", ops, recompute)
    before = adapted.model.flat.clone()
    adapted.run(recompute)
    loss, expected = autograd(adapted, set(EVERY[shape.architecture].split("+")), 3, 0.5)
    assert abs(adapted.model.act.losses.mean() - loss) <= 1e-12 * loss
    for row, found in adapted.gradients.items():
        error = (found - expected[row]).norm() / expected[row].norm()
        assert error <= 1e-10, f"{row}: relative error {error:.3g}"
    assert adapted.model.flat.equal(before)
