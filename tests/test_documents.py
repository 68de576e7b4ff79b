"""Documents side by side in a row, and tokens that are not trained, by the reference and by a CPU's: attention stays within
a document, and a target below 0 has no loss and no gradient."""

import math
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from handgrad.joins.fp8 import formats, reference as fp8_reference
from handgrad.ops import cpu, reference
from handgrad.ops.reference.attention import Mask
from tests.documents import PACKINGS, document_starts, visible
from tests.test_operations import close, equal_autograd, randn

HEADS = [(3, 3, 5), (6, 2, 4), (2, 1, 1)]  # H, K, D


@pytest.fixture(params=[reference, cpu], ids=["reference", "cpu"])
def ops(request: pytest.FixtureRequest) -> ModuleType:
    return request.param


def attend(ops: ModuleType, qkv: Tensor, dout: Tensor, H: int, starts: Tensor | None, B: int) -> list[Tensor]:
    """out, lse and dqkv over buffers of NaN."""
    out, lse, dqkv = (torch.full(s, math.nan, dtype=qkv.dtype) for s in (dout.shape, (B, H, len(dout) // B), qkv.shape))
    ops.attention_forward(out, lse, qkv, mask=Mask(starts))
    ops.attention_backward(dqkv, dout, out, lse, qkv, mask=Mask(starts))
    return [out, lse, dqkv]


@pytest.mark.parametrize(("H", "K", "D"), HEADS)
@pytest.mark.parametrize("lengths", PACKINGS.values(), ids=PACKINGS)
def test_attention_within_documents(ops: ModuleType, lengths: list[list[int]], H: int, K: int, D: int) -> None:
    starts = document_starts(lengths)
    B, T = starts.shape

    def definition(qkv: Tensor, **_: Any) -> dict[str, Tensor]:
        q, k, v = qkv.view(B, T, -1, D).transpose(1, 2).split((H, K, K), 1)
        scores = (q @ k.repeat_interleave(H // K, 1).transpose(-1, -2)) / math.sqrt(D)
        scores = scores.masked_fill(~visible(starts), -math.inf)
        out = (scores.softmax(-1) @ v.repeat_interleave(H // K, 1)).transpose(1, 2).reshape(B * T, H * D)
        return {"out": out, "lse": scores.logsumexp(-1)}

    equal_autograd(ops, "attention_backward", definition, B=B, T=T, H=H, K=K, D=D, mask=Mask(starts))


def test_one_document_in_a_row_is_the_plain_attention(ops: ModuleType) -> None:
    """Bit for bit."""
    B, T, H, D = 2, 37, 3, 4
    qkv, dout = randn(B * T, 3 * H * D), randn(B * T, H * D, seed=1)
    plain = attend(ops, qkv, dout, H, None, B)
    packed = attend(ops, qkv, dout, H, torch.zeros(B, T, dtype=torch.int32), B)
    assert all(map(torch.equal, packed, plain))


def test_a_document_sees_no_other(ops: ModuleType) -> None:
    """Another text in one document leaves the outputs and gradients of all others as they are, bit for bit."""
    H, K, D = 4, 2, 4
    starts = document_starts([[9, 14, 10]])
    qkv, dout = randn(33, (H + 2 * K) * D), randn(33, H * D, seed=1)
    before = attend(ops, qkv, dout, H, starts, 1)
    qkv[9:23], dout[9:23] = randn(14, (H + 2 * K) * D, seed=2) * 30, randn(14, H * D, seed=3) * 30
    after = attend(ops, qkv, dout, H, starts, 1)
    others = [*range(9), *range(23, 33)]
    for one, other in zip((before[0], before[1][0].T, before[2]), (after[0], after[1][0].T, after[2]), strict=True):
        assert torch.equal(one[others], other[others]) and not torch.equal(one, other)


@pytest.mark.parametrize("left", ["plain", "workspace"])
def test_fp8_attention_within_documents(left: str) -> None:
    """A quantised result holds the plain one in 16 bits, also where the gradient is left in its workspace."""
    H, D = 2, 8
    starts = document_starts([[9, 14, 10]])
    qkv, dout = randn(33, 3 * H * D).float(), randn(33, H * D, seed=1).float()

    def quantized(of: Tensor, name: str) -> formats.Quantized:
        scaling, statistics = torch.ones(formats.SCALING_PLACES), torch.zeros(formats.STATISTICS_PLACES, 1)
        return formats.Quantized(of.to(formats.E4M3), None, scaling, statistics, **{name: of})

    out, dqkv, lse = torch.empty_like(dout), torch.empty_like(qkv), torch.empty(1, H, 33)
    result = quantized(out, "plain")
    fp8_reference.attention_forward(result, lse, qkv, mask=Mask(starts))
    fp8_reference.attention_backward(quantized(dqkv, left), dout, result, lse, qkv, mask=Mask(starts))
    assert all(map(torch.equal, (out, lse, dqkv), attend(reference, qkv, dout, H, starts, 1)))


@pytest.mark.parametrize("softcap", [0.0, 15.0])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_target_below_zero_is_not_trained(
    ops: ModuleType, softcap: float, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In blocks of four rows, one with no target, with NaN where nothing must be read. Trained rows keep their bits."""
    for module in (reference.classifier, cpu.classifier):
        monkeypatch.setattr(module, "CLASSIFIER_BLOCK_ELEMENTS", 4 * 128)
    N, V, Vp = 11, 57, 128
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    logits, scale = (randn(N, Vp) * 4).to(dtype), torch.tensor([0.37], dtype=wide)
    every = torch.randint(V, (N,), generator=torch.Generator().manual_seed(1))
    untrained = torch.tensor([0, 4, 5, 6, 7, 9])
    some = every.index_fill(0, untrained, -1)
    some[9] = -(1 << 40)
    trained = every == some

    def run(targets: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
        losses, forward_losses = torch.full((2, N), math.nan, dtype=wide)
        found = logits.clone()
        options = {"vocab_size": V, "softcap": softcap, "untrained": targets is some}
        ops.classifier_forward(forward_losses, logits.clone(), targets, **options)
        ops.classifier_forward_backward(losses, found, targets, scale, **options)
        assert torch.equal(losses, forward_losses)
        return losses, found

    exact = run(every, logits)
    for values in (logits, logits.index_fill(0, untrained, math.nan)):
        for found, expected in zip(run(some, values), exact, strict=True):
            assert torch.equal(found[trained], expected[trained]) and (found[~trained] == 0).all()
    for operation, more in ((ops.classifier_forward, ()), (ops.classifier_forward_backward, (scale,))):
        with pytest.raises(AssertionError, match="a target is below 0"):
            operation(torch.empty(N, dtype=wide), logits.clone(), some, *more, vocab_size=V, softcap=softcap)


def test_the_mean_over_trained_tokens_is_cross_entropys(ops: ModuleType) -> None:
    N, V = 9, 57
    logits, targets = randn(N, V), torch.arange(N).index_fill(0, torch.tensor([2, 3, 8]), -1)
    leaf = logits.clone().requires_grad_()
    expected = F.cross_entropy(leaf, targets, ignore_index=-1)
    expected.backward()
    losses, scale = torch.full((N,), math.nan, dtype=torch.float64), torch.tensor([1 / 6], dtype=torch.float64)
    ops.classifier_forward_backward(losses, logits, targets, scale, vocab_size=V, untrained=True)
    assert leaf.grad is not None
    close(losses.sum() / 6, expected.detach())
    close(logits, leaf.grad)
