"""Operations on bf16 numbers: sums in float32, and weights without masters rounded at random."""

from types import ModuleType

import pytest
import torch
from torch import Tensor

from handgrad.ops import cpu, reference
from handgrad.ops.hashing import FIRST_MOMENT, SECOND_MOMENT
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


@pytest.mark.parametrize("ops", [reference, cpu], ids=["reference", "cpu"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["masters", "without masters"])
def test_moments_of_bf16_are_rounded_with_keys_of_their_own(ops: ModuleType, dtype: torch.dtype) -> None:
    """They are the float32 moments rounded; the weights are those of a float32 update from the same numbers."""
    weight, gradient = randn(512, seed=1).to(dtype), randn(512, seed=2)
    m, v = 0.1 * randn(512, seed=3).bfloat16(), randn(512, seed=4).square().bfloat16()
    settings = {"beta1": 0.9, "beta2": 0.95, "epsilon": 1e-8, "weight_decay": 0.1, "seed": 77, "first_element": 256}
    exact = weight.clone(), m.float(), v.float()
    ops.adamw_update(exact[0], *exact, gradient.clone(), *told(3, 1e-2, 1.0), **settings)
    found = weight.clone(), m.clone(), v.clone()
    ops.adamw_update(found[0], *found, gradient.clone(), *told(3, 1e-2, 1.0), **settings)
    assert torch.equal(found[0], exact[0]) and not torch.equal(found[0], weight)
    for moment, kept, salt in ((exact[1], found[1], FIRST_MOMENT), (exact[2], found[2], SECOND_MOMENT)):
        expected = torch.empty_like(kept)
        round_stochastically(expected, moment, 3, 77 ^ salt, 256)
        assert torch.equal(kept, expected) and not torch.equal(kept, moment.bfloat16())
