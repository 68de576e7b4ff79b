"""The operations of the Llama family and of Gemma against float64 autograd, by the reference and by a CPU's: RMS norm with
a gain, SwiGLU and GEGLU, rotation with other frequencies, norms of queries and keys with gains, grouped heads."""

import math
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from handgrad.networks.llama import LlamaShape
from handgrad.ops import cpu, reference
from tests.test_operations import close, equal_autograd, gradients, nan, randn

BF16 = 2.0**-8


@pytest.fixture(params=[reference, cpu], ids=["reference", "cpu"])
def ops(request: pytest.FixtureRequest) -> ModuleType:
    return request.param


@pytest.mark.parametrize("plus", [0, 1])
@pytest.mark.parametrize(("N", "C"), [(1, 1), (5, 7), (33, 48)])
def test_gained_rmsnorm(ops: ModuleType, N: int, C: int, plus: int) -> None:
    def definition(inp: Tensor, gain: Tensor, epsilon: float, **_: Any) -> dict[str, Tensor]:
        return {"out": F.rms_norm(inp, (C,), plus + gain, epsilon)}

    equal_autograd(ops, "rmsnorm_backward", definition, N=N, C=C, plus=plus)


def test_a_gain_of_one_and_a_little_in_bf16(ops: ModuleType) -> None:
    """1 + w in float32, rounded once with the output: w of a thousandth would be lost in a gain of 16 bits."""
    inp, w = randn(5, 48).bfloat16(), (randn(48, seed=1) * 1e-3).bfloat16()
    out, rstd = torch.empty_like(inp), torch.empty(5)
    ops.rmsnorm_forward(out, rstd, inp, w, epsilon=1e-6, plus=1)
    x = inp.float()
    exact = x * torch.rsqrt(x.square().mean(1, keepdim=True) + 1e-6) * (1.0 + w.float())
    assert torch.equal(out, exact.bfloat16()) and not torch.equal((1 + w).float(), 1 + w.float())


@pytest.mark.parametrize(("N", "C", "width"), [(1, 1, 1), (5, 3, 7), (17, 12, 50)])
def test_feed_forward_half(ops: ModuleType, N: int, C: int, width: int) -> None:
    """SwiGLU at the end of one product, and the backward of the next, through to the gradient before it."""
    inp, gate_up, down, dout = randn(N, C), randn(2 * width, C, seed=1), randn(C, width, seed=2), randn(N, C, seed=3)
    out, hidden, dhidden, dswiglu, ddown = nan(N, width), nan(N, 2 * width), nan(N, 2 * width), nan(N, width), down * 0
    ops.linear_swiglu_forward(out, hidden, inp, gate_up)
    ops.swiglu_linear_backward(dhidden, dswiglu, ddown, dout, out, hidden, down)
    before = (inp @ gate_up.t()).requires_grad_()
    gate, up = before.chunk(2, 1)
    expected = F.silu(gate) * up
    close(hidden, before.detach())
    close(out, expected.detach())
    dbefore, expected_ddown = gradients(expected @ down.requires_grad_().t(), dout, before, down)
    close(dhidden, dbefore)
    close(ddown, expected_ddown)


GATES = {"swiglu": F.silu, "geglu": lambda gate: F.gelu(gate, approximate="tanh")}


@pytest.mark.parametrize(("N", "width"), [(1, 1), (5, 7), (17, 50)])
def test_geglu(ops: ModuleType, N: int, width: int) -> None:
    def definition(hidden: Tensor, **_: Any) -> dict[str, Tensor]:
        gate, up = hidden.chunk(2, 1)
        return {"out": GATES["geglu"](gate) * up}

    equal_autograd(ops, "geglu_backward", definition, N=N, F=width)


def test_swiglu_of_large_gates(ops: ModuleType) -> None:
    """No exponential overflows: a closed gate lets nothing through, an open one lets g u through."""
    hidden = torch.tensor([[-1e4, 1e4, 0.0, 2.0, 3.0, 5.0]])
    out, dhidden = torch.full((1, 3), math.nan), torch.full((1, 6), math.nan)
    ops.swiglu_forward(out, hidden)
    ops.swiglu_backward(dhidden, torch.ones(1, 3), hidden)
    assert out.tolist() == [[0, 3e4, 0]] and dhidden.tolist() == [[0, 3, 2.5, 0, 1e4, 0]]


@pytest.mark.parametrize("name", GATES)
def test_gates_in_bf16(ops: ModuleType, name: str) -> None:
    """float32 inside, and one rounding at the end."""
    hidden, dout = randn(33, 130).bfloat16(), randn(33, 65, seed=1).bfloat16()
    out, dhidden = torch.empty_like(dout), torch.empty_like(hidden)
    getattr(ops, f"{name}_forward")(out, hidden)
    getattr(ops, f"{name}_backward")(dhidden, dout, hidden)
    leaf = hidden.double().requires_grad_()
    gate, up = leaf.chunk(2, 1)
    exact = GATES[name](gate) * up
    assert ((out - exact).abs() <= BF16 * exact.abs() + 1e-6).all()
    (dexact,) = gradients(exact, dout.double(), leaf)
    assert ((dhidden - dexact).abs() <= BF16 * dexact.abs() + 1e-5).all()


