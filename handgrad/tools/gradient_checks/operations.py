"""Every backward of the reference beside central differences of its forward, in float64, element by element."""

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from handgrad.ops import reference
from handgrad.ops.cases import PAIRS, Arguments, Draw, both_ways, call, copies
from handgrad.tools.gradient_checks.differences import Compared, compare, differences

SIZES = {"B": 2, "T": 3, "H": 4, "D": 4, "F": 10, "V": 7, "Vp": 9, "G": 8, "M": 4}
GROUPED = {"K": 2}
# The backward that a case calls: the case. Fused operations are compositions of these; the models run them.
CASES: dict[str, Arguments] = {backward: {} for backward in PAIRS}
CASES |= {"attention_backward": GROUPED, "gained_qk_norm_rotary_backward": GROUPED}
CASES |= {"classifier_forward_backward, with a cap": {"softcap": 3.0}}


@dataclass(frozen=True)
class Checked:
    """An operation, or a network, and its gradients."""

    name: str
    place: str  # of its code
    gradients: list[Compared]

    @property
    def wrong(self) -> list[Compared]:
        return [compared for compared in self.gradients if not compared.right]


def check_operations() -> Iterator[Checked]:
    """Checks each backward with a random gradient of its output."""
    for line, changes in CASES.items():
        backward = line.partition(",")[0]
        forward = PAIRS[backward].forward
        ran = both_ways(reference, backward, Draw(torch.float64), **SIZES, **changes)

        def number(forward=forward, ran=ran) -> float:
            after = copies(ran.before)
            call(getattr(reference, forward), forward, after)
            return sum((after[output] * gradient).sum().item() for output, gradient in ran.of_outputs.items())

        gradients = [
            compare(of.removesuffix("_inout"), gradient, differences(number, ran.before[of]))
            for of, gradient in ran.of_inputs.items()
        ]
        yield Checked(line, place_of(backward), gradients)


def place_of(name: str) -> str:
    """The file and the line of an operation of the reference."""
    function = getattr(reference, name)
    path = Path(inspect.getsourcefile(function) or "").resolve()
    root = Path(reference.__file__).resolve().parents[3]
    return f"{path.relative_to(root) if path.is_relative_to(root) else path}:{inspect.getsourcelines(function)[1]}"
