"""Chosen tokens against plain Python, against transformers, and against the expected probabilities."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from handgrad.ops.reference import decode as ops
from handgrad.ops.reference.decode import filtered, gumbel

OFF: dict[str, Any] = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
# (what differs from OFF); all of them on logits without equals.
SETTINGS = [
    {},
    {"temperature": 0.5},
    {"temperature": 3.0},
    {"top_k": 1},
    {"top_k": 4},
    {"top_k": 500},
    {"top_p": 1e-6},
    {"top_p": 0.6},
    {"top_p": 0.97},
    {"min_p": 0.05},
    {"min_p": 1.0},
    {"repetition_penalty": 1.7},
    {"repetition_penalty": 0.6},
    {"temperature": 1.7, "top_k": 9, "top_p": 0.9, "min_p": 0.1, "repetition_penalty": 1.3},
    {"temperature": 0.7, "top_k": 6, "top_p": 0.8, "repetition_penalty": 1.3},
]
V, VP = 13, 128
SEEN = [0, 3, 4, 12]


def logits_of(seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """(Vp); what stands in the padding would always win."""
    logits = torch.full((VP,), 1e30, dtype=dtype)
    logits[:V] = 2 * torch.randn(V, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return logits


def choose(logits: Tensor, seeds: Tensor, positions: Tensor, seen: list[int] | None = None, **changed: Any) -> Tensor:
    """Tokens (B) for logits (Vp) or (B, Vp)."""
    settings = OFF | changed
    B = seeds.shape[0]
    held = None
    if settings["repetition_penalty"] != 1:
        held = torch.zeros(B, V, dtype=torch.bool)
        held[:, seen or []] = True
    out = torch.full((B,), -7)
    ops.choose_tokens(out, logits.expand(B, VP), held, seeds, positions, vocab_size=V, **settings)
    return out


def hashed(x: int) -> int:
    """MurmurHash3's finaliser, of plain integers."""
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        x = ((x ^ x >> shift) * factor) % 2**32
    return x ^ x >> 16


def uniform(seed: int, position: int, token: int) -> float:
    key = hashed(position % 2**32 ^ hashed(seed % 2**32 ^ hashed(seed >> 32)))
    return ((hashed((token * 0x9E3779B1 + key) % 2**32) >> 9) + 0.5) / 2**23


def slowly_processed(logits: list[float], seen: list[int], settings: dict[str, Any]) -> list[float]:
    """The logits of what may be chosen, minus infinity elsewhere, one filter after the other."""
    r, t = settings["repetition_penalty"], settings["temperature"]
    scores = [(x / r if x > 0 else x * r) if i in seen else x for i, x in enumerate(logits)]
    kept = {i: x / t for i, x in enumerate(scores)}

    def chances() -> dict[int, float]:
        total = sum(math.exp(x) for x in kept.values())
        return {i: math.exp(x) / total for i, x in kept.items()}

    likeliest = sorted(kept, key=lambda i: -kept[i])
    if settings["top_k"]:
        kept = {i: kept[i] for i in likeliest[: settings["top_k"]]}
    p, nucleus, total = chances(), [], 0.0
    for i in sorted(kept, key=lambda i: -kept[i]):
        if total >= settings["top_p"] and settings["top_p"] < 1:
            break
        nucleus.append(i)
        total += p[i]
    kept = {i: kept[i] for i in nucleus}
    p = chances()
    kept = {i: x for i, x in kept.items() if p[i] >= settings["min_p"] * max(p.values())}
    return [kept.get(i, -math.inf) for i in range(len(logits))]


@pytest.mark.parametrize("changed", SETTINGS)
def test_a_choice_is_the_slow_one(changed: dict[str, Any]) -> None:
    """Of 300 rows, each with logits, seed and position of its own."""
    seeds, positions = torch.arange(300) * 0x123456789AB, torch.arange(300) * 3
    rows = torch.stack([logits_of(n) for n in range(300)])
    found = choose(rows, seeds, positions, SEEN, **changed).tolist()
    for n, token in enumerate(found):
        scores = slowly_processed(rows[n, :V].tolist(), SEEN if "repetition_penalty" in changed else [], OFF | changed)
        draws = [x - math.log(-math.log(uniform(int(seeds[n]), 3 * n, i))) for i, x in enumerate(scores)]
        assert draws[token] == max(draws)


@pytest.mark.parametrize("changed", SETTINGS)
def test_chances_are_those_of_transformers(changed: dict[str, Any]) -> None:
    """20,000 draws beside the softmax of what transformers' logits processors leave, in its order: what it takes away never
    comes, and chi-square over the rest is at most five standard deviations above its mean."""
    processors = pytest.importorskip("transformers").generation.logits_process
    settings, draws = OFF | changed, 20_000
    scores = logits_of(4)[None, :V].clone()
    for setting, off, make in (
        ("repetition_penalty", 1.0, processors.RepetitionPenaltyLogitsProcessor),
        ("temperature", 1.0, processors.TemperatureLogitsWarper),
        ("top_k", 0, processors.TopKLogitsWarper),
        ("top_p", 1.0, processors.TopPLogitsWarper),
        ("min_p", 0.0, processors.MinPLogitsWarper),
    ):
        if settings[setting] != off:
            scores = make(settings[setting])(torch.tensor([SEEN]), scores)
    expected = torch.softmax(scores[0], 0) * draws
    found = choose(logits_of(4), torch.full((draws,), 11), torch.arange(draws), SEEN, **changed)
    counts = torch.bincount(found, minlength=V).double()
    possible = expected > 0
    assert not counts[~possible].any()
    freedom = int(possible.sum()) - 1
    chi_square = float(((counts - expected).square() / expected)[possible].sum())
    assert chi_square <= freedom + 5 * math.sqrt(2 * freedom), (chi_square, freedom)
    assert freedom == 0 or chi_square > 0


