"""Loss and gradient of a step are means over its trained tokens, in any number of micro-batches and lanes. One without any
makes no update."""

import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from benchmarks.twin import Twin
from handgrad.joins.parallel.ranks import Ranks
from handgrad.run.assemble import Assembly, assemble
from handgrad.run.resolve import resolve
from handgrad.run.step_check import checked_result
from handgrad.settings.config import RunConfig
from handgrad.training.step import NOTHING_TRAINED, TrainStep

VOCABULARY = 61


class Answers:
    """Samples of two documents each; of the targets every third is trained, of the samples in `silent` none."""

    def __init__(self, length: int, silent: range = range(0)):
        self.length, self.silent = length, silent

    def sample(self, number: int) -> tuple[Tensor, Tensor, Tensor]:
        words = torch.from_numpy(np.random.default_rng(number).integers(0, VOCABULARY, self.length + 1))
        border = 1 + number % (self.length - 1)
        places = torch.arange(self.length)
        targets = words[1:].where((places % 3 == number % 3) & (places != border - 1), -1)
        starts = torch.where(places < border, 0, border)
        return words[:-1], torch.full_like(targets, -1) if number in self.silent else targets, starts

    def fill(self, inputs: Tensor, targets: Tensor, first_sample: int, document_starts: Tensor | None = None) -> None:
        for row in range(len(inputs)):
            inputs[row], targets[row], starts = self.sample(first_sample + row)
            if document_starts is not None:
                document_starts[row] = starts

    def trained_tokens(self, first_sample: int, samples: int) -> int:
        return sum(int((self.sample(number)[1] >= 0).sum()) for number in range(first_sample, first_sample + samples))


@pytest.fixture
def packed(config: RunConfig) -> RunConfig:
    return replace(config, packing="masked", lanes=1, precision="fp32", warmup_steps=0, clip_norm=0.0)


def assembled(config: RunConfig, source: Answers) -> Assembly:
    return assemble(resolve(config, VOCABULARY), source, trained_tokens=source.trained_tokens)


def by_autograd(training: Assembly, source: Answers, samples: int) -> tuple[float, float]:
    """(mean loss over the trained tokens, norm of its gradient), in float64, every document alone."""
    twin = Twin(training.design.shape, padded=True).double()
    twin.load(training.design.parameters, training.state.parameters.double())
    total = torch.zeros((), dtype=torch.float64)
    for number in range(samples):
        tokens, targets, starts = source.sample(number)
        for start in starts.unique():
            own = targets[starts == start]
            if (own >= 0).any():
                total = total + twin(tokens[starts == start][None], own.where(own >= 0, -100)[None]) * (own >= 0).sum()
    loss = total / source.trained_tokens(0, samples)
    loss.backward()
    squares = sum((twin.parameter_of(row).grad ** 2).sum() for row in training.design.parameters)  # type: ignore[operator]
    return loss.item(), math.sqrt(squares)


@pytest.mark.parametrize(("micro_batch", "lanes", "recompute"), [(8, 1, 0), (2, 1, 2), (1, 4, 1)])
def test_means_are_over_trained_tokens(packed: RunConfig, micro_batch: int, lanes: int, recompute: int) -> None:
    config = replace(packed, micro_batch=micro_batch, lanes=lanes, recompute=recompute)
    source = Answers(config.sequence_length)
    training = assembled(config, source)
    loss, norm = by_autograd(training, source, config.tokens_per_step // config.sequence_length)
    result = training.stepper.step(0)
    assert result.trained_tokens == source.trained_tokens(0, 8) < config.tokens_per_step / 2
    assert result.loss == pytest.approx(loss, rel=1e-5) and result.norm == pytest.approx(norm, rel=1e-4)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16", "fp8"])
def test_a_step_without_a_trained_token_changes_nothing(
    packed: RunConfig, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = replace(packed, precision=precision, channels=64)
    source = Answers(config.sequence_length, silent=range(8, 16))  # the second step's
    training = assembled(config, source)
    monkeypatch.setattr(TrainStep, "relaunch", lambda step, number: pytest.fail("it is no fault of the hardware"))
    training.stepper.step(0)
    before = [tensor.clone() for tensor in states(training)]
    result, fault = checked_result(training, Ranks(), 1, training.stepper.step(1))
    assert (result.skipped, result.loss, result.norm, result.trained_tokens, fault) == (NOTHING_TRAINED, 0.0, 0.0, 0, "")
    assert all(torch.equal(a, b) for a, b in zip(before, states(training), strict=True))
    after = training.stepper.step(2)
    assert after.skipped is None and not torch.equal(before[0], training.state.master)
    assert len(training.stepper.loss_window.values) == 2, "the window of losses has no zero"


def states(training: Assembly) -> Iterator[Tensor]:
    yield training.state.master
    yield training.state.parameters
    yield from training.state.optimizer.values()
    yield training.state.loss_scale


def test_a_run_that_trains_every_token_ends_at_a_target_below_zero(packed: RunConfig) -> None:
    with pytest.raises(AssertionError, match="a target is below 0"):
        assemble(resolve(packed, VOCABULARY), Answers(packed.sequence_length)).stepper.step(0)


def test_overfitting_reads_the_same_samples(packed: RunConfig) -> None:
    config = replace(packed, overfit_one_batch=True, learning_rate=2e-2, schedule="constant")
    source = Answers(config.sequence_length)
    training = assembled(config, source)
    results = [training.stepper.step(step) for step in range(60)]
    assert {result.trained_tokens for result in results} == {source.trained_tokens(0, 8)}
    assert results[-1].loss < 0.1 < results[0].loss
