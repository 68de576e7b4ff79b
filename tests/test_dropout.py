"""Dropout: gradients against float64 autograd, masks that follow from numbers alone, and that nothing else sees them."""

import dataclasses
import itertools
import math
import shutil
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.twin import Twin
from handgrad.errors import UsageError
from handgrad.joins.dropout import reference as dropout_ops
from handgrad.joins.dropout.reference import Dropout, attention_mask
from handgrad.models import compute_losses
from handgrad.ops import reference as ops
from handgrad.run.header import dropout_lines
from handgrad.run.open import train
from handgrad.run.resolve import resolve
from handgrad.settings.config import RunConfig, check
from handgrad.training.feed import SAMPLE_NUMBERS, fill_inputs, inputs_of
from tests.conftest import Model, make_model
from tests.documents import visible
from tests.model_checks import twin_of
from tests.test_model import ODD
from tests.test_packed_models import SHAPES as PACKED, Documents
from tests.test_runs import elsewhere, same_bits
from tests.test_training import assembly_of, steps_of

P = 0.3


def factors(dropout: Dropout, N: int, C: int) -> Tensor:
    """(N, C) of 0 and 1 / (1 - p), as the operation multiplies."""
    out = torch.full((N, C), math.nan, dtype=torch.float64)
    dropout_ops.dropout_forward(out, torch.ones(N, C, dtype=torch.float64), dropout)
    return out


def place(site: int = 0, *, samples: Tensor | None = None, seed: int = 1337, p: float = P) -> Dropout:
    return Dropout(torch.arange(4) if samples is None else samples, p, seed, site)


# The gradient.


