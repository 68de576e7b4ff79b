"""The operations on pictures: each backward equals float64 autograd to 1e-10, over NaN-filled outputs and sentinels; codes
go there and back; bits do not depend on the number of threads."""

from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from handgrad.ops import (
    CONTROL_STEP,
    CONTROLS,
    NORM_OUTLIER,
    PICTURE_OPERATIONS,
    RESULT_VERDICT,
    RESULTS,
    UPDATE,
    cases,
    cpu,
    cuda,
    reference,
)
from handgrad.ops.reference import vq
from tests.test_operations import close, equal_autograd, nan, randn


@pytest.fixture(params=[reference, cpu], ids=["reference", "cpu"])
def ops(request: pytest.FixtureRequest) -> ModuleType:
    return request.param


@pytest.fixture(params=[reference, cpu, cuda], ids=["reference", "cpu", "cuda"])
def convolving(request: pytest.FixtureRequest) -> ModuleType:
    """On a CPU, torch's own convolutions take the place of cuDNN's."""
    return request.param


def planes(pictures: Tensor) -> Tensor:
    """(B, Y, X, C) -> (B, C, Y, X), as torch has them; `pixels` turns them back."""
    return pictures.permute(0, 3, 1, 2)


def pixels(planes: Tensor) -> Tensor:
    return planes.permute(0, 2, 3, 1)


def kernel(weight: Tensor, side: int) -> Tensor:
    """(F, J J C) -> (F, C, J, J)."""
    return weight.view(len(weight), side, side, -1).permute(0, 3, 1, 2)


