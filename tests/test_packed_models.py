"""Rows that hold several documents, in every architecture: each document has the losses and gradients that it has alone."""

from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from handgrad.joins import documents
from handgrad.joins.documents import WithMasked
from handgrad.models import compute_losses, forward_buffers, named_activations
from handgrad.ops import cpu, reference
from handgrad.settings.config import ModelShape
from handgrad.training.feed import fill_inputs, inputs_of
from tests.conftest import Model, make_model
from tests.documents import document_starts
from tests.llama_twin import EVERY, autograd, shape_of
from tests.model_checks import twin_of
from tests.techniques import toggled

MODERN = ModelShape(57, 19, 3, 3, 42, "modern")
SHAPES = {
    "gpt2": ModelShape(57, 19, 3, 3, 33),
    "modern": MODERN,
    "modern, all": replace(MODERN, techniques=toggled("residual_scalars,input_scalars,value_embeddings")),
    **{name: shape_of(name) for name in EVERY},
}
LENGTHS = [[5, 1, 9, 4], [12, 7]]
PADDING = 7  # tokens at the end of the last row


class Documents:
    """A source of one micro-batch of such rows: of every document the last target is not trained, and some others."""

    def __init__(self, lengths: list[list[int]] = LENGTHS, padding: int = PADDING, seed: int = 3):
        self.starts = document_starts(lengths)
        generator = torch.Generator().manual_seed(seed)
        self.tokens, self.targets = torch.randint(57, (2, *self.starts.shape), generator=generator)
        self.targets[torch.rand(self.starts.shape, generator=generator) < 0.3] = -1
        for row, places in enumerate(lengths):
            self.targets[row, torch.tensor(places).cumsum(0) - 1] = -1
        self.targets[-1, self.starts.shape[1] - padding :] = -1

    def fill(self, inputs: Tensor, targets: Tensor, first_sample: int, document_starts: Tensor | None = None) -> None:
        inputs.copy_(self.tokens)
        targets.copy_(self.targets)
        if document_starts is not None:
            document_starts.copy_(self.starts)

    def trained_tokens(self, first_sample: int, samples: int) -> int:
        return int((self.targets >= 0).sum())

    def alone(self) -> list[tuple[Tensor, Tensor]]:
        """(tokens, targets) (1, T') of each document with a trained target."""
        found = []
        for row, starts in enumerate(self.starts):
            for start in starts.unique().tolist():
                places = starts == start
                found.append((self.tokens[row, places][None], self.targets[row, places][None]))
        return [(tokens, targets) for tokens, targets in found if (targets >= 0).any()]


def packed_model(name: str, source: Documents, ops: ModuleType = reference, **options: Any) -> Model:
    """A model whose activations have the inputs of documents, filled from `source`."""
    shape = SHAPES[name]
    backends = WithMasked(ops), None
    model = make_model(shape, *source.starts.shape, noise=0.3, packed=True, backends=backends, **options)
    fill_inputs(source, inputs_of(model.act), 0)
    return model


def alone_by_autograd(model: Model, source: Documents) -> tuple[float, dict[str, Tensor]]:
    """(mean loss over the trained tokens, its gradients by name) of each document alone, in plain PyTorch."""
    trained, loss = source.trained_tokens(0, 2), 0.0
    gradients = {row.name: torch.zeros(row.stored_shape, dtype=torch.float64) for row in model.table}
    weights = {row.name: row.stored(model.flat) for row in model.table}
    for tokens, targets in source.alone():
        share = int((targets >= 0).sum()) / trained
        targets = targets.where(targets >= 0, -100)  # which torch's cross-entropy leaves out
        if model.shape.architecture in ("llama", "gemma3", "olmo"):
            mean, found = autograd(weights, tokens, targets, model.shape)
        else:
            twin = twin_of(model)
            mean = twin(tokens, targets)
            mean.backward()
            rows = [(row, twin.parameter_of(row).grad) for row in model.table]
            found = {row.name: gradient[: row.stored_rows] for row, gradient in rows if gradient is not None}
        loss += share * mean.item()
        for tensor, values in found.items():
            gradients[tensor] += share * values.view_as(gradients[tensor])
    return loss, gradients


@pytest.mark.parametrize(("ops", "recompute"), [(reference, 0), (cpu, 1), (cpu, 2)], ids=["reference", "cpu", "cpu, again"])
@pytest.mark.parametrize("name", SHAPES)
def test_documents_are_alone(name: str, ops: ModuleType, recompute: int) -> None:
    source = Documents()
    model = packed_model(name, source, ops, recompute=recompute, chunk=11)
    model.run(scale=1 / source.trained_tokens(0, 2), recompute=recompute)
    loss, expected = alone_by_autograd(model, source)
    assert abs(model.act.losses.sum() / source.trained_tokens(0, 2) - loss) <= 1e-12 * loss
    for row in model.table:
        found = row.stored(model.flat_gradients)
        error = (found - expected[row.name]).norm() / expected[row.name].norm().clamp_min(1e-9)
        assert error <= 1e-10, f"{row.name}: relative error {error:.3g}"


@pytest.mark.parametrize("name", SHAPES)
def test_a_document_does_not_see_its_neighbours(name: str) -> None:
    """Other words in one document leave the bits of all others' losses; without the mask they would not."""
    source = Documents(padding=0)
    model = packed_model(name, source, cpu)
    model.run()
    before = model.act.losses.view(2, -1).clone()
    own = source.starts[0] == 0
    source.tokens[0, own] = (source.tokens[0, own] + 1) % 57
    fill_inputs(source, inputs_of(model.act), 0)
    model.run()
    after = model.act.losses.view(2, -1)
    assert not torch.equal(after[0, own], before[0, own])
    assert torch.equal(after[0, ~own], before[0, ~own]) and torch.equal(after[1], before[1])
    assert model.act.document_starts is not None
    model.act.document_starts.zero_()
    model.run()
    assert not torch.equal(model.act.losses.view(2, -1)[0, ~own], before[0, ~own])


@pytest.mark.parametrize("name", ["gpt2", "modern", "llama"])
def test_a_forward_alone_has_the_same_losses(name: str) -> None:
    source = Documents()
    model = packed_model(name, source)
    model.run()
    plain, packed = (forward_buffers(model.shape, 2, 19, torch.float64, reference, packed=on) for on in (False, True))
    inputs = {buffer.name for buffer in packed} - {buffer.name for buffer in plain}
    assert inputs == {"document_starts", *(("positions", "sorted_by_position") if name == "gpt2" else ())}
    views = {buffer.name: torch.zeros(buffer.shape, dtype=buffer.dtype) for buffer in packed}
    act = named_activations(model.shape, views)
    fill_inputs(source, inputs_of(act), 0)
    ops = documents.operations(reference, act, masked=True)
    compute_losses(ops, model.weights, act, model.shape)
    torch.testing.assert_close(act.losses, model.act.losses, rtol=1e-13, atol=0)


def test_positions_restart_with_their_document() -> None:
    source = Documents()
    model = packed_model("gpt2", source)
    assert model.act.positions[0].tolist() == [*range(5), 0, *range(9), *range(4)]
    order = model.act.sorted_by_position.long()
    flat = model.act.positions.view(-1)[order]
    assert (flat[1:] >= flat[:-1]).all() and order[flat == 0].tolist() == [0, 5, 6, 15, 19, 31]
