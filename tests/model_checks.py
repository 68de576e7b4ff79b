"""Checks that GPT-2, the modern network and Llamas pass alike, and the first two in plain PyTorch."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from benchmarks.modern_twin import ModernTwin
from benchmarks.twin import Twin
from handgrad.memory.arena import make_plan
from handgrad.models import compute_losses, forward_buffers, named_activations
from handgrad.ops import reference
from handgrad.settings.config import ModelShape
from tests.conftest import Model, make_model


def twin_of(model: Model) -> Any:
    """GPT-2 or the modern network with the same weights, for autograd."""
    twin = Twin(model.shape, padded=True) if model.shape.architecture == "gpt2" else ModernTwin(model.shape)
    twin.to(model.flat.dtype).load(model.table, model.flat)
    return twin


def autograd_twin(model: Model) -> tuple[Tensor, Tensor]:
    """(mean loss, flat gradients) of the same weights in plain PyTorch."""
    twin = twin_of(model)
    loss = twin(model.act.tokens, model.act.targets)
    loss.backward()
    flat = torch.zeros_like(model.flat)
    for row in model.table:
        gradient = twin.parameter_of(row).grad
        assert gradient is not None
        row.view(flat).copy_(gradient)
    return loss.detach(), flat


def check_gradients(gradients: Iterable[tuple[str, Tensor, Tensor]], *, least_norm: float = 1e-12) -> None:
    """(name, found, expected) in the order of the model's table; all agree to 1e-10. A mistake spoils every gradient that
    the backward makes after it: the message names those of the block nearest to the loss, and the right ones beside them.
    """
    errors = {
        name: float((found - wanted).norm() / wanted.norm().clamp_min(least_norm)) for name, found, wanted in gradients
    }
    wrong = [name for name, error in errors.items() if not error <= 1e-10]
    if wrong:
        block = wrong[-1].rpartition(".")[0]
        near = [name for name in errors if name.rpartition(".")[0] == block]
        right = ", ".join(name for name in near if name not in wrong) or "none"
        found = ", ".join(f"{name} (relative error {errors[name]:.3g})" for name in near if name in wrong)
        message = (
            f"{len(wrong)} of {len(errors)} gradients are wrong; nearest to the loss {found}; right beside them: {right}"
        )
        raise AssertionError(message)


def check_twin_gradients(model: Model) -> None:
    """The loss and all gradients of a model that has run equal autograd's."""
    loss, expected = autograd_twin(model)
    found = model.act.losses.mean()
    assert abs(found - loss) <= 1e-12 * loss, f"the forward differs from the twin's: loss {found:.12g}, not {loss:.12g}"
    check_gradients((row.name, row.view(model.flat_gradients), row.view(expected)) for row in model.table)


def exact_and_bf16(shape: ModelShape) -> tuple[Model, Model]:
    """A model in float64 and one in bf16, with the same weights and the gradients of one mean loss."""
    exact, rounded = (make_model(shape, 3, 16, dtype) for dtype in (torch.float64, torch.bfloat16))
    exact.flat.copy_(rounded.flat.copy_(exact.flat))
    for model in (exact, rounded):
        model.run(scale=1 / 48)
    return exact, rounded


def check_bf16_gradients(shape: ModelShape) -> None:
    """The error against float64 is at most twice that of PyTorch's own backward run wholly in bf16."""
    exact, ours = exact_and_bf16(shape)
    _, theirs = autograd_twin(ours)
    our_error, their_error = ((found.double() - exact.flat_gradients).norm() for found in (ours.flat_gradients, theirs))
    assert our_error <= 2 * their_error, f"{our_error:.3g} > 2 * {their_error:.3g}"


def check_forward_alone(shape: ModelShape) -> None:
    """A forward's plan has other lives: what no backward reads gives its memory away. The losses are those of training."""
    model = make_model(shape, 2, 19, noise=0.3)
    compute_losses(reference, model.weights, model.act, shape)
    plan = make_plan(forward_buffers(shape, 2, 19, torch.float64, reference))
    act = named_activations(shape, plan.allocate(torch.device("cpu")))
    act.tokens.copy_(model.act.tokens)
    act.targets.copy_(model.act.targets)
    compute_losses(reference, model.weights, act, shape)
    torch.testing.assert_close(act.losses, model.act.losses, rtol=1e-13, atol=0)
