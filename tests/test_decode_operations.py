"""The operations of generation beside those of training that they are made of, by the reference and on a CPU."""

from types import ModuleType

import pytest
import torch
from torch import Tensor

from handgrad.ops import cpu, reference


@pytest.fixture(params=[reference, cpu], ids=["reference", "cpu"])
def ops(request: pytest.FixtureRequest) -> ModuleType:
    return request.param


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def nan(*shape: int) -> Tensor:
    return torch.full(shape, float("nan"), dtype=torch.float64)


def test_embedding_decode(ops: ModuleType) -> None:
    wte, wpe, out = randn(11, 7), randn(5, 7, seed=1), nan(3, 7)
    ops.decode.embedding_decode(out, torch.tensor([10, 0, 10]), torch.tensor([4, 0, 1]), wte, wpe)
    assert torch.equal(out, torch.stack([wte[10] + wpe[4], wte[0] + wpe[0], wte[10] + wpe[1]]))


@pytest.mark.parametrize("with_bias", [True, False])
def test_layernorm_linear(ops: ModuleType, with_bias: bool) -> None:
    x, w, b, weight, bias = randn(3, 7), randn(7, seed=1), randn(7, seed=2), randn(12, 7, seed=3), randn(12, seed=4)
    out, ln, mean, rstd = nan(3, 12), nan(3, 7), nan(3), nan(3)
    ops.decode.layernorm_linear_forward(out, ln, mean, rstd, x, w, b, weight, bias if with_bias else None)
    expected = torch.nn.functional.layer_norm(x, (7,), w, b) @ weight.t() + (bias if with_bias else 0)
    assert torch.allclose(out, expected, rtol=1e-12, atol=1e-12)
    fc = nan(3, 12)
    if with_bias:
        ops.decode.layernorm_linear_gelu_forward(out, fc, ln, mean, rstd, x, w, b, weight, bias)
        expected = torch.nn.functional.gelu(expected, approximate="tanh")
        assert torch.allclose(out, expected, rtol=1e-12, atol=1e-12)


def test_decoding_goes_on_where_prompts_were_stored(ops: ModuleType) -> None:
    """Two prompts of 6 tokens into slots 3 and 1 of 4; then one token each, at 6 and, after a padded tail, at 4."""
    B, H, T, D, longest = 4, 3, 6, 4, 9
    qkv = randn(2 * T, 3 * H * D)
    keys, values = nan(B, H, longest, D), nan(B, H, longest, D)
    ops.store_keys_values(keys, values, qkv, torch.tensor([3, 1]))
    _, k, v = qkv.view(2, T, 3, H, D).permute(2, 0, 3, 1, 4)
    assert torch.equal(keys[[3, 1], :, :T], k) and torch.equal(values[[3, 1], :, :T], v)
    assert keys[[0, 2]].isnan().all() and keys[:, :, T:].isnan().all() and values[:, :, T:].isnan().all()
    new, out = randn(B, 3 * H * D, seed=1), nan(B, H * D)
    positions = torch.tensor([0, 4, 0, 6])
    ops.decode.attention_decode(out, keys, values, new, positions)
    for slot, prompt in ((3, 0), (1, 1)):
        place = int(positions[slot])
        whole = torch.cat([qkv.view(2, T, -1)[prompt, :place], new[slot : slot + 1]])
        expected, lse = nan(place + 1, H * D), nan(1, H, place + 1)
        ops.attention_forward(expected, lse, whole)
        assert torch.allclose(out[slot], expected[-1], rtol=1e-12, atol=1e-12)
    for slot in (0, 2):
        assert torch.allclose(out[slot], new[slot, 2 * H * D :], rtol=1e-12), "alone, a token sees itself"
    assert keys[:, :, 7:].isnan().all()
