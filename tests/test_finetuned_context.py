"""A model with rotary positions that is finetuned in short rows keeps the context of its weights."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import handgrad
from handgrad.api.model import load
from handgrad.cli import main
from handgrad.errors import UsageError
from handgrad.evaluation.load import ModelShape, with_context
from handgrad.interop.sources import open_weights
from handgrad.run.open import train
from handgrad.run.settings import run_config
from handgrad.settings.config import RunConfig, check
from handgrad.storage.checkpoint import find
from tests.forging import edit_manifest, lines_of, redo
from tests.interop.models import make_checkpoint

SIZES = (1, 2, 16, 256)
SHORT = {"sequence_length": 32, "tokens_per_step": 64, "micro_batch": 2, "steps": 2, "save_every": 1}
QUIET = {"eval_tokens": 64, "eval_every": 0, "sample_tokens": 0, "device": "cpu"}


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    return make_checkpoint(tmp_path / "weights", "bytes", sizes=SIZES, architecture="llama")[0]


def finetuned(source: Path, shards: Path, out: Path, **more: Any) -> RunConfig:
    config = run_config(
        "", "", "", {"init_from": str(source), "data": str(shards), "out": str(out), **SHORT, **QUIET, **more}
    )
    train(config)
    return config


@pytest.mark.parametrize("adapters", ["", "rank=2"])
def test_it_writes_beyond_its_rows(adapters: str, weights: Path, shards: Path, tmp_path: Path) -> None:
    """Also after a resume, as adapters, and where a further run starts from it; its evaluation has the rows' length."""
    config = finetuned(weights, shards, tmp_path / "run", lora=adapters)
    train(replace(config, steps=3), allow_changes=True)
    model = load(config.out, device="cpu")
    assert model.shape.sequence_length == 256 and find(config.out).step == 3
    assert len(model.generate("the river walks", max_tokens=100, temperature=0, stop=[])) > 32
    assert model.eval_context == 32 and open_weights(config.out).config.sequence_length == 32
    losses = [handgrad.evaluate(model, shards, context=length).loss for length in (0, 32, 64)]
    assert losses[0] == losses[1] != losses[2]
    further = finetuned(Path(config.out), shards, tmp_path / "further")
    assert further.sequence_length == 32 and load(further.out, device="cpu").shape.sequence_length == 256


def test_a_forged_context_is_named(weights: Path, shards: Path, tmp_path: Path, capsys) -> None:
    """The rotary positions reach as far as it says, so the chain has it."""
    run = tmp_path / "run"
    finetuned(weights, shards, run, audit_every=1, keep_checkpoints=0)
    assert main(["verify", str(run)]) == 0
    edit_manifest(run / "checkpoints" / "step_00000002", lambda content: content["init"].update(context=512))
    redo(run, lines_of(run))
    assert main(["verify", str(run)]) == 65
    assert "its manifest has init.context 512, the chain 256" in capsys.readouterr().err


def test_positions_that_are_weights_end_with_the_rows(shards: Path, tmp_path: Path) -> None:
    source, _ = make_checkpoint(tmp_path / "weights", "bytes", sizes=SIZES)
    config = finetuned(source, shards, tmp_path / "run")
    assert load(config.out, device="cpu").shape.sequence_length == 32
    assert "context" not in find(config.out).manifest["init"]


@pytest.mark.parametrize(
    "found", [None, {}, {"context": "256"}, {"context": 8}, {"context": True}, {"context": 1 << 60}, []]
)
def test_a_manifest_of_another_form_keeps_the_rows(found: Any) -> None:
    shape = ModelShape(257, 32, *SIZES[:3])
    assert with_context(shape, found) == shape
    assert with_context(shape, {"context": 64}).sequence_length == 64


def test_more_than_the_weights_have_is_refused(weights: Path, shards: Path, tmp_path: Path) -> None:
    config = finetuned(weights, shards, tmp_path / "run")
    longer = replace(config, init_from=config.out, out=str(tmp_path / "longer"), sequence_length=512, tokens_per_step=1024)
    with pytest.raises(UsageError, match="at most the 256 positions of"):
        train(check(longer))
