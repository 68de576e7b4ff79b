"""Runs that start from weights, wherever those are, also with fewer positions."""

import dataclasses
import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor

from handgrad.cli import main
from handgrad.data.prepare import PrepareOptions, prepare
from handgrad.evaluation.load import checkpoint_weights, load_model
from handgrad.generation.decode import decode_buffers
from handgrad.interop.export import logits
from handgrad.ops import cpu
from handgrad.run.open import train
from handgrad.settings import recipes
from handgrad.settings.config import read_toml
from handgrad.storage import checkpoint
from tests.conftest import small_run, write_text
from tests.test_commands import refused
from tests.test_runs import interrupt_at, records, same_bits, tensors

ODD = {"num_layers": 3, "num_heads": 3, "channels": 33, "sequence_length": 37, "tokens_per_step": 148, "micro_batch": 2}
SIZES = ("num_layers", "num_heads", "channels", "sequence_length")


@dataclasses.dataclass
class Trained:
    """A run of odd sizes, exported; and what its weights are worth."""

    data: str
    run: Path
    folder: Path  # of transformers
    loss: float  # on the validation split


@pytest.fixture(scope="module")
def trained(shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    root = tmp_path_factory.mktemp("trained")
    config = dataclasses.replace(small_run(shards, root / "run"), **ODD)
    train(config)
    assert main(["export", str(root / "run"), "--to", "hf", str(root / "hf")]) == 0
    return Trained(str(shards), root / "run", root / "hf", records(root / "run", ("validation",))[-1]["loss"])


def start(trained: Trained, source: str | Path, out: Path, *more: str) -> list[str]:
    """`handgrad train` of one step that moves nothing, without a word of the model's sizes."""
    settings = {"data": trained.data, "out": str(out), "init-from": str(source), "steps": "1", "learning-rate": "0"}
    settings |= {"tokens-per-step": "148", "micro-batch": "2", "eval-tokens": "512", "sample-tokens": "0", "device": "cpu"}
    return ["train", *(part for name, value in settings.items() for part in (f"--{name}", value)), *more]


def as_named(kind: str, trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The trained weights as a user would name them."""
    if kind == "imported":
        assert main(["import", str(trained.folder), "--out", str(tmp_path / "imported")]) == 0
    if kind == "llm.c":
        assert main(["export", str(trained.run), "--to", "llmc", str(tmp_path / "llmc")]) == 0
    if kind == "hub":

        def download(name: str, allow_patterns: list[str]) -> str:
            """The Hub of one model: its files that were asked for, in a cache."""
            assert name == "someone/model"
            cache = tmp_path / "cache"
            cache.mkdir(exist_ok=True)
            for pattern in allow_patterns:
                for path in trained.folder.glob(pattern):
                    shutil.copy(path, cache)
            return str(cache)

        monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    return {
        "run": str(trained.run),
        "checkpoint": str(trained.run / "checkpoints" / "step_00000012"),
        "best": str(trained.run / "best"),
        "hf": str(trained.folder),
        "hub": "someone/model",
        "imported": str(tmp_path / "imported"),
        "llm.c": str(tmp_path / "llmc" / "model.bin"),
    }[kind]


@pytest.mark.parametrize("kind", ["run", "checkpoint", "best", "hf", "hub", "imported", "llm.c"])
def test_a_run_begins_where_the_weights_are(
    kind: str, trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sizes and numbers are theirs, and where they came from is in the checkpoint."""
    source, out = as_named(kind, trained, tmp_path, monkeypatch), tmp_path / "on"
    assert main(start(trained, source, out)) == 0
    validations = [(record["step"], record["loss"]) for record in records(out, ("validation",))]
    assert validations == [(0, trained.loss), (1, trained.loss)], "the curve begins at the loss of the weights"
    before, after = tensors(trained.run, 12), tensors(out, 1)
    assert all(torch.equal(before[name], after[name]) for name in before if not name.startswith(("m.", "v.")))
    told = (out / "log.txt").read_text()
    assert f"weights of {source}, seed" in told and f"\nweights    {source} (" in told
    (event,) = records(out, ("event",))
    assert event["step"] == 0 and event["text"].startswith(f"starts from the weights of {source} (")
    saved = read_toml(str(out / "config.toml"))
    assert {name: saved[name] for name in SIZES} == {name: ODD[name] for name in SIZES}
    origin = checkpoint.find(str(out)).manifest["init"]
    assert (
        origin["from"] == {"hf": "hf", "hub": "hf", "llm.c": "llm.c"}.get(kind, "checkpoint") and origin["source"] == source
    )
    assert all(len(digest) == 64 for digest in origin["sha256"].values())
    assert records(out, ("run",))[0]["init"] == origin


def test_a_run_goes_on_without_the_weights(trained: Trained, tmp_path: Path) -> None:
    """Resumed from its own checkpoint, with the sizes that are there; `plan` knows them before."""
    source, out = shutil.copytree(trained.run, tmp_path / "source"), tmp_path / "on"
    command = [*start(trained, source, out), "--steps", "4", "--save-every", "2", "--learning-rate", "1e-3"]
    unbroken = [*start(trained, source, tmp_path / "whole"), *command[command.index("--steps", 12) :]]
    assert main(["plan", *command[1:]]) == 0
    with pytest.MonkeyPatch.context() as patch:
        interrupt_at(patch, 3)
        assert main(command) == 130
    assert main(unbroken) == 0
    shutil.rmtree(source)
    assert main(command) == 0
    same_bits(tmp_path / "whole", out, 4)
    states = [checkpoint.find(str(run)).manifest for run in (out, tmp_path / "whole")]
    assert states[0]["init"] == states[1]["init"]


@pytest.mark.parametrize(("every", "expected"), [("1", [0, 1, 2]), ("0", [2])])
def test_the_validation_before_the_first_step(
    every: str, expected: list[int], trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Made once, by a start that ends before its first checkpoint as well; never the best checkpoint; not for weights that
    a run draws, nor where validations come only at the end."""
    more = ["--steps", "2", "--eval-every", every, "--keep-best", "true", "--sample-every", "1", "--sample-tokens", "2"]
    command = [*start(trained, trained.run, tmp_path / "on"), *more]
    with monkeypatch.context() as patch:
        interrupt_at(patch, 0)
        assert main(command) == 130
    assert [record["step"] for record in records(tmp_path / "on", ("validation",))] == expected[:-2]
    assert main(command) == 0
    assert [record["step"] for record in records(tmp_path / "on", ("validation",))] == expected
    assert [record["step"] for record in records(tmp_path / "on", ("sample",))] == [1, 2]
    assert not (tmp_path / "on" / "checkpoints" / "step_00000000").exists()
    sizes = [part for name in SIZES for part in (f"--{name.replace('_', '-')}", str(ODD[name]))]
    assert main([*start(trained, "", tmp_path / "drawn"), *sizes, *more]) == 0
    assert [record["step"] for record in records(tmp_path / "drawn", ("validation",))] == [s for s in expected if s]


@pytest.mark.parametrize(
    ("code", "more", "told"),
    [
        (64, ["--num-layers", "2"], "num_layers is 3 in {run} and 2 in this run"),
        (64, ["--model", "tiny"], "num_layers is 3 in {run} and 2 in this run"),
        (64, ["--channels", "66"], "channels is 33 in {run} and 66 in this run"),
        (64, ["--sequence-length", "74"], "at most the 37 positions of {run}, found 74; try --sequence-length 37"),
        (64, ["--freeze", "wte,wpee"], "freeze names no parameter of this model: 'wpee' (did you mean wpe?)"),
        (
            64,
            ["--freeze", "blocks.1-3.fc_*"],
            "freeze names no parameter of this model: 'blocks.3.fc_*' ('blocks.1-3.fc_*')",
        ),
        (64, ["--freeze", "blocks.7"], "freeze names no parameter of this model: 'blocks.7' (did you mean blocks.2?)"),
        (64, ["--freeze", "blocks.2-1"], "freeze names no parameter of this model: 'blocks.2-1'"),
        (64, ["--freeze", "wte,wpe,blocks,lnf_*"], "leaves no parameter to train"),
        (65, ["--init-from", "no/such/folder"], "expected weights at no/such/folder"),
        (65, ["--init-from", "someone/model"], "a model of that name on the Hub, found neither"),
        (65, ["--init-from", "{run}/log.txt"], "log.txt: a run, a checkpoint,"),
        (65, ["--init-from", "{run}/samples"], "found a folder without them"),
        (65, ["--init-from", "gpt2_124M.bin"], "gpt2_124M.bin"),
    ],
)
def test_what_does_not_fit_is_told_in_one_line(
    code: int, more: list[str], told: str, trained: Trained, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    more = [part.format(run=trained.run) for part in more]
    capsys.readouterr()
    assert told.format(run=trained.run) in refused(capsys, code, *start(trained, trained.run, tmp_path / "on", *more))
    assert not (tmp_path / "on" / "config.toml").exists()


def test_the_tokenizer_must_be_that_of_the_weights(trained: Trained, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    prepare(PrepareOptions(str(write_text(tmp_path / "t.txt")), tmp_path / "bpe", tokenizer="bpe:257", workers=1))
    for source in (trained.run, trained.folder):
        capsys.readouterr()
        line = refused(capsys, 65, *start(trained, source, tmp_path / source.name, "--data", str(tmp_path / "bpe")))
        assert "was trained with another tokenizer" in line


def loaded_logits(run: Path) -> Tensor:
    """(tokens, V) of a few random tokens."""
    found = checkpoint_weights(checkpoint.find(str(run)))
    buffers = decode_buffers(found.shape, 1, torch.float32, cpu)
    return logits(load_model(found, torch.device("cpu"), torch.float32, cpu, buffers))


def test_fewer_positions_are_the_first_ones(trained: Trained, tmp_path: Path) -> None:
    """The model is causal: without its last positions it says the same of the first tokens."""
    for source in (trained.run, trained.folder):
        out = tmp_path / source.name
        assert (
            main(start(trained, source, out, "--sequence-length", "16", "--tokens-per-step", "160", "--micro-batch", "5"))
            == 0
        )
        before, after = tensors(trained.run, 12), tensors(out, 1)
        assert after["wpe"].shape == (16, 33) and torch.equal(before["wpe"][:16], after["wpe"])
        assert torch.equal(loaded_logits(out), loaded_logits(trained.run))


@pytest.mark.parametrize("recipe", ["finetune_shakespeare", "finetune_jsonl", "finetune_chat", "finetune_chat_own"])
def test_the_recipes_take_other_weights(recipe: str, trained: Trained, tmp_path: Path) -> None:
    """A few steps of each, on a model with fewer positions than GPT-2; the best is kept."""
    path, out = recipes.shipped()[recipe], tmp_path / "on"
    settings = {"init-from": trained.run, "data": trained.data, "out": out, "sequence-length": 32, "tokens-per-step": 256}
    settings |= {"micro-batch": 4, "steps": 3, "eval-every": 1, "sample-tokens": 0, "eval-tokens": 512}
    flags = [part for name, value in settings.items() for part in (f"--{name}", str(value))]
    assert main(["train", "--config", str(path), *flags]) == 0
    losses = {record["step"]: record["loss"] for record in records(out, ("validation",))}
    assert checkpoint.find(f"{out}/best").step == min(losses, key=losses.__getitem__)
    assert tensors(out, 3)["wpe"].shape == (32, 33)