SIZES = [
    {"B": 1, "Y": 1, "X": 1, "H": 1, "D": 1, "F": 1, "J": 3, "S": 1},
    {"B": 3, "Y": 5, "X": 7, "H": 1, "D": 3, "F": 4, "J": 3, "S": 1},
    {"B": 2, "Y": 6, "X": 8, "H": 1, "D": 5, "F": 2, "J": 4, "S": 2},
    {"B": 2, "Y": 3, "X": 4, "H": 1, "D": 2, "F": 3, "J": 1, "S": 1},
]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("sizes", SIZES)
def test_convolution(convolving: ModuleType, sizes: dict[str, int], bias: bool) -> None:
    def definition(inp: Tensor, weight: Tensor, bias: Tensor | None, **_: Any) -> dict[str, Tensor]:
        how = {"stride": sizes["S"], "padding": (sizes["J"] - 1) // 2}
        return {"out": pixels(F.conv2d(planes(inp), kernel(weight, sizes["J"]), bias, **how))}

    absent = {} if bias else {"bias": None, "dbias_acc": None}
    equal_autograd(convolving, "conv_backward", definition, **sizes, **absent)


@pytest.mark.parametrize("sizes", SIZES)
def test_transposed_convolution(convolving: ModuleType, sizes: dict[str, int]) -> None:
    def definition(inp: Tensor, weight: Tensor, bias: Tensor, **_: Any) -> dict[str, Tensor]:
        how = {"stride": sizes["S"], "padding": (sizes["J"] - 1) // 2}
        return {"out": pixels(F.conv_transpose2d(planes(inp), kernel(weight, sizes["J"]), bias, **how))}

    equal_autograd(convolving, "transposed_conv_backward", definition, **sizes)


def test_the_transposed_convolution_is_the_adjoint(convolving: ModuleType) -> None:
    """<conv(x), y> = <x, transposed(y)>."""
    x, y, weight = randn(2, 6, 8, 3), randn(2, 3, 4, 5, seed=1), randn(5, 48, seed=2)
    forward, back = nan(2, 3, 4, 5), nan(2, 6, 8, 3)
    convolving.conv_forward(forward, x, weight, None, stride=2)
    convolving.transposed_conv_forward(back, y, weight, None, stride=2)
    close((forward * y).sum(), (x * back).sum())


@pytest.mark.parametrize("sizes", [{"B": 1, "Y": 1, "X": 3, "H": 2, "D": 1, "Q": 1}, {"B": 3, "H": 6, "D": 2, "Q": 3}])
def test_group_norm(ops: ModuleType, sizes: dict[str, int]) -> None:
    def definition(inp: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, **_: Any) -> dict[str, Tensor]:
        grouped = planes(inp).reshape(len(inp), mean.shape[1], -1)
        rstd = (grouped.var(2, correction=0) + 1e-6).rsqrt()
        out = F.group_norm(planes(inp), mean.shape[1], weight, bias, eps=1e-6)
        return {"out": pixels(out), "mean": grouped.mean(2), "rstd": rstd}

    equal_autograd(ops, "groupnorm_backward", definition, **sizes)


def test_silu(ops: ModuleType) -> None:
    equal_autograd(ops, "silu_backward", lambda inp, **_: {"out": F.silu(inp)}, N=9, F=31)


def test_squared_error(ops: ModuleType) -> None:
    def definition(prediction_to_dprediction_inout: Tensor, targets: Tensor, **_: Any) -> dict[str, Tensor]:
        x = targets.double() / 127.5 - 1
        return {"losses": (prediction_to_dprediction_inout.reshape(x.shape) - x).square()}

    ran = equal_autograd(ops, "squared_error_forward_backward", definition, V=256)
    losses, prediction = nan(2, 3 * 6 * 8), ran.before["prediction_to_dprediction_inout"]
    before = prediction.clone()
    ops.squared_error_forward(losses, prediction, ran.before["targets"])
    assert torch.equal(losses, ran.after["losses"]) and torch.equal(prediction, before)


def test_bytes_are_numbers_from_minus_one_to_one(ops: ModuleType) -> None:
    out = nan(1, 1, 2, 3)
    ops.pixels_forward(out, torch.tensor([[0, 255, 51, 102, 204, 153]]))
    close(out.view(-1), torch.tensor([-1, 1, -0.6, -0.2, 0.6, 0.2], dtype=torch.float64))


LEVELS = (8, 5, 5, 5)


def test_fsq(ops: ModuleType) -> None:
    """The bound, as in the paper's appendix, and rounding straight through."""

    def bound(inp: Tensor) -> Tensor:
        levels = torch.tensor(LEVELS, dtype=torch.float64)
        half, offset = (levels - 1) * (1 + 1e-3) / 2, torch.tensor([0.5, 0, 0, 0], dtype=torch.float64)
        return (torch.tanh(inp + (offset / half).atanh()) * half - offset) / (levels // 2)

    ran = equal_autograd(ops, "fsq_backward", lambda inp, **_: {"out": bound(inp)}, Z=4)
    out, codes = nan(2, 6, 8, 4), torch.full((2, 48), -1)
    ops.fsq_round(out, codes, ran.after["out"], levels=LEVELS)
    halves = torch.tensor([4.0, 2, 2, 2])
    assert torch.equal(out * halves, (ran.after["out"] * halves).round())


def test_every_code_of_fsq_has_values_and_a_way_back(ops: ModuleType) -> None:
    codes = torch.arange(1000).view(1, 1000)
    values, again, rounded = nan(1, 40, 25, 4), torch.full_like(codes, -1), nan(1, 40, 25, 4)
    ops.fsq_values(values, codes, levels=LEVELS)
    assert len({tuple(row) for row in values.view(-1, 4).tolist()}) == 1000 and values.abs().max() == 1
    ops.fsq_round(rounded, again, values, levels=LEVELS)
    assert torch.equal(again, codes) and torch.equal(rounded, values)


@pytest.mark.parametrize("large", [-30.0, 30.0])
def test_extreme_inputs_have_the_outermost_codes(ops: ModuleType, large: float) -> None:
    bounded, out, codes = nan(1, 1, 1, 4), nan(1, 1, 1, 4), torch.full((1, 1), -1)
    ops.fsq_forward(bounded, torch.full((1, 1, 1, 4), large, dtype=torch.float64), levels=LEVELS)
    ops.fsq_round(out, codes, bounded, levels=LEVELS)
    assert codes.item() == (0 if large < 0 else 999)


@pytest.mark.parametrize("commitment", [0.25, 1.0])
def test_vq(ops: ModuleType, commitment: float) -> None:
    """Equation 3's commitment has a gradient on the latents' side alone. Each code has the sum of its residuals, and their
    number."""

    def definition(inp: Tensor, codebook: Tensor, **_: Any) -> dict[str, Tensor]:
        z, vectors = inp.view(-1, inp.shape[3]), codebook[:, :-1]
        chosen = vectors[torch.cdist(z, vectors).argmin(1)]
        committed = (z - chosen).square().sum(1)
        return {"errors": (committed.detach() + commitment * (committed - committed.detach())).view(2, -1)}

    ran = equal_autograd(ops, "vq_backward", definition, commitment=commitment)
    codes, codebook = ran.after["codes"].view(-1), ran.before["codebook"]
    assert torch.equal(ran.after["out"].view(-1, 4), codebook[codes, :-1]) and len(codes.unique()) > 3
    z, before, after = ran.before["inp"].view(-1, 4), ran.backward_before["sums_acc"], ran.backward_after["sums_acc"]
    for code, row in enumerate((after - before) / ran.backward_before["scale"]):
        own = codes == code
        close(row, torch.cat([(codebook[code, :-1] - z[own]).sum(0), own.sum().view(1).double()]))


def vq_step(codebook: Tensor, latents: Tensor, step: int, *, verdict: int = UPDATE) -> Tensor:
    """Assigns latents (B, Y, X, Z), and updates the codebook in place; returns their codes."""
    out, codes, errors = nan(*latents.shape), torch.full((len(latents), latents[0, ..., 0].numel()), -1), torch.empty(0)
    out, errors, sums = out.to(latents), torch.empty_like(codes, dtype=latents.dtype), torch.zeros_like(codebook)
    reference.vq_forward(out, codes, errors, latents, codebook)
    scale = torch.tensor([0.01], dtype=latents.dtype)
    reference.vq_backward(torch.zeros_like(latents), sums, latents, codes, codebook, scale, commitment=0.25)
    controls, results = torch.zeros(CONTROLS, dtype=torch.float64), torch.zeros(RESULTS, dtype=torch.float64)
    controls[CONTROL_STEP], results[RESULT_VERDICT] = step, verdict
    reference.vq_update(codebook, codebook, sums, controls, results, decay=0.9)
    return codes.view(-1)


def test_a_codebook_has_the_papers_averages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Appendix A.1 keeps sums m and counts N apart, both from zero; a skipped step changes nothing."""
    monkeypatch.setattr(vq, "RARE", 0.0)
    codebook, m, N = torch.cat([randn(7, 3), torch.zeros(7, 1, dtype=torch.float64)], 1), 0.0, 0.0
    for step in range(1, 60):
        latents = randn(2, 3, 5, 3, seed=step) + 0.05 * step
        codes = vq_step(codebook, latents, step)
        uses = F.one_hot(codes, 7).double()
        m, N = 0.9 * m + 0.1 * uses.T @ latents.view(-1, 3), 0.9 * N + 0.1 * uses.sum(0)
        used = N > 0
        assert (codebook[used, :-1] - (m / N[:, None])[used]).abs().max() <= 1e-10
        assert (codebook[:, -1] - 0.01 * N).abs().max() <= 1e-10
        before = codebook.clone()
        vq_step(codebook, latents, step, verdict=NORM_OUTLIER)
        assert torch.equal(codebook, before)
    assert used.sum() > 4


@pytest.mark.parametrize("start", ["far", "equal", "beyond float32"])
def test_dead_codes_come_back_to_life(start: str) -> None:
    """33 codes, where the first step gives every latent to one code, or all codes are equal: soon each code has latents,
    and the error is small."""
    codebook = torch.cat([randn(33, 4) * 1e-6 + {"far": 9.0, "equal": 0.0, "beyond float32": 1e8}[start], nan(33, 1)], 1)
    codebook[:, -1] = 0
    codebook[11, :-1] = 0.1
    codebook, latents = codebook.float(), randn(4, 16, 16, 4).float()
    for step in range(1, 120):
        codes = vq_step(codebook, latents, step)
        if step == 1:
            assert len(codes.unique()) <= 33 * (start == "equal") + 1
    error = (latents.view(-1, 4) - codebook[codes, :-1]).square().mean()
    assert len(codes.unique()) == 33 and error < 0.3, error  # the optimum for 32 codes of 4 normal numbers is about 0.2
    assert codes.bincount().max() < 6 * codes.bincount().min() + 50


def test_a_dead_code_shares_with_a_busy_one() -> None:
    """It moves by 2^-10 of each number, up or down by step and place, and takes half of the use; the others stay."""
    usage = torch.tensor([0.5, 0, 4, 1, 0.01, 2], dtype=torch.float64)
    before, signs = torch.cat([randn(6, 16), usage[:, None]], 1), list[list[bool]]()
    for step in (3, 4):
        controls, results = torch.zeros(CONTROLS, dtype=torch.float64), torch.zeros(RESULTS, dtype=torch.float64)
        controls[CONTROL_STEP], results[RESULT_VERDICT] = step, UPDATE
        after, published = before.clone(), nan(6, 17)
        reference.vq_update(published, after, torch.zeros(6, 17, dtype=torch.float64), controls, results, decay=1.0)
        assert torch.equal(published, after) and after[:, -1].tolist() == [0.5, 2, 2, 1, 1, 1]
        assert torch.equal(after[[0, 2, 3, 5], :-1], before[[0, 2, 3, 5], :-1])
        for dead, busy in ((1, 2), (4, 5)):
            moved = after[dead, :-1] / before[busy, :-1] - 1
            assert (moved.abs() - 2**-10).abs().max() < 1e-15
            signs.append((moved > 0).tolist())
    assert all(True in one and False in one for one in signs) and len({tuple(one) for one in signs}) == 4


def test_threads_do_not_matter_to_a_codebook() -> None:
    """Nor does a codebook of 32,768, the largest, fail."""
    before, found = torch.get_num_threads(), []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        codebook = torch.cat([randn(1 << 15, 3), torch.zeros(1 << 15, 1, dtype=torch.float64)], 1).float()
        for step in (1, 2):
            vq_step(codebook, randn(1, 9, 9, 3, seed=step).float(), step)
        found.append(codebook)
    torch.set_num_threads(before)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


@pytest.mark.parametrize("name", ["conv_backward", "transposed_conv_backward", "groupnorm_backward", "silu_backward"])
def test_threads_do_not_matter(name: str) -> None:
    """Bits of float32, at odd sizes, where oneDNN's own convolutions differ."""
    found: list[cases.BothWays] = []
    before = torch.get_num_threads()
    for threads in (1, 2, 3, 5):
        torch.set_num_threads(threads)
        sizes = {"B": 3, "Y": 5, "X": 7, "H": 4, "D": 4, "F": 19, "N": 2999}
        found.append(cases.both_ways(cpu, name, cases.Draw(torch.float32), **sizes))
    torch.set_num_threads(before)
    for other in found[1:]:
        assert all(torch.equal(gradient, other.of_inputs[of]) for of, gradient in found[0].of_inputs.items())
        assert torch.equal(found[0].after["out"], other.after["out"])


class Called(TorchDispatchMode):
    """The names of torch's operators that ran."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func.name())
        return func(*args, **kwargs or {})


TORCH_FORMULAS = [name for name in PICTURE_OPERATIONS if name in cases.CALLS and "group" not in name]


@pytest.mark.parametrize("name", [*TORCH_FORMULAS, "vq_update"])
def test_a_cuda_graph_can_capture_the_second_call(name: str) -> None:
    """No number goes to the host or comes from there, and no size depends on one."""
    draw = cases.Draw(torch.float32)
    updated = {"published": draw(8, 5), "weight_inout": draw(8, 5), "sums": draw(8, 5), "decay": 0.99}
    updated |= {"controls": draw.float64(*range(CONTROLS)), "results": draw.float64(*range(RESULTS))}
    arguments = updated if name == "vq_update" else draw.arguments(name, V=256)
    for _ in range(2):
        with Called() as called:
            if name == "vq_update":
                cuda.vq_update(**arguments)
            else:
                cases.call(getattr(cuda, name), name, cases.copies(arguments))
    assert not called.names & {f"aten::{op}" for op in ("_local_scalar_dense", "lift_fresh", "nonzero", "masked_select")}
