"""The tolerance that `handgrad doctor` and the tests of kernels share accepts a right kernel's errors, a GPU's shortcuts
among them, and refuses a kernel that forgets a term."""

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from handgrad.ops import reference, rounding
from handgrad.ops.cases import Arguments, Draw
from handgrad.tools.kernel_checks import checking
from handgrad.tools.kernel_checks.checking import attempt, compare
from handgrad.tools.kernel_checks.operations import CASES, operation_of

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@pytest.fixture(autouse=True)
def little_scratch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checking, "SCRATCH_BYTES", 64)


def verdict(kernel: Callable[..., None], line: str, dtype: torch.dtype, **changes: object) -> tuple[bool, str]:
    """Doctor's, of a kernel instead of the reference's."""
    operation = operation_of(line)
    make = partial(Draw(dtype).arguments, operation, **changes) if changes else partial(CASES[line], Draw(dtype))
    return attempt(line, partial(compare, kernel, getattr(reference, operation), make))


def approximate_tanh(x: Tensor) -> Tensor:
    """Off by as much as the GPU's instruction may be, in either direction from one number to the next."""
    sign = torch.ones_like(x).view(-1)
    sign[1::2] = -1
    return torch.special.expit(2 * x).mul(2).sub(1) * (1 + rounding.TANH * sign.view_as(x))


def tanh_is(tanh: Callable[[Tensor], Tensor], operation: Callable[..., None], **arguments: object) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "tanh", tanh)
        operation(**arguments)


CAPPED = ["classifier_forward, with a cap", "classifier_forward_backward, with a cap"]


@pytest.mark.parametrize("line", CAPPED[:1])
def test_a_cap_may_err_as_the_gpus_tanh_does(line: str) -> None:
    right = partial(tanh_is, approximate_tanh, getattr(reference, operation_of(line)))
    assert verdict(right, line, BF16)[0]


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
@pytest.mark.parametrize("line", CAPPED)
def test_a_wrong_cap_is_refused(line: str, dtype: torch.dtype) -> None:
    operation = getattr(reference, operation_of(line))
    for wrong in (
        lambda softcap, **rest: operation(softcap=softcap * 1.02, **rest),
        lambda softcap, **rest: operation(**rest),
        partial(tanh_is, lambda x: x - x**3 / 3, operation),  # without the terms from the fifth power on
    ):
        assert not verdict(wrong, line, dtype)[0]


def test_a_cap_in_float32_rounds_relative_to_itself() -> None:
    """z = c (1 - e) / (1 + e) near 0 has a rounding of 1, though z is small: of the one word and the target alike."""

    def right(softcap: float, **rest: Tensor) -> None:
        tanh = lambda x: ((1 - (e := (-2 * x.abs()).exp())) / (1 + e)) * x.sign()  # noqa: E731
        tanh_is(tanh, partial(reference.classifier_forward, softcap=softcap), **rest)

    logits = torch.full((3, 2), 1e-3)
    assert verdict(right, CAPPED[0], FP32, N=3, V=2, Vp=2, softcap=15.0, logits_inout=logits)[0]
    arguments = Draw(FP32).arguments("classifier_forward", N=9, V=5, Vp=8, softcap=15.0)
    floor = rounding.floor("losses", arguments, {"losses": torch.ones(9)}, FP32)
    assert floor == pytest.approx(2 * 15 * 2.0**-24 * 3)


def rounded_products(dstream_inout: Tensor, dresidual_scalar_acc: Tensor, inp: Tensor, **rest: Tensor) -> None:
    """The scalar's gradient from products that are rounded to the streams' dtype, each in another direction."""
    before, dtype = dresidual_scalar_acc.clone(), inp.dtype
    reference.mix_rmsnorm_backward(dstream_inout, dresidual_scalar_acc=dresidual_scalar_acc, inp=inp, **rest)
    if dtype != torch.float64:
        products = (dstream_inout.double() / rest["residual_scalar"].double()) * inp.double()
        signs = torch.randint(0, 2, products.shape, generator=torch.Generator().manual_seed(1)) * 2 - 1
        u = rounding.ROUNDING[dtype]
        dresidual_scalar_acc.copy_(before + (products * (1 + u * signs)).sum())


def forgets_one_row(dstream_inout: Tensor, dresidual_scalar_acc: Tensor, inp: Tensor, **rest: Tensor) -> None:
    reference.mix_rmsnorm_backward(dstream_inout, dresidual_scalar_acc=dresidual_scalar_acc, inp=inp, **rest)
    row = dstream_inout[7].double() / rest["residual_scalar"].double() * inp[7].double()
    dresidual_scalar_acc.sub_(row.sum())


