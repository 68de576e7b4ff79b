"""Scoring in batches gives what one request at a time gives, in whatever batches, by however many ranks."""

import dataclasses
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from handgrad.evaluation.likelihoods import Likelihoods, Request, Workload, make_batches
from handgrad.joins.parallel.ranks import Ranks
from handgrad.memory.arena import make_plan
from handgrad.models import gpt2
from handgrad.models.passes import run
from handgrad.ops import reference as ops
from handgrad.settings.config import ModelShape
from tests.conftest import Model, make_model

SHAPE = ModelShape(37, 40, 2, 2, 16)
CPU = torch.device("cpu")


def score(
    ops: ModuleType,
    weights: Any,
    requests: Sequence[Request],
    shape: ModelShape,
    dtype: torch.dtype,
    device: torch.device,
    *,
    positions_per_batch: int,
) -> Likelihoods:
    """The likelihoods of `requests`, in memory of their own."""
    work = Workload(requests, shape, dtype, ops, device, positions_per_batch=positions_per_batch, ranks=Ranks())
    views = make_plan([*work.activation_buffers(), *work.buffers()]).allocate(device)
    return work.score(weights, views)


def some_requests(count: int = 23, seed: int = 0) -> list[Request]:
    """Short ones, one that scores all but its first token, one of exactly the context, two longer than it."""
    random = np.random.default_rng(seed)
    sizes = [2, 3, 16, 17, 18, 40, 41, 42, 60, *random.integers(2, 45, count - 9).tolist()]
    requests = []
    for number, size in enumerate(sizes):
        scored = min(size - 1, 40) if number in (1, 7) else int(random.integers(1, min(size, 12)))
        requests.append(Request(random.integers(0, SHAPE.vocab_size, size).astype(np.uint16), scored))
    return requests


def one_by_one(model: Model, requests: Sequence[Request]) -> Likelihoods:
    """The slow way: the whole forward for a request alone, the softmax over the real vocabulary, its tokens' sum."""
    sums, greedy = [], []
    for request in requests:
        ids = torch.from_numpy(request.tokens.astype(np.int64))[-(SHAPE.sequence_length + 1) :]
        alone = make_model(SHAPE, 1, len(ids) - 1)
        alone.act.tokens.copy_(ids[:-1])
        run(gpt2.forward(ops, model.weights, alone.act, SHAPE))
        log_p = torch.log_softmax((alone.act.lnf @ model.weights.wte.t())[:, : SHAPE.vocab_size], 1)[-request.scored :]
        targets = ids[-request.scored :]
        sums.append(float(log_p.gather(1, targets.unsqueeze(1)).sum()))
        greedy.append(bool((log_p.argmax(1) == targets).all()))
    return Likelihoods(np.array(sums), np.array(greedy))


@pytest.fixture(scope="module")
def model() -> Model:
    return make_model(SHAPE, 1, 40)


def likely(model: Model, requests: Sequence[Request]) -> list[Request]:
    """The requests, every other one ending in the token that the model finds likeliest there."""
    chosen = []
    for number, request in enumerate(requests):
        tokens = request.tokens.copy()
        if number % 2:
            ids = torch.from_numpy(tokens.astype(np.int64))[-(SHAPE.sequence_length + 1) :]
            alone = make_model(SHAPE, 1, len(ids) - 1)
            alone.act.tokens.copy_(ids[:-1])
            run(gpt2.forward(ops, model.weights, alone.act, SHAPE))
            tokens[-1] = int((alone.act.lnf[-1] @ model.weights.wte.t())[: SHAPE.vocab_size].argmax())
            request = Request(tokens, 1)
        chosen.append(request)
    return chosen


def test_padding_of_the_vocabulary_is_never_the_likeliest() -> None:
    """Its logits are 0, and here those of all tokens are negative."""
    model = make_model(SHAPE, 1, 40)
    model.weights.lnf_weight.zero_()
    model.weights.lnf_bias.fill_(1.0)
    model.weights.wte[: SHAPE.vocab_size] = -torch.arange(1.0, SHAPE.vocab_size + 1)[:, None] / 100
    found = score(ops, model.weights, [Request(np.array([3, 0]), 1)], SHAPE, torch.float64, CPU, positions_per_batch=40)
    assert found.greedy.tolist() == [True]


