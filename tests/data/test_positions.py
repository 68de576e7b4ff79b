"""Runs that stop where the data turns: at the end of a shard, at the end of an epoch, between two micro-batches."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from handgrad.data.batches import Batches
from handgrad.data.shards import open_dataset
from handgrad.run.open import train
from handgrad.settings.config import RunConfig
from handgrad.training.feed import BatchFeed
from handgrad.training.step import TrainStep
from tests.test_runs import elsewhere, same_bits

STEPS, PER_STEP, MICRO_BATCH = 12, 8, 4  # samples
SHARDS, WINDOWS = 3, 16  # of each shard: two steps, so that an epoch is six


@pytest.fixture
def run(config: RunConfig, make_dataset: Callable) -> RunConfig:
    """A run of two epochs whose shards end where steps end."""
    length = config.sequence_length
    tokens = [np.random.default_rng(seed).integers(0, 256, WINDOWS * length + 1) for seed in range(SHARDS + 1)]
    data = make_dataset([shard.astype(np.uint16) for shard in tokens[:-1]], [tokens[-1].astype(np.uint16)])
    assert config.tokens_per_step // config.sequence_length == PER_STEP and config.micro_batch == MICRO_BATCH
    return dataclasses.replace(config, data=str(data), save_every=1, keep_checkpoints=2, eval_every=0, sample_tokens=0)


def samples_taken(patch: pytest.MonkeyPatch, stops: list[int]) -> list[int]:
    """The samples of all steps that a run makes. Where its next number comes up among the `stops`, it is interrupted."""
    taken: list[int] = []
    fill, begin = BatchFeed.fill, TrainStep.begin

    def filling(feed: BatchFeed, first: int) -> None:
        if stops and first >= stops[0]:
            stops.pop(0)
            raise KeyboardInterrupt
        fill(feed, first)
        taken.extend(range(first, first + MICRO_BATCH))

    def beginning(training: TrainStep, step: int) -> None:
        del taken[step * PER_STEP :]  # of a step that was not finished
        begin(training, step)

    patch.setattr(BatchFeed, "fill", filling)
    patch.setattr(TrainStep, "begin", beginning)
    return taken


@pytest.mark.fault(18)
def test_stopped_where_the_data_turns(run: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = elsewhere(run, "whole")
    with monkeypatch.context() as patch:
        expected = samples_taken(patch, [])
        train(whole)
    assert expected == list(range(STEPS * PER_STEP))
    places = [Batches(open_dataset(run.data).splits["train"], run.sequence_length, run.seed).locate(i) for i in expected]
    epochs = places[: len(places) // 2], places[len(places) // 2 :]
    assert all(len(set(epoch)) == SHARDS * WINDOWS for epoch in epochs), "every window once in an epoch"
    turns = {"shard": 2 * PER_STEP, "epoch": 6 * PER_STEP, "micro-batch": 9 * PER_STEP + MICRO_BATCH}
    assert places[turns["shard"] - 1][0] != places[turns["shard"]][0]
    stops = sorted(turns.values())
    with monkeypatch.context() as patch:
        taken = samples_taken(patch, stops)
        for _ in turns:
            with pytest.raises(KeyboardInterrupt):
                train(run)
        train(run)
    assert taken == expected and not stops
    same_bits(whole.out, run.out, STEPS)
    assert sorted(path.name for path in Path(run.out, "checkpoints").iterdir()) == ["step_00000011", "step_00000012"]