def test_a_scalars_gradient_errs_as_its_products_do() -> None:
    arguments = Draw(BF16).arguments("mix_rmsnorm_backward")
    exact = {"dstream_inout": torch.full((192, 128), 2.0), "dresidual_scalar_acc": torch.ones(1)}
    arguments |= {"residual_scalar": torch.tensor([2.0]), "inp": torch.full((192, 128), 3.0, dtype=BF16)}
    floor = rounding.floor("dresidual_scalar_acc", arguments, exact, FP32)
    assert floor == pytest.approx(2.0**-8 * 3 * math.sqrt(192 * 128))
    assert verdict(rounded_products, "mix_rmsnorm_backward", BF16)[0]
    failed, told = verdict(forgets_one_row, "mix_rmsnorm_backward", BF16)
    assert not failed and told.startswith("mix_rmsnorm_backward failed: relative error")


@pytest.mark.parametrize(
    ("name", "arguments", "dtype", "expected"),
    [
        ("dweight_acc", {"dout": torch.empty(7, 2)}, FP32, 7),
        ("dq_gain_acc", {"dqkv_inout": torch.empty(7, 2), "rstd": None}, FP32, 7),
        ("dgate_weight_acc", {"norm": torch.empty(7, 6), "gate": torch.empty(7, 2)}, FP32, 21),
        ("dnorm_inout", {"norm": torch.empty(7, 6), "gate": torch.empty(7, 2)}, BF16, 3),
        ("rstd", {}, FP32, 16),
        ("out", {"rstd": None}, FP32, 18),
        ("out", {"rstd": None}, BF16, 1),
        ("dqkv_inout", {"rstd": None}, FP32, 8),
        ("dqkv_inout", {}, FP32, 1),
        ("out", {}, FP32, 1),
    ],
)
def test_roundings(name: str, arguments: Arguments, dtype: torch.dtype, expected: float) -> None:
    assert rounding.roundings(name, arguments, dtype) == expected


def sigmoid_of_a_gpu(x: Tensor) -> Tensor:
    """With an exponential and a quotient that err by 2^-22, the exponential's argument by a rounding."""
    if x.dtype == torch.float64:
        return torch.special.expit(x)
    e = (-x.double()).exp() * (1 + 2.0**-22)
    return (1 / (1 + e) * (1 - 2.0**-22)).to(x.dtype)


@pytest.mark.parametrize(
    ("operation", "sizes"),
    [("swiglu_forward", {"N": 1, "F": 1}), ("value_embedding_forward", {"B": 1, "T": 1, "H": 1, "D": 24, "G": 24})],
)
def test_one_sigmoid_may_err_as_a_gpus(operation: str, sizes: dict[str, int]) -> None:
    """In one number, where the reference's own error is chance."""
    right = getattr(reference, operation)
    for seed in range(20):
        arguments = Draw(FP32)
        arguments.generator.manual_seed(seed)
        values = arguments.arguments(operation, **sizes)
        with pytest.MonkeyPatch.context() as patch:
            found, own, exact = (
                {name: value.clone().to(d) if value.is_floating_point() else value for name, value in values.items()}
                for d in (FP32, FP32, torch.float64)
            )
            right(**own)
            right(**exact)
            patch.setattr(torch, "sigmoid", sigmoid_of_a_gpu)
            right(**found)
        for name in found.keys() & {"out", "gate", "qkv_inout"}:
            floor = rounding.floor(name, values, exact, FP32)
            assert rounding.error(found[name], exact[name]) <= rounding.allowed(own[name], exact[name], floor)
            assert floor == pytest.approx(math.sqrt(68) * 2.0**-24 * exact[name].norm())


def test_an_error_counts_beside_the_references_own_and_the_roundings() -> None:
    exact = torch.tensor([0.0, 4.0], dtype=torch.float64)
    step = exact * 2.0**-11
    assert rounding.error((exact + 4 * step).half(), exact) == 4 * step.norm()
    assert rounding.root_of(16, FP16, exact) == 4 * step.norm()
    assert rounding.allowed(exact + step, exact, 0.0) == 2 * step.norm()
    padded = torch.tensor([1.0, -math.inf])
    assert rounding.error(padded, padded) == 0 and rounding.norm(padded) == 1
    assert rounding.error(torch.tensor([1.0, math.nan]), padded) == math.inf


def test_a_sum_over_tokens_without_one_of_them_is_refused() -> None:
    def one_short(dbias_acc: Tensor, dout: Tensor, **rest: Tensor) -> None:
        reference.bias_backward(dbias_acc, dout[1:])

    assert not verdict(one_short, "bias_backward", FP32)[0]
    assert not verdict(lambda out, inp: reference.gelu_forward(out, inp * 1.05), "gelu_forward", BF16)[0]
