"""Held-out loss counts every sample once, of complete weights; bits are no nats."""

import dataclasses
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import handgrad
from handgrad.cli import main
from handgrad.commands import evaluate
from handgrad.data.batches import Batches
from handgrad.data.shards import open_dataset
from handgrad.errors import UsageError
from handgrad.evaluation import loss
from handgrad.evaluation.loss import HeldOut, bits_per_byte, floor_note, held_out_loss, mean_loss
from handgrad.models import compute_losses
from handgrad.ops import reference as ops
from handgrad.run import evaluating, loop
from handgrad.run.assemble import Assembly
from handgrad.run.open import open_run, train
from handgrad.settings.config import ModelShape, RunConfig
from handgrad.training.step import TrainStep
from tests.conftest import make_model
from tests.test_runs import records


def test_the_loss_does_not_depend_on_the_micro_batch(shards: Path) -> None:
    """Six samples in micro-batches of 4, 1 and 6: the padding of the last one does not count."""
    batches = Batches(open_dataset(shards).splits["validation"], 16, 0, shuffle=False)
    found = []
    for batch in (4, 1, 6):
        model = make_model(ModelShape(257, 16, 2, 2, 32), batch, 16)
        found.append(mean_loss(model.shape, ops, model.weights, model.act, batches, samples=6))
    assert max(found) - min(found) < 1e-12