def test_a_cap_on_the_logits_counts() -> None:
    """The modern network's, in the sum over the vocabulary as in training."""
    shape = dataclasses.replace(SHAPE, architecture="modern", channels=32)
    model, request = make_model(shape, 1, 5), Request(np.array([1, 5, 9, 2, 30, 7]), 4)
    assert shape.softcap
    model.weights.head.mul_(30)
    model.act.tokens.copy_(torch.from_numpy(request.tokens[:-1])[None])
    model.forward()
    logits = (model.act.lnf @ model.weights.head.t())[:, : shape.vocab_size]
    log_p = torch.log_softmax(shape.softcap * torch.tanh(logits / shape.softcap), 1)[-4:]
    expected = log_p.gather(1, torch.from_numpy(request.tokens[-4:])[:, None]).sum().item()
    found = score(ops, model.weights, [request], shape, torch.float64, CPU, positions_per_batch=40)
    assert found.sums[0] == pytest.approx(expected, rel=1e-12)
    assert logits.abs().max() > shape.softcap, "it changes them"


@pytest.mark.parametrize(("positions", "chunk"), [(40, 0), (100, 7), (1 << 20, 0)])
def test_batches_score_like_single_requests(model: Model, positions: int, chunk: int) -> None:
    """Batches of one and of many, the head in one piece and in pieces of 7 rows; float64, so only the order of sums
    differs: 1e-11 is 100 times what 40 terms of magnitude 10 can lose."""
    requests = likely(model, some_requests())
    work = Workload(
        requests, SHAPE, torch.float64, ops, CPU, positions_per_batch=positions, ranks=Ranks(), head_chunk=chunk
    )
    views = make_plan([*work.activation_buffers(), *work.buffers()]).allocate(CPU)
    for view in views.values():  # nothing is read that was not written
        view.fill_(float("nan") if view.is_floating_point() else 1)
    expected = one_by_one(model, requests)
    for _ in range(2):  # the same memory serves again
        found = work.score(model.weights, views)
        assert np.abs(found.sums - expected.sums).max() < 1e-11
        assert (found.greedy == expected.greedy).all() and 0 < found.greedy.sum() < len(requests)


class Together(Ranks):
    """One of several ranks in one process: `all_gather_objects` gives back what all of them have told."""

    def __init__(self, rank: int, size: int, told: list):
        super().__init__(rank=rank, size=size)
        self.told = told

    def all_gather_objects(self, mine, operation):
        self.told[self.rank] = mine
        return self.told


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ranks_share_the_same_batches(dtype: torch.dtype) -> None:
    """Equal, bit by bit, for 1, 2 and 4 ranks, and for more ranks than batches."""
    requests = some_requests(60)
    weights = make_model(SHAPE, 1, 1, dtype).weights
    alone = score(ops, weights, requests, SHAPE, dtype, CPU, positions_per_batch=128)
    assert np.isfinite(alone.sums).all()
    for size in (2, 4, 40):
        told: list = [None] * size
        for rank in reversed(range(size)):  # the first rank hears the others
            ranks = Together(rank, size, told)
            work = Workload(requests, SHAPE, dtype, ops, CPU, positions_per_batch=128, ranks=ranks)
            views = make_plan([*work.activation_buffers(), *work.buffers()]).allocate(CPU)
            if rank:
                with pytest.raises(TypeError):  # it does not know the others yet
                    work.score(weights, views)
            else:
                found = work.score(weights, views)
        assert (found.sums == alone.sums).all() and (found.greedy == alone.greedy).all()


def test_batches_hold_every_request_once_within_the_bound() -> None:
    requests = some_requests(60)
    batches = make_batches(requests, 40, 128)
    assert sorted(n for batch in batches for n in batch.requests) == list(range(60))
    assert all((batch.positions <= 128 and batch.length % 16 == 0) or batch.length == 40 for batch in batches)
    lengths = [batch.length for batch in batches]
    assert lengths == sorted(lengths, reverse=True)
    for batch in batches:
        assert all(min(len(requests[n].tokens) - 1, 40) <= batch.length for n in batch.requests)


def test_what_is_scored_must_fit_the_context() -> None:
    with pytest.raises(AssertionError, match="scores 41 of 50"):
        make_batches([Request(np.zeros(50, np.uint16), 41)], 40, 128)
