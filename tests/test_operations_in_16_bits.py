"""Operations on bf16 numbers: sums in float32, and weights without masters rounded at random."""

from types import ModuleType

import pytest
import torch
from torch import Tensor

from handgrad.ops import cpu, reference
from handgrad.ops.reference.optimizer import round_stochastically
from tests.test_operations import told


def randn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("ops", [reference, cpu], ids=["reference", "cpu"])
def test_weight_gradients_accumulate_in_float32(ops: ModuleType) -> None:
    """A bf16 product is rounded once and added to the sum so far. 1100 rows: more than a block of the CPU's."""
    dout, inp, weight = (randn(*shape, seed=n).bfloat16() for n, shape in enumerate([(9, 1100), (9, 8), (1100, 8)]))
    before = randn(1100, 8, seed=3)
    dweight, dinp = before.clone(), torch.empty(9, 8, dtype=torch.bfloat16)
    ops.linear_backward(dinp, dweight, None, dout, inp, weight)
    product = dout.double().t() @ inp.double()
    rounding = 2.0**-8 * product.abs() + 2.0**-23 * (before.abs() + product.abs())
    assert ((dweight - before.double() - product).abs() <= rounding).all()


@pytest.mark.parametrize("ops", [reference, cpu], ids=["reference", "cpu"])
def test_weights_without_masters_are_rounded_by_step_seed_and_place(ops: ModuleType) -> None:
    """They are the float32 update, rounded with these keys."""
    weight, gradient = randn(512, seed=1).bfloat16(), randn(512, seed=2)
    settings = {"beta1": 0.9, "beta2": 0.95, "epsilon": 1e-8, "weight_decay": 0.1}
    exact, expected = weight.float(), torch.empty_like(weight)
    ops.adamw_update(exact, exact, torch.zeros(512), torch.zeros(512), gradient.clone(), *told(3, 1e-2, 1.0), **settings)
    keys = {"seed": 77, "first_element": 256}
    round_stochastically(expected, exact, 3, **keys)
    moments = torch.zeros(512), torch.zeros(512)
    ops.adamw_update(weight, weight, *moments, gradient.clone(), *told(3, 1e-2, 1.0), **settings, **keys)
    assert torch.equal(weight, expected)
    for step, other in ((4, keys), (3, keys | {"seed": 78}), (3, keys | {"first_element": 0})):
        round_stochastically(expected, exact, step, **other)
        assert not torch.equal(weight, expected)
