"""Every parameter of a small network of each architecture, in float64: its gradient by hand along a random direction,
beside the central difference of the loss."""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from handgrad.memory.arena import make_plan
from handgrad.memory.rows import flat_elements, initialize, named
from handgrad.models import architecture, named_weights, parameter_table
from handgrad.models.passes import run
from handgrad.networks import ModelShape
from handgrad.ops import reference
from handgrad.tools.gradient_checks.differences import Compared, slope
from handgrad.tools.gradient_checks.operations import Checked

BATCH, LENGTH = 2, 5
GPT2 = ModelShape(vocab_size=57, sequence_length=LENGTH, num_layers=2, num_heads=2, channels=32)
SHAPES = (
    GPT2,
    replace(GPT2, architecture="modern"),
    replace(GPT2, architecture="llama", llama="kv_heads=1,feed_forward=48,qk_norm"),
)


def check_models() -> Iterator[Checked]:
    """Checks one network after the other."""
    for shape in SHAPES:
        yield Checked(shape.architecture, f"handgrad/models/{shape.architecture}.py", list(check_model(shape)))


def check_model(shape: ModelShape) -> Iterator[Compared]:
    """Checks the parameters in the order of the table, from the embedding on."""
    module, table, layers = architecture(shape), parameter_table(shape), shape.num_layers
    generator = torch.Generator().manual_seed(0)
    flat, flat_gradients = (torch.zeros(flat_elements(table), dtype=torch.float64) for _ in range(2))
    initialize(table, 0, lambda row, values: row.stored(flat).copy_(values))
    for row in table:  # so that no bias and no gain is trivial
        row.stored(flat).add_(normal(row.stored_shape, generator), alpha=0.1)
    weights, gradients = (named_weights(shape, tensor, table) for tensor in (flat, flat_gradients))
    chunk = 3  # tokens at once in the loss head: the last time fewer
    rows = module.activations(shape, BATCH, LENGTH, torch.float64, reference, chunk=chunk, training=True)
    views = make_plan(row.buffer(recompute=0) for row in rows if not row.of).allocate(torch.device("cpu"))
    act, d = (named(kind, views, layers) for kind in (module.Activations, module.Gradients))
    tokens, targets = torch.randint(shape.vocab_size, (2, BATCH, LENGTH), generator=generator)
    order = torch.argsort(tokens.flatten(), stable=True)
    scale = torch.ones(1, dtype=torch.float64)

    def loss() -> float:
        """The training loss: the backward computes it as well, and may add terms of its own."""
        act.tokens.copy_(tokens)
        act.targets.copy_(targets)
        act.sorted_positions.copy_(order)
        flat_gradients.zero_()
        run(module.forward(reference, weights, act, shape))
        run(module.backward(reference, weights, gradients, act, d, scale, shape, recompute=0))
        return act.losses.sum().item()

    loss()
    by_hand = flat_gradients.clone()
    for row in table:
        direction, gradient = normal(row.stored_shape, generator), row.stored(by_hand)
        direction /= direction.norm()
        along, by_differences = float((gradient * direction).sum()), slope(loss, row.stored(flat), direction)
        # Of n numbers, a random direction finds the n-th part of a square, of an error as of a gradient.
        error = abs(along - by_differences) * gradient.numel() ** 0.5 / max(float(gradient.norm()), 1e-30)
        yield Compared(row.name, error, "a random direction", along, by_differences)


def normal(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=generator)