def test_float32_numbers_of_a_draw_are_exact() -> None:
    """Over 40,000 of them: never infinite, and those of plain integers."""
    seeds, positions = torch.tensor([0, 1, 2**32, 2**63 - 1]), torch.tensor([0, 5, 2**20, 9])
    found = gumbel(seeds, positions, 10_000)
    assert torch.isfinite(found).all()
    for row, column in [(0, 0), (1, 1), (2, 9_999), (3, 4_321)]:
        u = uniform(int(seeds[row]), int(positions[row]), column)
        assert float(found[row, column]) == pytest.approx(-math.log(-math.log(u)), rel=1e-6, abs=1e-6)
    assert len({tuple(row) for row in found[:, :50].tolist()}) == 4, "seeds that differ in their upper half only differ"
    assert 0.0 < (0.0 + 0.5) / 2**23 and torch.tensor((2**23 - 0.5) / 2**23, dtype=torch.float32) < 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_draw_depends_on_seed_and_position_alone(dtype: torch.dtype) -> None:
    """Not on the batch; and with the same logits, not on their precision."""
    logits = logits_of(2, torch.float64)
    logits[V:] = 0
    logits = logits.to(dtype)
    seeds, positions = torch.arange(64), torch.arange(64) % 7
    whole = choose(logits, seeds, positions, temperature=1.3, top_p=0.95)
    alone = [int(choose(logits, seeds[n : n + 1], positions[n : n + 1], temperature=1.3, top_p=0.95)) for n in range(64)]
    assert whole.tolist() == alone == choose(logits.double(), seeds, positions, temperature=1.3, top_p=0.95).tolist()
    assert len(set(alone)) > 3


def test_equals() -> None:
    """Greedily the lowest id; else whoever is as likely as the last one that a filter keeps is kept, too."""
    logits = torch.tensor([1.0, 3.0, 2.0, 3.0, 2.0]).repeat(1, 1)
    padded = torch.full((1, VP), -1.0)
    padded[:, :5] = logits
    one, zero = torch.tensor([1]), torch.tensor([0])
    assert int(choose(padded, one, zero, temperature=0.0)) == 1
    many, positions = torch.arange(500), torch.zeros(500, dtype=torch.int64)
    for settings, kept in (
        ({"temperature": 1e-6}, {1, 3}),
        ({"top_k": 1}, {1, 3}),
        ({"top_k": 3}, {1, 2, 3, 4}),
        ({"top_p": 0.1}, {1, 3}),
        ({"min_p": math.exp(-1.0001)}, {1, 2, 3, 4}),
    ):
        assert set(choose(padded, many, positions, **settings).tolist()) == kept, settings


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_a_row_that_is_not_finite_is_no_token(temperature: float, wrong: float) -> None:
    rows = torch.stack([logits_of(n) for n in range(3)])
    rows[0, V] = wrong  # padding: nobody's business
    rows[1, 4] = wrong
    zeros = torch.zeros(3, dtype=torch.int64)
    found = choose(rows, zeros, zeros, temperature=temperature)
    assert found[1] == -1 and found[[0, 2]].min() >= 0
    assert found[0] == choose(logits_of(0), zeros[:1], zeros[:1], temperature=temperature)


def test_the_chosen_token_is_seen() -> None:
    seen = torch.zeros(2, V, dtype=torch.bool)
    seen[0, 3] = True
    out, zeros = torch.zeros(2, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)
    rows = torch.stack([logits_of(0), logits_of(1)])
    settings = OFF | {"temperature": 0.0, "repetition_penalty": 1.1}
    ops.choose_tokens(out, rows, seen, zeros, zeros, vocab_size=V, **settings)
    assert [row.nonzero().flatten().tolist() for row in seen] == [sorted([3, int(out[0])]), [int(out[1])]]


def test_the_token_that_reaches_p_is_the_last() -> None:
    """With p exactly the sum of the likeliest one or two, the next token is out; with the least more than it, in."""
    scores = torch.tensor([[0.0, -0.5, -1.5, -2.5]], dtype=torch.float64)
    shares = torch.softmax(scores, 1)[0].tolist()
    for kept, total in ((1, shares[0]), (2, shares[0] + shares[1])):
        for p, expected in ((total - 2**-40, kept), (total, kept), (total + 2**-40, kept + 1)):
            assert int(torch.isfinite(filtered(scores, top_k=0, top_p=p, min_p=0.0)).sum()) == expected


def test_top_p_adds_up_integers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums of integers are those of any order: a GPU's running sum of one row has none that is fixed."""
    add_up, added = torch.Tensor.cumsum, []
    monkeypatch.setattr(torch.Tensor, "cumsum", lambda t, dim: added.append(t.dtype) or add_up(t, dim))
    scores = torch.linspace(0, -1, 50_000).view(1, -1)
    left = filtered(scores, top_k=0, top_p=0.5, min_p=0.0)
    assert added == [torch.int64]
    exact = torch.softmax(scores, 1).double()[0]
    assert int(torch.isfinite(left).sum()) == int((add_up(exact, 0) - exact < 0.5).sum())
    assert int(torch.isfinite(filtered(scores, top_k=0, top_p=1e-30, min_p=0.0)).sum()) == 1


def test_top_k_of_all_but_one_drops_the_last() -> None:
    scores = torch.tensor([[0.0, -0.5, -1.5, -2.5]])
    for k, kept in ((1, 1), (3, 3), (4, 4), (5, 4), (0, 4)):
        assert int(torch.isfinite(filtered(scores, top_k=k, top_p=1.0, min_p=0.0)).sum()) == kept
