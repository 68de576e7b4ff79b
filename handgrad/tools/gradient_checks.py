"""Compares gradients by hand with central differences of the forward, in float64, without autograd or other libraries."""

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from handgrad.memory.arena import make_plan
from handgrad.memory.rows import flat_elements, initialize, named
from handgrad.models import architecture, named_weights, parameter_table
from handgrad.models.passes import run
from handgrad.networks import ModelShape
from handgrad.ops import reference
from handgrad.ops.cases import PAIRS, Arguments, Draw, both_ways, call, copies
from handgrad.ops.compose import Overlay

STEP = 3e-5  # h
# In float64 the error of (f(x + h) - f(x - h)) / 2h is h^2 f'''/6, 1.5e-10 f''', plus the rounding of f over h, 4e-12 f.
# The cases have numbers around 1, and third derivatives of a few hundred at most.
TOLERANCE = 1e-7

SIZES = {"B": 2, "T": 3, "H": 4, "D": 4, "F": 10, "V": 7, "Vp": 9, "G": 8, "M": 4}
GROUPED = {"K": 2}
# Backward operation: changes to its case. Fused operations are compositions of these; the checks of the models run them.
CASES: dict[str, Arguments] = {backward: {} for backward in PAIRS}
CASES |= {"attention_backward": GROUPED, "gained_qk_norm_rotary_backward": GROUPED}
CASES |= {"classifier_forward_backward, with a cap": {"softcap": 3.0}}
CASES |= {"distill_forward_backward, reverse, with a cap": {"softcap": 3.0, "teacher_softcap": 2.0, "reverse": True}}
CASES |= {"rmsnorm_backward, without a gain": {"gain": None, "dgain_acc": None}, "rmsnorm_backward, of 1 + w": {"plus": 1}}
CONVOLVED = {"D": 1, "F": 3, "Y": 4, "X": 6}  # four channels: each number is changed by itself
CASES |= dict.fromkeys(("conv_backward", "transposed_conv_backward"), CONVOLVED)
CASES |= {f"{name}, of stride 2": CONVOLVED | {"J": 4, "S": 2} for name in ("conv_backward", "transposed_conv_backward")}
CASES |= {"groupnorm_backward": {"Y": 2, "X": 3}, "squared_error_forward_backward": {"Y": 2, "X": 3}}

BATCH, LENGTH = 2, 5
GPT2 = ModelShape(vocab_size=57, sequence_length=LENGTH, num_layers=2, num_heads=2, channels=32)
SHAPES = (
    GPT2,
    replace(GPT2, architecture="modern"),
    replace(GPT2, architecture="llama", llama="kv_heads=1,feed_forward=48,qk_norm"),
    replace(GPT2, architecture="gemma3", gemma3="kv_heads=1,head_width=8,feed_forward=48,window=3,full_every=2"),
    replace(GPT2, architecture="olmo", olmo="kv_heads=1,feed_forward=48,window=3,full_every=2"),
    ModelShape(57, 3 * 2 * 4, 1, 1, 8, architecture="vqvae", vqvae="size=2x4,levels=4.3.5,groups=2"),
)


@dataclass(frozen=True)
class Compared:
    """A gradient by hand, compared with central differences."""

    of: str  # the tensor that it is the gradient of
    error: float  # || by hand - by differences || / || by differences ||
    worst: str  # the index where they differ most
    by_hand: float  # at that index
    by_differences: float  # at that index

    @property
    def right(self) -> bool:
        return self.error <= TOLERANCE  # False for NaN


@dataclass(frozen=True)
class Checked:
    """An operation, or a network, and its gradients."""

    name: str
    place: str  # of its code
    gradients: list[Compared]

    @property
    def wrong(self) -> list[Compared]:
        return [compared for compared in self.gradients if not compared.right]


# Derivatives of a function from its values alone.


def differences(number: Callable[[], float], x: Tensor) -> Tensor:
    """d number / d x for each element of x (any shape, float64). Changes x in place, and restores it."""
    gradient, values = torch.empty_like(x), x.view(-1)
    for index in range(len(values)):
        value = values[index].item()
        values[index] = value + STEP
        above = number()
        values[index] = value - STEP
        gradient.view(-1)[index] = (above - number()) / (2 * STEP)
        values[index] = value
    return gradient