def test_a_long_evaluation_gives_signs_of_life(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """On stderr, of the loss as of tasks; a short one is silent, and stdout is the same."""
    train(config)
    capsys.readouterr()
    assert main(["evaluate", config.out, "--device", "cpu"]) == 0
    quiet = capsys.readouterr()
    monkeypatch.setattr(evaluate, "PROGRESS_SECONDS", 0.0)
    assert main(["evaluate", config.out, "--device", "cpu", "--micro-batch", "8"]) == 0
    told = capsys.readouterr()
    assert not quiet.err and told.out == quiet.out
    shares = re.findall(r"^loss: (\d+)%, [\d,]+ positions/s$", told.err, re.MULTILINE)
    assert len(shares) > 1 and shares[-1] == "100" and shares == sorted(shares, key=int)


def test_the_mean_is_over_the_samples_that_were_asked_for(shards: Path) -> None:
    """Each sample's loss by itself, their mean, and what a held-out loss says of them; no more than there are."""
    dataset = open_dataset(shards)
    batches = Batches(dataset.splits["validation"], 16, 0, shuffle=False)
    model, alone = make_model(ModelShape(257, 16, 2, 2, 32), 1, 16), []
    for sample in range(5):
        batches.fill(model.act.tokens, model.act.targets, sample)
        compute_losses(model.ops, model.weights, model.act, model.shape)
        alone.append(float(model.act.losses.mean()))
    assert len(set(alone)) == 5
    many = make_model(ModelShape(257, 16, 2, 2, 32), 2, 16)
    for samples in (1, 4, 5):
        found = mean_loss(many.shape, ops, many.weights, many.act, batches, samples=samples)
        assert found == pytest.approx(sum(alone[:samples]) / samples, rel=1e-12)
    held_out = held_out_loss(many.shape, ops, many.weights, many.act, dataset, eval_tokens=5 * 16 + 15)
    assert held_out.loss == pytest.approx(sum(alone) / 5, rel=1e-12) and held_out.tokens == 80
    assert held_out.perplexity == pytest.approx(math.exp(held_out.loss))
    windows = batches.samples_per_epoch
    whole = mean_loss(many.shape, ops, many.weights, many.act, batches, samples=windows)
    assert mean_loss(many.shape, ops, many.weights, many.act, batches, samples=windows + 3) == whole
    asked = held_out_loss(many.shape, ops, many.weights, many.act, dataset, eval_tokens=(windows + 3) * 16)
    assert (asked.loss, asked.tokens) == (whole, windows * 16)


@pytest.mark.parametrize("stride", [1, 5, 8])
def test_overlapping_windows_score_their_last_tokens(shards: Path, stride: int) -> None:
    """Against a forward per window, whose losses are picked by hand: each token's where it first has the context."""
    dataset = open_dataset(shards)
    tokens = dataset.splits["validation"][0].tokens
    one, direct = make_model(ModelShape(257, 16, 2, 2, 32), 1, 16), []
    for start in range(0, 7 * stride, stride):
        one.act.tokens[0] = torch.from_numpy(tokens[start : start + 16].astype(np.int64))
        one.act.targets[0] = torch.from_numpy(tokens[start + 1 : start + 17].astype(np.int64))
        compute_losses(one.ops, one.weights, one.act, one.shape)
        losses = one.act.losses.view(-1).tolist()
        direct += losses[-stride:] if start else losses
    asked = len(direct) + stride - 1
    for micro_batch in (1, 3, 7):
        many = make_model(one.shape, micro_batch, 16)
        found = held_out_loss(many.shape, ops, many.weights, many.act, dataset, eval_tokens=asked, eval_stride=stride)
        assert found.loss == pytest.approx(sum(direct) / len(direct), rel=1e-12)
        assert found.tokens == len(direct) == 16 + 6 * stride


def test_a_stride_of_a_window_is_none(shards: Path) -> None:
    """The same bits as windows side by side; a stride above the window is refused."""
    dataset, many = open_dataset(shards), make_model(ModelShape(257, 16, 2, 2, 32), 4, 16)
    given = many.shape, ops, many.weights, many.act, dataset
    assert held_out_loss(*given, eval_tokens=160, eval_stride=16) == held_out_loss(*given, eval_tokens=160)
    refusal = "eval_stride must be at most context = 16, found 17; try --eval-stride 8, half a window"
    with pytest.raises(UsageError, match=f"^{re.escape(refusal)}$"):
        held_out_loss(*given, eval_stride=17)


def test_the_stride_belongs_to_the_validations(config: RunConfig, capsys: pytest.CaptureFixture) -> None:
    """A run resumes under another; nothing but the validations changes; `evaluate` takes the run's by default."""
    config = dataclasses.replace(config, eval_tokens=100_000)
    plain, other = (dataclasses.replace(config, out=f"{config.out}-{name}") for name in ("plain", "other"))
    train(plain)
    with open_run(dataclasses.replace(other, eval_stride=8)) as stopped:
        stopped.begin()
        stopped.advance(8)
    train(dataclasses.replace(other, eval_stride=16))
    for kind, key in (("step", "loss"), ("step", "norm")):
        assert [r[key] for r in records(plain.out, (kind,))] == [r[key] for r in records(other.out, (kind,))]
    side_by_side, overlapping = (records(out, ("validation",)) for out in (plain.out, other.out))
    assert [r["step"] for r in side_by_side] == [r["step"] for r in overlapping] == [6, 12]
    assert all(r["loss"] != o["loss"] for r, o in zip(side_by_side, overlapping, strict=True))
    sizes = {"micro_batch": config.micro_batch, "device": "cpu"}
    theirs, none, eight = (
        handgrad.evaluate(other.out, **sizes, **given) for given in ({}, {"eval_stride": 0}, {"eval_stride": 8})
    )
    assert (theirs.loss, none.loss) == (overlapping[1]["loss"], side_by_side[1]["loss"])
    assert eight.loss not in (theirs.loss, none.loss) and eight.tokens >= theirs.tokens >= none.tokens
    for flags, found, apart in (([], theirs, ", windows of 32 every 16\n"), (["--eval-stride", "0"], none, "\n")):
        capsys.readouterr()
        assert main(["evaluate", other.out, "--device", "cpu", "--micro-batch", "4", *flags]) == 0
        shown = capsys.readouterr().out
        assert (
            f"{found.loss:.4f} nats" in shown and f"tokens {found.tokens} of" in shown and f"{config.data}{apart}" in shown
        )
    capsys.readouterr()
    assert main(["evaluate", other.out, "--device", "cpu", "--eval-stride", "33"]) == 64
    assert capsys.readouterr().err.startswith("handgrad: eval_stride must be at most context = 32, found 33; try")
    short = ["evaluate", other.out, "--device", "cpu", "--context", "8"]  # less than the run's stride
    assert main(short) == 64
    assert capsys.readouterr().err.endswith("at most context = 8, found 16; try --eval-stride 4, half a window\n")
    assert main([*short, "--eval-stride", "4"]) == 0
    with pytest.raises(UsageError, match="eval_stride must be at most sequence_length = 32, found 33"):
        train(dataclasses.replace(plain, eval_stride=33))
    with pytest.raises(UsageError, match="--eval-stride must be 0 or more"):
        handgrad.evaluate(other.out, eval_stride=-1)


def test_a_loss_that_is_not_finite_is_an_error(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    train(dataclasses.replace(config, steps=1, warmup_steps=0))
    broken = HeldOut(math.nan, math.nan, None, 512)
    monkeypatch.setattr(evaluate, "held_out_loss", lambda *given, **named: broken)
    capsys.readouterr()
    assert main(["evaluate", config.out, "--device", "cpu"]) == 76
    assert "loss is not finite: its weights have diverged; use an earlier" in capsys.readouterr().err


def test_bits_per_byte(shards: Path) -> None:
    """Of bytes, a token each, ln 2 nats a token are one bit a byte; end-of-text is a token without a byte."""
    dataset = open_dataset(shards)
    tokens = dataset.splits["validation"][0].tokens
    text_bytes = int((tokens < 256).sum())
    assert len(dataset.splits["validation"]) == 1 and text_bytes < len(tokens)
    assert bits_per_byte(math.log(2), dataset) == pytest.approx(len(tokens) / text_bytes)
    assert bits_per_byte(3.0, dataset) == pytest.approx(3 / math.log(2) * len(tokens) / text_bytes)


def test_the_distance_from_a_known_entropy(shards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = open_dataset(shards)
    assert floor_note(2.2, dataset) == "", "nobody knows that of a text"
    monkeypatch.setattr(type(dataset), "floor", lambda dataset, split: 2.0)
    assert floor_note(2.2, dataset) == " (+10.0% above the source's entropy of 2.0000)"


@pytest.mark.parametrize(("eval_tokens", "samples"), [(5 * 32 + 31, 5), (32, 1), (31, 1)])
def test_a_validation_takes_whole_contexts_of_complete_weights(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch, eval_tokens: int, samples: int
) -> None:
    """After a step the run awaits the weights that other ranks send, before it validates and before it writes a sample."""
    events: list[str] = []
    for owner, name in ((TrainStep, "finish"), (Assembly, "await_weights")):
        original = getattr(owner, name)
        noting = lambda *given, name=name, original=original: (events.append(name), original(*given))[1]  # noqa: E731
        monkeypatch.setattr(owner, name, noting)

    def validated(*given: Any, samples: int, **more: Any) -> float:
        events.append(f"{samples} samples")
        return 1.0

    monkeypatch.setattr(loss, "mean_loss", validated)
    monkeypatch.setattr(evaluating, "write_document", lambda *given, **more: events.append("text") or "")
    monkeypatch.setattr(loop.Run, "save", lambda run: setattr(run.saves, "last_saved", run.completed))
    train(dataclasses.replace(config, steps=2, eval_every=1, sample_every=1, eval_tokens=eval_tokens))
    step = ["finish", "await_weights", f"{samples} samples", "await_weights", "text"]
    assert events == step * 2
