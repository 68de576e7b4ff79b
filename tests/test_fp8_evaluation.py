"""Runs in fp8 evaluated afterwards: in 16 bits with their own weights, in fp8 to the bit as they validated."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from handgrad.cli import main
from handgrad.commands import evaluate
from handgrad.data.prepare import PrepareOptions, prepare
from handgrad.evaluation import loss as losses
from handgrad.evaluation.load import load_model
from handgrad.interop.sources import open_weights
from handgrad.ops import reference
from handgrad.run.open import train
from handgrad.settings.config import RunConfig
from handgrad.training.state import TrainingState
from tests.conftest import small_run
from tests.test_commands import refused
from tests.test_fp8_saturation import moved_to_bf16
from tests.test_runs import records

BASE = {"precision": "fp8", "steps": 4, "eval_every": 2, "eval_tokens": 1024, "sample_tokens": 0, "fp8_window": 2}
KINDS: dict[str, dict] = {
    "gpt2": {},
    "head": {"fp8_head": "forward,dgrad,wgrad", "recompute": 2},
    "head backward": {"fp8_head": "dgrad"},
    "kept": {"fp8_keep_bf16": "0.mlp,proj"},
    "current": {"fp8_scaling": "current", "fp8_margin": 1},
    "without masters": {"master_weights": False},
    "modern": {"architecture": "modern", "fp8_head": "forward"},
    "moved": {"fp8_keep_bf16": "1.mlp"},
}


@pytest.fixture
def losses_found(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Of every evaluation by the command, with all digits."""
    found: list[float] = []

    def noting(*arguments, **settings):
        held_out = losses.held_out_loss(*arguments, **settings)
        found.append(held_out.loss)
        return held_out

    monkeypatch.setattr(evaluate, "held_out_loss", noting)
    return found


@pytest.fixture
def run(config: RunConfig) -> RunConfig:
    return dataclasses.replace(config, **BASE)


def evaluated(run: RunConfig, *more: str) -> list[str]:
    return ["evaluate", run.out, "--eval-tokens", str(run.eval_tokens), "--micro-batch", str(run.micro_batch), *more]


@pytest.mark.nightly(but=["current", "moved", "modern", "head"])
@pytest.mark.parametrize("kind", KINDS)
def test_in_fp8_the_loss_is_the_runs_own(kind: str, run: RunConfig, losses_found: list[float]) -> None:
    """To the bit; in bf16 it is another one."""
    run = dataclasses.replace(run, **KINDS[kind])
    train(run)
    if kind == "moved":
        moved_to_bf16(run, run.steps, "1.mlp")
    assert main(evaluated(run, "--precision", "fp8")) == 0
    assert main(evaluated(run, "--precision", "bf16", "--backend", "reference")) == 0
    in_fp8, in_bf16 = losses_found
    assert in_fp8 == records(run.out, ("validation",))[-1]["loss"]
    assert in_bf16 != in_fp8 and abs(in_bf16 / in_fp8 - 1) < 0.05


def test_windows_and_micro_batches_may_be_others(run: RunConfig, losses_found: list[float]) -> None:
    """A forward pass sums over no tokens: no side of it is asked to be a multiple of 16."""
    train(run)
    for batch, context in ((1, 7), (3, 32), (4, 32)):
        words = ["--precision", "fp8", "--micro-batch", str(batch), "--context", str(context)]
        assert main(evaluated(run, *words)) == 0
    assert abs(losses_found[1] / losses_found[2] - 1) < 1e-5


def test_within_documents(shards: Path, tmp_path: Path, losses_found: list[float]) -> None:
    texts = tmp_path / "texts.jsonl"
    texts.write_text("".join(json.dumps({"text": "the old river " * (n % 5 + 1)}) + "\n" for n in range(200)))
    prepare(PrepareOptions(str(texts), tmp_path / "bytes", tokenizer="bytes", validation_fraction=0.2, workers=1))
    run = dataclasses.replace(small_run(shards, tmp_path / "run"), **BASE, data=str(tmp_path / "bytes"), packing="masked")
    train(run)
    assert main(evaluated(run, "--precision", "fp8")) == 0
    assert losses_found == [records(run.out, ("validation",))[-1]["loss"]]


@pytest.mark.parametrize("masters", [True, False])
def test_in_bf16_the_weights_are_those_that_the_run_quantised(
    run: RunConfig, masters: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checkpoint's, rounded to bf16, have the bits of the run's 16-bit weights; in fp32 they are the master weights."""
    states: list[TrainingState] = []
    make = TrainingState.__init__
    monkeypatch.setattr(TrainingState, "__init__", lambda state, **parts: (make(state, **parts), states.append(state))[0])
    train(dataclasses.replace(run, master_weights=masters))
    state = states[-1]
    for dtype, expected in ((torch.bfloat16, state.parameters), (torch.float32, state.master.float())):
        found = load_model(open_weights(run.out), torch.device("cpu"), dtype, reference, [])
        assert torch.equal(found.views["parameters"], expected)
    assert torch.equal(state.parameters, state.master.bfloat16())


def test_what_has_no_scales_is_refused(run: RunConfig, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    train(dataclasses.replace(run, precision="bf16"))
    line = refused(capsys, 64, *evaluated(run, "--precision", "fp8"))
    assert "has no fp8 scales: expected a checkpoint of a run in fp8; use --precision bf16" in line
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text('{"text": "the river"}\n')
    line = refused(capsys, 64, "evaluate", run.out, "--tasks", f"lambada={tasks}", "--precision", "fp8")
    assert "tasks are scored in 16 bits, found --precision fp8; use bf16, or leave out --tasks" in line