def slope(number: Callable[[], float], x: Tensor, direction: Tensor) -> float:
    """The derivative of `number` along a direction of x, too large to change by element. Changes x, and restores it."""
    before = x.clone()
    x.add_(direction, alpha=STEP)
    above = number()
    x.copy_(before).sub_(direction, alpha=STEP)
    below = number()
    x.copy_(before)
    return (above - below) / (2 * STEP)


def compare(of: str, by_hand: Tensor, by_differences: Tensor) -> Compared:
    distance = (by_hand - by_differences).nan_to_num(torch.inf, torch.inf, -torch.inf)
    worst = int(distance.abs().argmax())
    index = [int(i) for i in torch.unravel_index(torch.tensor(worst), by_hand.shape)]
    error = float((by_hand - by_differences).norm() / by_differences.norm().clamp_min(1e-30))
    return Compared(of, error, str(index), by_hand.flatten()[worst].item(), by_differences.flatten()[worst].item())


# Every backward of the reference, element by element.


def check_operations() -> Iterator[Checked]:
    """Checks each backward with a random gradient of its output."""
    for line, changes in CASES.items():
        backward = line.partition(",")[0]
        forward = PAIRS[backward].forward
        ran = both_ways(reference, backward, Draw(torch.float64), **(SIZES | changes))

        def number(forward=forward, ran=ran) -> float:
            after = copies(ran.before)
            call(getattr(reference, forward), forward, after)
            return sum((after[output] * gradient).sum().item() for output, gradient in ran.of_outputs.items())

        gradients = [
            compare(of.removesuffix("_inout"), gradient, differences(number, ran.before[of]))
            for of, gradient in ran.of_inputs.items()
            if gradient is not None
        ]
        yield Checked(line, place_of(backward), gradients)


def place_of(name: str) -> str:
    """The file and line of a reference operation."""
    function = getattr(reference, name)
    path = Path(inspect.getsourcefile(function) or "").resolve()
    root = Path(reference.__file__).resolve().parents[3]
    return f"{path.relative_to(root) if path.is_relative_to(root) else path}:{inspect.getsourcelines(function)[1]}"


# Every parameter of a small network of each architecture, along a random direction.


def check_models() -> Iterator[Checked]:
    """Checks one network per architecture."""
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
    chunk = 3  # tokens at once in the loss head; the last chunk has fewer
    rows = module.activations(shape, BATCH, shape.sequence_length, torch.float64, reference, chunk=chunk, training=True)
    views = make_plan(row.buffer(recompute=0) for row in rows if not row.of).allocate(torch.device("cpu"))
    act, d = (named(kind, views, layers) for kind in (module.Activations, module.Gradients))
    tokens, targets = torch.randint(shape.vocab_size, (2, BATCH, shape.sequence_length), generator=generator)
    order = torch.argsort(tokens.flatten(), stable=True)
    scale, ops = torch.ones(1, dtype=torch.float64), Unrounded(reference)

    def loss() -> float:
        """The training loss. Runs the backward too, which completes the loss and may add terms of its own."""
        act.tokens.copy_(tokens)
        act.targets.copy_(targets)
        if not shape.network.pictures:
            act.sorted_positions.copy_(order)
        flat_gradients.zero_()
        run(module.forward(ops, weights, act, shape))
        run(module.backward(ops, weights, gradients, act, d, scale, shape, recompute=0))
        return act.losses.sum().item()

    loss()
    by_hand = flat_gradients.clone()
    for row in table:
        direction, gradient = normal(row.stored_shape, generator), row.stored(by_hand)
        direction /= direction.norm()
        along, by_differences = float((gradient * direction).sum()), slope(loss, row.stored(flat), direction)
        # A random direction sees one n-th of the squared norm of n numbers, of the error as well as of the gradient.
        error = abs(along - by_differences) * gradient.numel() ** 0.5 / max(float(gradient.norm()), 1e-30)
        yield Compared(row.name, error, "a random direction", along, by_differences)


class Unrounded(Overlay):
    """The operations `ops`, without FSQ's rounding: the straight-through estimator is the gradient before it."""

    def fsq_round(self, out: Tensor, codes: Tensor, bounded: Tensor, *, levels: tuple[int, ...]) -> None:
        out.copy_(bounded)


def normal(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=generator)