# Queries and keys.

HEADS = [(1, 1, 1, 1, 2), (9, 3, 2, 1, 4), (14, 7, 6, 3, 10), (6, 6, 3, 3, 6)]  # N, length, H, K, D


def frequencies(D: int) -> tuple[float, ...]:
    return LlamaShape(head_width=D, rotary_base=100.0).frequencies


def rotated(heads: Tensor, length: int, scale: float) -> Tensor:
    """heads (N, heads, D)."""
    N, _, D = heads.shape
    places = torch.arange(N, dtype=torch.float64) % length
    angles = (places[:, None] * torch.tensor(frequencies(D), dtype=torch.float64))[:, None]
    first, second = heads.chunk(2, -1)
    cos, sin = scale * angles.cos(), scale * angles.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


@pytest.mark.parametrize(("N", "length", "H", "K", "D"), HEADS)
def test_rotation(ops: ModuleType, N: int, length: int, H: int, K: int, D: int) -> None:
    def definition(qkv_inout: Tensor, **_: Any) -> dict[str, Tensor]:
        heads = qkv_inout.view(N, -1, D)
        return {"qkv_inout": torch.cat([rotated(heads[:, : H + K], length, 1.3), heads[:, H + K :]], 1).flatten(1)}

    options = {"frequencies": frequencies(D), "scale": 1.3}
    equal_autograd(ops, "rotary_backward", definition, N=N, T=length, H=H, K=K, D=D, **options)


@pytest.mark.parametrize("plus", [0, 1])
@pytest.mark.parametrize(("N", "length", "H", "K", "D"), HEADS)
def test_gained_qk_norm_and_rotation(ops: ModuleType, N: int, length: int, H: int, K: int, D: int, plus: int) -> None:
    """A gain of zero among them, after which no output tells what the input was."""
    q_gain = randn(D, seed=2)
    q_gain[0] = -plus

    def definition(qkv: Tensor, q_gain: Tensor, k_gain: Tensor, epsilon: float, **_: Any) -> dict[str, Tensor]:
        q, k, v = qkv.view(N, -1, D).split((H, K, K), 1)
        normed = (F.rms_norm(heads, (D,), plus + gain, epsilon) for heads, gain in ((q, q_gain), (k, k_gain)))
        return {"out": torch.cat([*(rotated(heads, length, 1.3) for heads in normed), v], 1).flatten(1)}

    options = {"frequencies": frequencies(D), "scale": 1.3, "q_gain": q_gain, "plus": plus}
    equal_autograd(ops, "gained_qk_norm_rotary_backward", definition, N=N, T=length, H=H, K=K, D=D, **options)


@pytest.mark.parametrize(("B", "T", "H", "K", "D"), [(1, 1, 2, 1, 2), (2, 9, 6, 2, 5), (1, 33, 4, 4, 8), (3, 7, 9, 3, 4)])
def test_attention_of_grouped_heads(ops: ModuleType, B: int, T: int, H: int, K: int, D: int) -> None:
    def definition(qkv: Tensor, **_: Any) -> dict[str, Tensor]:
        q, k, v = qkv.view(B, T, -1, D).transpose(1, 2).split((H, K, K), 1)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return {"out": out.transpose(1, 2).reshape(B * T, H * D)}

    equal_autograd(ops, "attention_backward", definition, B=B, T=T, H=H, K=K, D=D)


# Frequencies.


def test_frequencies_of_llama3() -> None:
    """Those that turn more than four times in the pretraining's length stay, those that turn less than once are divided."""
    plain = LlamaShape(head_width=64, rotary_base=500000.0)
    longer = LlamaShape(head_width=64, rotary_base=500000.0, rope="llama3", rope_factor=8.0, rope_length=8192)
    ratios = [one / other for one, other in zip(longer.frequencies, plain.frequencies, strict=True)]
    turns = [8192 * one / (2 * math.pi) for one in plain.frequencies]
    assert all((ratio == 1) == (t >= 4) for ratio, t in zip(ratios, turns, strict=True))
    assert all(math.isclose(ratio, 1 / 8) == (t <= 1) for ratio, t in zip(ratios, turns, strict=True))
    assert ratios == sorted(ratios, reverse=True)


def test_frequencies_of_yarn_and_linear() -> None:
    plain = LlamaShape(head_width=64)
    linear = LlamaShape(head_width=64, rope="linear", rope_factor=4.0)
    assert linear.frequencies == tuple(one / 4 for one in plain.frequencies)
    yarn = LlamaShape(head_width=64, rope="yarn", rope_factor=4.0, rope_length=4096, rope_fast=32.0)
    ratios = [one / other for one, other in zip(yarn.frequencies, plain.frequencies, strict=True)]
    assert ratios[0] == 1 and ratios[-1] == 1 / 4 and ratios == sorted(ratios, reverse=True)