def loss_of_twin(twin: Twin, model: Model) -> Tensor:
    """The twin's loss with the operations' masks at GPT-2's places."""
    tokens, bound = model.act.tokens, model.ops
    B, T = tokens.shape
    C, H = model.shape.channels, model.shape.num_heads

    def drop(x: Tensor, site: Dropout) -> Tensor:
        return x * factors(site, B * T, C).view(B, T, C)

    hidden, positions = torch.ones(T, T, dtype=torch.bool).triu(1), torch.arange(T)
    if model.act.document_starts is not None:
        hidden, positions = ~visible(model.act.document_starts), model.act.positions
    x = drop(twin.wte(tokens) + twin.wpe(positions), bound.embedding)
    for block, w, act in zip(twin.blocks, model.weights.blocks, model.act.blocks, strict=True):
        q, k, v = block.qkv(block.ln1(x)).view(B, T, 3, H, C // H).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-1, -2) / math.sqrt(C // H)
        weights = scores.masked_fill(hidden, -math.inf).softmax(-1)
        site = bound.sites[act.lse]
        weights = weights * torch.stack([attention_mask(weights[b].detach(), site, b) for b in range(B)])
        x = x + drop(block.proj((weights @ v).transpose(1, 2).reshape(B, T, C)), bound.sites[w.proj_bias])
        x = x + drop(block.fcproj(F.gelu(block.fc(block.ln2(x)), approximate="tanh")), bound.sites[w.fcproj_bias])
    logits = F.linear(twin.lnf(x), twin.wte.weight)[..., : twin.vocab_size]
    return F.cross_entropy(logits.reshape(-1, twin.vocab_size), model.act.targets.reshape(-1))


@pytest.mark.parametrize("recompute", [0, 1, 2, 3])
@pytest.mark.parametrize(("batch", "length", "chunk"), [(1, 1, 1), (3, 17, 20)])
def test_gradients_equal_autograd(batch: int, length: int, chunk: int, recompute: int) -> None:
    check_gradients(make_model(ODD, batch, length, recompute=recompute, chunk=chunk, dropout=P), recompute)


@pytest.mark.parametrize("recompute", [0, 2])
def test_gradients_within_documents_equal_autograd(recompute: int) -> None:
    """Several in a row, whose positions restart: the embedding and attention have operations of their own."""
    source = Documents(padding=0)
    source.targets.random_(57, generator=torch.Generator().manual_seed(4))
    options = {"recompute": recompute, "chunk": 11, "dropout": P, "packed": True}
    model = make_model(PACKED["gpt2"], *source.starts.shape, noise=0.3, **options)
    fill_inputs(source, inputs_of(model.act), 0)
    check_gradients(model, recompute)


def check_gradients(model: Model, recompute: int) -> None:
    model.run(recompute=recompute, scale=1 / model.act.tokens.numel())
    twin = twin_of(model)
    loss = loss_of_twin(twin, model)
    loss.backward()
    assert abs(model.act.losses.mean() - loss) <= 1e-12 * loss
    for row in model.table:
        wanted = twin.parameter_of(row).grad
        assert wanted is not None
        error = (row.view(model.flat_gradients) - wanted).norm() / wanted.norm().clamp_min(1e-12)
        assert error <= 1e-10, f"{row.name}: relative error {error:.3g}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_recompute_levels_give_the_same_bits(dtype: torch.dtype) -> None:
    found = []
    for level in (0, 1, 2, 3):
        model = make_model(ODD, 3, 16, dtype, recompute=level, dropout=P)
        model.run(recompute=level)
        found.append((model.flat_gradients, model.act.losses.clone()))
    for gradients, losses in found[1:]:
        assert torch.equal(gradients, found[0][0]) and torch.equal(losses, found[0][1])


def test_evaluation_leaves_nothing_out() -> None:
    dropped, without = (make_model(ODD, 3, 16, torch.float32, dropout=p) for p in (P, 0.0))
    for model in (dropped, without):
        compute_losses(ops, model.weights, model.act, ODD)
    evaluated = dropped.act.losses.clone()
    assert torch.equal(evaluated, without.act.losses)
    dropped.run()
    assert (dropped.act.losses != evaluated).all(), "training leaves something out"


def test_the_branch_in_16_bits_is_rounded_once() -> None:
    """Kept numbers of the branch, times 1 / (1 - p), and the stream are added in float32."""
    residual, branch = (torch.randn(64, 48, generator=torch.Generator().manual_seed(s)).bfloat16() for s in (1, 2))
    out, site = branch.clone(), place()
    dropout_ops.dropout_residual_forward(out, residual, site)
    kept = factors(site, 64, 48) > 0
    exact = residual.float() + torch.where(kept, branch.float() * site.scale, 0.0)
    assert torch.equal(out, exact.bfloat16())


# The masks.


def hashed(x: int) -> int:
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        x = (x ^ (x >> shift)) * factor % 2**32
    return x ^ (x >> 16)


def kept_by_the_book(seed: int, site: int, sample: int, head: int | None, row: int, column: int, p: float) -> bool:
    """docs/operations/dropout.md, number by number."""
    weyl = 0x9E3779B1
    key = hashed(sample % 2**32 ^ hashed(sample >> 32 ^ hashed(site ^ hashed(seed))))
    if head is not None:
        key = hashed((head * weyl + key) % 2**32)
    shared = hashed((row // 16 * weyl + key) % 2**32)
    place = row % 16 * 2**20 + column // 16 * 16 + column % 8
    number = hashed((place * weyl + shared) % 2**32)
    return (number >> 16 if column & 8 else number % 2**16) >= round(p * 2**16)


def test_a_mask_follows_the_book() -> None:
    samples = torch.tensor([7, 2**32 + 7, 2**40 - 1])
    dropout = place(5, samples=samples, seed=2**32 - 1)
    T, C = 37, 21
    found = factors(dropout, 3 * T, C).view(3, T, C)
    heads = attention_mask(torch.empty(2, T, T, dtype=torch.float64), dropout, 1)
    for row, column in itertools.product(range(T), range(C)):
        for b, sample in enumerate(samples.tolist()):
            kept = kept_by_the_book(dropout.seed, 5, sample, None, row, column, P)
            assert found[b, row, column] == kept * dropout.scale
        for head in range(2):
            kept = kept_by_the_book(dropout.seed, 5, 2**32 + 7, head, row, column, P)
            assert heads[head, row, column] == kept * dropout.scale


def unlikely(share: float, expected: float, count: int) -> bool:
    """True if a share of `count` trials is more than five standard deviations off."""
    return abs(share - expected) > 5 * math.sqrt(expected * (1 - expected) / count)


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_masks_look_random(p: float) -> None:
    """The share of kept numbers is right over all, in every row, column and sample; and pairs of numbers are kept together
    as often as if they were independent: neighbours, the two halves of a hash, rows of a common key and of two, samples,
    sites, seeds, heads."""
    T, C, H = 256, 256, 2
    site = place(3, p=p)
    threshold = site.threshold / 2**16

    def kept(dropout: Dropout) -> Tensor:
        return factors(dropout, 4 * T, C).view(4, T, C) > 0

    mask = kept(site)
    for dims in ((0, 1, 2), (1, 2), (0, 1), (0, 2)):
        shares = mask.double().mean(dims).flatten()
        count = mask.numel() // shares.numel()
        assert not any(unlikely(share, 1 - threshold, count) for share in shares.tolist()), dims
    heads = attention_mask(torch.empty(H, T, C), site, 0) > 0
    pairs = {
        **{f"columns {n} apart": (mask[..., :-n], mask[..., n:]) for n in (1, 2, 7, 8, 9, 16)},
        **{f"rows {n} apart": (mask[:, :-n], mask[:, n:]) for n in (1, 2, 15, 16, 17)},
        "halves of a hash": (mask.view(4, T, -1, 2, 8)[..., 0, :], mask.view(4, T, -1, 2, 8)[..., 1, :]),
        "neighbouring samples": (mask[:-1], mask[1:]),
        "neighbouring sites": (mask, kept(dataclasses.replace(site, site=4))),
        "neighbouring seeds": (mask, kept(dataclasses.replace(site, seed=1338))),
        "heads": (heads[0], heads[1]),
        "head and sample": (heads[0], mask[0]),
    }
    for name, (a, b) in pairs.items():
        both = (a & b).double().mean().item()
        assert not unlikely(both, (1 - threshold) ** 2, a.numel()), name


def test_sites_are_numbered_in_the_order_of_the_forward() -> None:
    model = make_model(ODD, 1, 19, dropout=P)
    bound, sites = model.ops, [0]
    assert bound.embedding.site == 0
    for act, w, g in zip(model.act.blocks, model.weights.blocks, model.gradients.blocks, strict=True):
        block = (bound.sites[act.lse], bound.sites[w.proj_bias], bound.sites[w.fcproj_bias])
        assert (bound.sites[g.proj_weight], bound.sites[g.fcproj_weight]) == block[1:]
        assert bound.dbias_acc[g.proj_weight] is g.proj_bias and bound.dbias_acc[g.fcproj_weight] is g.fcproj_bias
        sites += [site.site for site in block]
    assert sites == list(range(1 + 3 * ODD.num_layers))
    assert len({dataclasses.replace(bound.embedding, site=site).stream for site in sites}) == len(sites)


def test_the_mean_stays() -> None:
    """The scale of kept elements is the exact share that is kept, a multiple of 2^-16."""
    for p in (1e-4, 0.1, 0.3, 0.99):
        site = place(p=p)
        assert site.scale * (1 - site.threshold / 2**16) == pytest.approx(1, rel=1e-15)
        assert abs(site.threshold / 2**16 - p) <= 2**-17


def test_masks_do_not_depend_on_the_micro_batch() -> None:
    T, C = 19, 24
    whole = factors(place(samples=torch.arange(5, 9)), 4 * T, C)
    halves = [factors(place(samples=torch.arange(first, first + 2)), 2 * T, C) for first in (5, 7)]
    assert torch.equal(whole, torch.cat(halves))
    scores = torch.empty(2, T, T)
    a, b = place(samples=torch.arange(5, 9)), place(samples=torch.tensor([8]))
    assert torch.equal(attention_mask(scores, a, 3), attention_mask(scores, b, 0))


# In a run.


@pytest.fixture
def with_p(config: RunConfig) -> RunConfig:
    return dataclasses.replace(config, dropout=P)


def test_the_feed_says_which_samples(with_p: RunConfig) -> None:
    training = assembly_of(with_p)
    for first in (0, 2**33 + 5):
        training.feed.fill(first)
        assert training.state.views[SAMPLE_NUMBERS].tolist() == list(range(first, first + with_p.micro_batch))


def test_the_micro_batch_changes_nothing_but_rounding(with_p: RunConfig) -> None:
    _, small = steps_of(dataclasses.replace(with_p, micro_batch=1), 3)
    _, large = steps_of(dataclasses.replace(with_p, micro_batch=8), 3)
    _, without = steps_of(dataclasses.replace(with_p, dropout=0.0), 3)
    for a, b, c in zip(small, large, without, strict=True):
        assert abs(a.loss - b.loss) < 1e-5 and abs(a.loss - c.loss) > 1e-4


def test_a_resumed_run_has_the_same_bits(with_p: RunConfig) -> None:
    with_p = dataclasses.replace(with_p, steps=8, sample_tokens=0, keep_checkpoints=0)
    train(with_p)
    again = elsewhere(with_p, "again")
    shutil.copytree(with_p.out, again.out)
    shutil.rmtree(Path(again.out) / "checkpoints" / "step_00000008")
    train(again)
    assert "resumed at step 4" in (Path(again.out) / "log.txt").read_text()
    same_bits(with_p.out, again.out, 8)


def test_memory_is_the_numbers_of_the_samples(config: RunConfig) -> None:
    plans = [resolve(dataclasses.replace(config, dropout=p), 257).plan for p in (0.0, P)]
    without, with_dropout = ({buffer.name: buffer.shape for buffer in plan.buffers} for plan in plans)
    assert with_dropout == without | {SAMPLE_NUMBERS: (config.micro_batch,)}
    assert plans[1].total_bytes - plans[0].total_bytes <= 512, "one row, aligned"


def test_header_and_plan_say_what_it_costs(config: RunConfig) -> None:
    """Two layers: 24 passes over 4 x 32 tokens of 32 channels in float32, half of that in bf16."""
    for precision, moved in (("fp32", "384.0 KiB"), ("bf16", "192.0 KiB")):
        dropping = dataclasses.replace(config, dropout=0.1, precision=precision)
        (line,) = dropout_lines(dropping, resolve(dropping, 257))
        assert line.startswith("dropout    0.1 ") and line.endswith(
            f"masks take no memory, and a micro-batch moves {moved} more"
        )
    assert dropout_lines(config, resolve(config, 257)) == []


def test_nothing_is_left_out_unless_asked_for(config: RunConfig) -> None:
    state, _ = steps_of(config, 0)
    assert config.dropout == 0 and SAMPLE_NUMBERS not in state.views


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"dropout": 1.0}, "dropout must be 0 to 0.99, found 1"),
        ({"dropout": -0.1}, "dropout must be 0 to 0.99, found -0.1"),
        ({"dropout": math.nan}, "dropout must be 0 to 0.99, found nan"),
    ],
)
def test_what_cannot_run_is_refused(config: RunConfig, settings: dict, told: str) -> None:
    with pytest.raises(UsageError, match=told):
        check(dataclasses.replace(config, **settings))
