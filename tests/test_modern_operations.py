"""The modern network's operations equal float64 autograd to 1e-10, at odd shapes, over NaN-filled outputs and sentinels.

RMS norm, QK-norm, rotary positions, squared ReLU, the softly capped classifier, the embedding of tokens alone.
"""

import math
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from handgrad.ops import cases, cpu, reference
from handgrad.ops.reference.rotary import rotate
from tests.test_operations import (
    SENTINEL,
    TOKENS,
    accumulator,
    check_classifier,
    close,
    equal_autograd,
    gradients,
    nan,
    randn,
)

BF16 = 2.0**-8  # the largest relative error of rounding to bf16


@pytest.fixture(params=[reference, cpu], ids=["reference", "cpu"])
def ops(request: pytest.FixtureRequest) -> ModuleType:
    return request.param


def normalized(x: Tensor) -> Tensor:
    """RMS norm as the definition has it, over the last axis."""
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()


def rotated(x: Tensor, length: int) -> Tensor:
    """Rotation (N, H, D) as the definition has it: the complex numbers x1 + i x2 times exp(i t 10000^(-2i/D))."""
    N, half = x.shape[0], x.shape[-1] // 2
    positions = torch.arange(length, dtype=torch.float64).repeat(N // length)
    angles = positions[:, None, None] * 10000 ** (-torch.arange(half, dtype=torch.float64) / half)
    turned = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([turned.real, turned.imag], -1)


# The token embedding.


def test_token_embedding(ops: ModuleType) -> None:
    def definition(wte: Tensor, **_: Any) -> dict[str, Tensor]:
        return {"out": wte[TOKENS].view(15, 7)}

    ran = equal_autograd(ops, "token_embedding_backward", definition, B=3, T=5, C=7, Vp=11, tokens=TOKENS)
    assert torch.equal(ran.after["out"], definition(**ran.before)["out"])
    assert (ran.backward_after["dwte_acc"][[5, 6, 7, 8]] == SENTINEL).all(), "a word that does not occur has no gradient"


# RMS norm.

WITHOUT_GAIN = {"gain": None, "dgain_acc": None, "epsilon": 1e-6}


@pytest.mark.parametrize(("N", "C"), [(1, 3), (7, 13), (33, 64)])
def test_rmsnorm(ops: ModuleType, N: int, C: int) -> None:
    def definition(inp: Tensor, **_: Any) -> dict[str, Tensor]:
        return {"out": normalized(inp), "rstd": (inp.square().mean(1) + 1e-6).rsqrt()}

    equal_autograd(ops, "rmsnorm_backward", definition, N=N, C=C, **WITHOUT_GAIN)


def test_rmsnorm_of_zeros_and_of_small_numbers(ops: ModuleType) -> None:
    """The epsilon counts there, in the backward as well."""
    inp = torch.stack([torch.zeros(5, dtype=torch.float64), randn(5) * 1e-3])
    out, rstd, dinp = nan(2, 5), nan(2), torch.zeros(2, 5, dtype=torch.float64)
    ops.rmsnorm_forward(out, rstd, inp)
    assert (out[0] == 0).all() and abs(rstd[0].item() - 1e3) < 1e-9
    (expected,) = gradients(normalized(inp.requires_grad_()), randn(2, 5, seed=1), inp)
    ops.rmsnorm_backward(dinp, None, randn(2, 5, seed=1), inp.detach(), rstd, None)
    close(dinp, expected)


# QK-norm, rotation, and both in a row.

SHAPES = [(1, 1, 1, 2), (6, 3, 2, 6), (15, 5, 3, 10), (130, 65, 2, 16)]  # N, T, H, D: several samples, odd D/2


def operation_of(norm: bool, turn: bool) -> str:
    return "_".join(["qk_norm"] * norm + ["rotary"] * turn)


def by_definition(qkv: Tensor, H: int, length: int, norm: bool, turn: bool) -> Tensor:
    """(N, 3C) by the definitions, in a form that autograd can take apart."""
    q, k, v = qkv.view(qkv.shape[0], 3, H, -1).unbind(1)
    if norm:
        q, k = normalized(q), normalized(k)
    if turn:
        q, k = rotated(q, length), rotated(k, length)
    return torch.stack([q, k, v], 1).view(qkv.shape)


@pytest.mark.parametrize(("norm", "turn"), [(True, False), (False, True), (True, True)], ids=["norm", "turn", "both"])
@pytest.mark.parametrize(("N", "T", "H", "D"), SHAPES)
def test_queries_and_keys(ops: ModuleType, N: int, T: int, H: int, D: int, norm: bool, turn: bool) -> None:
    """The backward sees the outputs of the forward and no more; the values pass both ways, bit for bit."""
    values = slice(2 * H * D, None)

    def definition(qkv_inout: Tensor, **_: Any) -> dict[str, Tensor]:
        found = {"qkv_inout": by_definition(qkv_inout, H, T, norm, turn)}
        if norm:
            found["rstd"] = (qkv_inout[:, : 2 * H * D].view(N, 2 * H, D).square().mean(-1) + 1e-6).rsqrt()
        return found

    operation = operation_of(norm, turn)
    ran = equal_autograd(ops, f"{operation}_backward", definition, N=N, T=T, H=H, D=D)
    assert torch.equal(ran.after["qkv_inout"][:, values], ran.before["qkv_inout"][:, values])
    given, found = ran.backward_before, ran.backward_after["dqkv_inout"]
    assert torch.equal(found[:, values], given["dqkv_inout"][:, values])
    if norm:
        given["qkv"][:, values] = math.nan  # not read
        getattr(ops, f"{operation}_backward")(**given)
        assert torch.equal(given["dqkv_inout"], found)


def test_a_rotated_score_depends_on_the_distance_alone(ops: ModuleType) -> None:
    """The same query and key at every position: q k^T is constant along its diagonals, and differs between them."""
    T, H, D = 9, 2, 6
    qkv, scores = randn(1, 3 * H * D).repeat(T, 1), nan(H, T, T)
    ops.rotary_forward(qkv, num_heads=H, length=T)
    for head in range(H):
        q, k = (qkv[:, (part * H + head) * D :][:, :D] for part in (0, 1))
        scores[head] = q @ k.t()
    for distance in range(1 - T, T):
        diagonal = scores.diagonal(distance, 1, 2)
        close(diagonal, diagonal[:, :1].expand_as(diagonal))
    assert (scores[:, 0, 1:] - scores[:, 0, :1]).abs().min() > 1e-3


def test_a_million_positions_on_the_distance_still_decides() -> None:
    """Angles in float64: an angle of a million radians is off by 1e-10. In float32 it would be off by 0.03."""
    H, D, far = 1, 16, 1_000_000
    positions = torch.tensor([0, 3, far, far + 3])
    for dtype, tolerance in ((torch.float64, 1e-8), (torch.float32, 1e-5)):
        qkv = randn(1, 3 * H * D).repeat(4, 1).to(dtype)
        rotate(qkv, positions, H, 1)
        q, k = qkv[:, :D], qkv[:, D : 2 * D]
        assert abs((q[1] @ k[0] - q[3] @ k[2]).item()) < tolerance * (q[1].norm() * k[0].norm()).item()


def test_a_rotation_keeps_norms_and_can_be_undone(ops: ModuleType) -> None:
    N, T, H, D = 14, 7, 3, 10
    qkv, rstd = randn(N, 3 * H * D), nan(N, 2 * H)
    turned = qkv.clone()
    ops.rotary_forward(turned, num_heads=H, length=T)
    close(turned.view(N, 3 * H, D).norm(dim=-1), qkv.view(N, 3 * H, D).norm(dim=-1))
    assert torch.equal(turned[[0, 7]], qkv[[0, 7]]), "the first position of each sample turns by nothing"
    assert (turned - qkv).view(N, 3 * H, D)[1:7, : 2 * H].norm(dim=-1).min() > 0.1
    ops.rotary_backward(turned, num_heads=H, length=T)
    close(turned, qkv)
    ops.qk_norm_rotary_forward(qkv, rstd, length=T)
    assert (qkv.view(N, 3 * H, D)[:, : 2 * H].norm(dim=-1) <= math.sqrt(D)).all(), "so no score is larger than sqrt(D)"


def test_positions_may_be_any(ops: ModuleType) -> None:
    """`rotate` at given positions, in any order, gives the rows of the forward."""
    T, H, D = 11, 2, 6
    qkv, order = randn(T, 3 * H * D), torch.randperm(T, generator=torch.Generator().manual_seed(1))
    rows = qkv[order]
    ops.rotary_forward(qkv, num_heads=H, length=T)
    rotate(rows, order, H, 1)
    assert torch.equal(rows, qkv[order])


# Squared ReLU.


def test_relu2(ops: ModuleType) -> None:
    """In place, and its gradient from its output."""

    def definition(hidden_inout: Tensor, **_: Any) -> dict[str, Tensor]:
        return {"hidden_inout": F.relu(hidden_inout).square()}

    equal_autograd(ops, "relu2_backward", definition, N=9, F=31)


def test_relu2_at_zero_below_it_and_far_above(ops: ModuleType) -> None:
    out = torch.tensor([[0.0, -0.0, -3.0, -1e30, 1e-30, 1e30, math.nan]], dtype=torch.float64)
    dinp = torch.ones_like(out)
    ops.relu2_forward(out)
    ops.relu2_backward(dinp, out)
    assert out[0, :4].tolist() == dinp[0, :4].tolist() == [0.0] * 4
    close(out[0, 4:6], torch.tensor([1e-60, 1e60], dtype=torch.float64))
    close(dinp[0, 4:6], torch.tensor([2e-30, 2e30], dtype=torch.float64))
    assert out[0, 6].isnan() and dinp[0, 6].isnan(), "a NaN shows"


@pytest.mark.parametrize(("N", "C", "width"), [(1, 1, 1), (5, 3, 7), (17, 12, 50)])
def test_feed_forward_half(ops: ModuleType, N: int, C: int, width: int) -> None:
    """The square at the end of one product, and the backward of the next, through to the gradient before the ReLU."""
    inp, fc, fcproj, dout = randn(N, C), randn(width, C, seed=1), randn(C, width, seed=2), randn(N, C, seed=3)
    hidden, dhidden, dfcproj_acc = nan(N, width), nan(N, width), accumulator(fcproj)
    ops.linear_relu2_forward(hidden, inp, fc)
    ops.relu2_linear_backward(dhidden, dfcproj_acc, dout, hidden, fcproj)
    before = (inp @ fc.t()).requires_grad_()
    expected = F.relu(before).square()
    close(hidden, expected.detach())
    dbefore, dfcproj = gradients(expected @ fcproj.requires_grad_().t(), dout, before, fcproj)
    close(dhidden, dbefore)
    close(dfcproj_acc - SENTINEL, dfcproj)


# The classifier with a soft cap.


@pytest.mark.parametrize("softcap", [0.5, 15.0])
@pytest.mark.parametrize(("N", "V", "Vp"), [(1, 2, 128), (9, 57, 128), (5, 128, 128)])
def test_classifier(ops: ModuleType, N: int, V: int, Vp: int, softcap: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """In blocks of four rows."""
    for module in (reference.classifier, cpu.classifier):
        monkeypatch.setattr(module, "CLASSIFIER_BLOCK_ELEMENTS", 4 * Vp)
    check_classifier(ops, N, V, Vp, lambda logits: softcap * torch.tanh(logits / softcap), softcap=softcap)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_no_cap_is_the_plain_classifier(ops: ModuleType, dtype: torch.dtype) -> None:
    """Bit for bit the softmax of the logits, less the target, times the scale."""
    N, V, Vp = 9, 57, 128
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    logits, scale = (randn(N, Vp) * 4).to(dtype), torch.tensor([0.37], dtype=wide)
    targets = torch.randint(V, (N,), generator=torch.Generator().manual_seed(1))
    losses, found = torch.full((N,), math.nan, dtype=wide), logits.clone()
    ops.classifier_forward_backward(losses, found, targets, scale, vocab_size=V, softcap=0.0)
    log_p = F.pad(logits[:, :V], (0, Vp - V), value=-math.inf).log_softmax(1, dtype=wide)
    dlogits = (log_p.exp() - F.one_hot(targets, Vp)) * scale
    assert torch.equal(losses, -log_p[range(N), targets]) and torch.equal(found, dlogits.to(dtype))


def test_the_tanh_of_a_cpu_in_float32() -> None:
    """By the sigmoid it is exact to a unit near 1; 0 stays 0, infinities come to 1, and a NaN shows."""
    logits = torch.cat([torch.linspace(-200, 200, 4001), torch.tensor([0.0, 1e-30, -1e30, math.inf, -math.inf])])
    found = cpu.classifier.capped_tanh(logits, 15.0)
    assert found.dtype == torch.float32 and found[-5] == 0
    assert (found.double() - torch.tanh(logits.double() / 15)).abs().max() <= 2.0**-22
    assert cpu.classifier.capped_tanh(torch.tensor([math.nan]), 15.0).isnan().all()


def test_capped_logits_are_bounded(ops: ModuleType) -> None:
    """However large the logits, no loss is larger than 2 c + log V, and no gradient than the scale."""
    cap, V = 15.0, 3
    logits = torch.tensor([[1e30, -1e30, 0.0, math.nan], [-1e4, 1e4, 0.0, math.nan]], dtype=torch.float64)
    losses, capped = nan(2), logits.clone()
    ops.softcap_forward(capped[:, :V], softcap=cap)
    assert capped[:, :V].tolist() == [[cap, -cap, 0.0], [-cap, cap, 0.0]]
    scale = torch.ones(1, dtype=torch.float64)
    ops.classifier_forward_backward(losses, logits, torch.tensor([0, 0]), scale, vocab_size=V, softcap=cap)
    close(losses, torch.tensor([[cap, -cap, 0.0], [-cap, cap, 0.0]], dtype=torch.float64).log_softmax(1)[:, 0].neg())
    assert (losses <= 2 * cap + math.log(V)).all() and torch.isfinite(logits).all()
    assert (logits[:, :2] == 0).all() and (logits[:, 2] > 0).all(), "the tanh is flat there: no way further out"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_softcap(ops: ModuleType, dtype: torch.dtype) -> None:
    """In place, and in the order of the logits: the likeliest token stays the likeliest."""
    logits = (randn(7, 57) * 20).to(dtype)
    found = logits.clone()
    ops.softcap_forward(found, softcap=15.0)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    assert torch.equal(found, (15 * torch.tanh(logits.to(wide) / 15)).to(dtype))
    assert (found.gather(1, logits.argsort(1)).diff(dim=1) >= 0).all()


# In 16 bits: float32 inside, and one rounding at the end.


def rounded_once(found: Tensor, exact: Tensor, magnitude: Tensor) -> None:
    """`found` is `exact`, of the same 16-bit inputs, rounded once, but for float32's errors of terms of this magnitude."""
    assert found.dtype == torch.bfloat16
    assert ((found.double() - exact).abs() <= BF16 * exact.abs() + 2.0**-20 * magnitude).all()


def at_most_twice(found: Tensor, exact: Tensor, of_rounded_inputs: Tensor) -> None:
    """The error of `found` is at most twice that of rounding the inputs, computing exactly, and rounding the result."""
    unavoidable = (of_rounded_inputs.bfloat16().double() - exact).norm()
    error = (found.double() - exact).norm()
    assert error <= 2 * unavoidable, f"{error / unavoidable:.2f} times the error of rounding inputs and result"


def test_rmsnorm_in_bf16(ops: ModuleType) -> None:
    N, C = 33, 768
    inp, dout = randn(N, C) * 5, randn(N, C, seed=1)
    rounded, drounded = inp.bfloat16(), dout.bfloat16()
    tensors = {"inp": rounded, "dout": drounded, "dresidual_inout": torch.zeros_like(rounded), **WITHOUT_GAIN}
    ran = cases.both_ways(ops, "rmsnorm_backward", cases.Draw(torch.bfloat16), N=N, C=C, **tensors)
    out, dinp = ran.after["out"], ran.backward_after["dresidual_inout"]
    results = {}
    for name, x, dy in (("exact", inp, dout), ("rounded", rounded.double(), drounded.double())):
        y = normalized(x.requires_grad_())
        results[name] = y.detach(), *gradients(y, dy, x)
    rounded_once(out, results["rounded"][0], results["rounded"][0].abs())
    rounded_once(dinp, results["rounded"][1], drounded.double().abs().amax(1, keepdim=True))
    at_most_twice(out, results["exact"][0], results["rounded"][0])
    at_most_twice(dinp, results["exact"][1], results["rounded"][1])


@pytest.mark.parametrize(("norm", "turn"), [(True, False), (False, True), (True, True)], ids=["norm", "turn", "both"])
def test_queries_and_keys_in_bf16(ops: ModuleType, norm: bool, turn: bool) -> None:
    """The reference's pair in a row rounds between its two halves: twice the least. One half alone rounds once."""
    N, T, H, D = 130, 65, 2, 16
    heads = slice(0, 2 * H * D)
    qkv, dout = randn(N, 3 * H * D) * 5, randn(N, 3 * H * D, seed=1)
    rounded, drounded = qkv.bfloat16(), dout.bfloat16()
    sizes = {"N": N, "T": T, "H": H, "D": D}
    tensors = {"qkv_inout": rounded, "dqkv_inout": drounded.clone()}
    ran = cases.both_ways(ops, f"{operation_of(norm, turn)}_backward", cases.Draw(torch.bfloat16), **sizes, **tensors)
    out, dqkv = ran.after["qkv_inout"], ran.backward_after["dqkv_inout"]
    results = {}
    for name, x, dy in (("exact", qkv, dout), ("rounded", rounded.double(), drounded.double())):
        y = by_definition(x.requires_grad_(), H, T, norm, turn)
        results[name] = y.detach(), *gradients(y, dy, x)
    if not (norm and turn):
        rounded_once(out, results["rounded"][0], results["rounded"][0].abs().amax(1, keepdim=True))
    for found, exact, of_rounded_inputs in zip((out, dqkv), results["exact"], results["rounded"], strict=True):
        at_most_twice(found[:, heads], exact[:, heads], of_rounded_inputs[:, heads])


def test_relu2_in_bf16(ops: ModuleType) -> None:
    """The root of a rounded output has half its relative error; nothing else adds to the rounding of the gradient."""
    inp, dout = randn(33, 129) * 3, randn(33, 129, seed=1)
    out, dinp = inp.bfloat16(), dout.bfloat16()
    ops.relu2_forward(out)
    ops.relu2_backward(dinp, out)
    x, dy = inp.bfloat16().double(), dout.bfloat16().double()
    rounded_once(out, F.relu(x).square(), torch.zeros_like(x))
    rounded_once(dinp, 2 * out.double().sqrt() * dy, torch.zeros_like(x) + 1e-30)
    slope = F.relu(x) * 2
    assert ((out.double().sqrt() * 2 - slope).abs() <= BF16 / 2 * slope * (1 + BF16)).all()
    at_most_twice(out, F.relu(inp).square(), F.relu(x).square())
    at_most_twice(dinp, 2 * F.relu(inp) * dout, slope * dy)


def test_capped_classifier_in_bf16(ops: ModuleType) -> None:
    N, V, Vp, cap = 33, 57, 64, 15.0
    logits, losses = randn(N, Vp) * 10, torch.full((N,), math.nan)
    targets = torch.randint(V, (N,), generator=torch.Generator().manual_seed(1))
    found = logits.bfloat16()
    ops.classifier_forward_backward(losses, found, targets, torch.ones(1), vocab_size=V, softcap=cap)
    results = {}
    for name, x in (("exact", logits), ("rounded", logits.bfloat16().double())):
        leaf = x[:, :V].clone().requires_grad_()
        expected = F.cross_entropy(cap * torch.tanh(leaf / cap), targets, reduction="none")
        results[name] = expected.detach(), *torch.autograd.grad(expected.sum(), leaf)
    rounded_once(found[:, :V], results["rounded"][1], torch.ones(N, V))
    at_most_twice(found[:, :V], results["exact"][1], results["rounded"][1])
    assert (losses.double() - results["rounded"][0]).abs().max() < 2.0**-20 * 2 * cap
