"""Rows of 32,768 positions on a CUDA GPU: attention as exact as the host's, which never forms the scores. Kernels over more
than 2^31 elements, whose last rows are those of a small tensor. About a minute: the host's float64 takes most of it."""

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

from handgrad.ops import cpu, cuda as kernels
from tests.kernels import document_checks as checks
from tests.kernels.memory_checks import Draw, close, copy

BF16 = torch.bfloat16


def on_host(tensors: dict) -> dict:
    return {name: None if tensor is None else tensor.cpu() for name, tensor in tensors.items()}


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("heads", [(2, 1, 64), (1, 1, 128), (2, 1, 128), (1, 1, 256)], ids=str)
def test_attention(heads: tuple[int, int, int], documents: bool) -> None:
    inputs, run = checks.attention(Draw(BF16, "cuda"), [[3, 16385, 8000, 8380]], *heads)
    inputs |= {} if documents else {"starts": None}
    found = on_host(run(kernels, inputs))
    own, exact = run(cpu, on_host(inputs)), run(cpu, on_host(copy_of(inputs, torch.float64)))
    for name, result in found.items():
        close(name, result, own[name], exact[name], terms=1)
    for name, again in on_host(run(kernels, inputs)).items():
        assert torch.equal(again, found[name]), f"{name}: other bits the second time"


def copy_of(inputs: dict, dtype: torch.dtype) -> dict:
    starts = inputs["starts"]
    return copy({name: t for name, t in inputs.items() if name != "starts"}, dtype) | {"starts": starts}


def test_swiglu_past_two_to_the_31() -> None:
    draw, F = Draw(BF16, "cuda"), 8192
    inputs = draw.arguments("swiglu_backward", N=100, F=F)
    N = 2**31 // (2 * F) + 100
    hidden, dout = (torch.zeros(N, inputs[name].shape[1], dtype=BF16, device="cuda") for name in ("hidden", "dout"))
    out, dhidden = torch.empty_like(dout), torch.empty_like(hidden)
    hidden[-100:], dout[-100:] = inputs["hidden"], inputs["dout"]
    small, dsmall = torch.empty_like(inputs["dout"]), torch.empty_like(inputs["hidden"])
    for results, values in (((out, dhidden), (dout, hidden)), ((small, dsmall), (inputs["dout"], inputs["hidden"]))):
        kernels.swiglu_forward(results[0], values[1])
        kernels.swiglu_backward(results[1], *values)
    assert torch.equal(out[-100:], small) and torch.equal(dhidden[-100:], dsmall)


def test_rotation_past_two_to_the_31() -> None:
    draw, H, D, length = Draw(BF16, "cuda"), 32, 128, 1 << 15
    columns = 3 * H * D
    N = (2**31 // columns // length + 1) * length  # whole rows of 32,768
    qkv = torch.zeros(N, columns, dtype=BF16, device="cuda")
    qkv[-length:] = draw.normal(length, columns)
    small = qkv[-length:].clone()
    for tensor in (qkv, small):
        kernels.rotary_forward(tensor, num_heads=H, length=length)
    assert torch.equal(qkv[-length:], small)
    for tensor in (qkv, small):
        kernels.rotary_backward(tensor, num_heads=H, length=length)
    assert torch.equal(qkv[-length:], small)
