"""Runs that start from weights: wherever those are, with fewer positions, parameters frozen, the best step kept."""

import dataclasses
import math
import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor

from handgrad import checkpoint
from handgrad.cli import main
from handgrad.config import ModelShape, RunConfig, read_toml
from handgrad.data.prepare import PrepareOptions, prepare
from handgrad.errors import DataError, NumericsError
from handgrad.evaluation.generate import decode_buffers
from handgrad.evaluation.load import load_model
from handgrad.interop.hf_export import logits
from handgrad.model.freezing import freeze
from handgrad.model.parameters import count_parameters, parameter_table
from handgrad.ops import reference
from handgrad.report.page import write_report
from handgrad.training import loop
from handgrad.training.header import most_checkpoints
from handgrad.training.start import train
from tests.conftest import small_run, write_text
from tests.test_commands import refused
from tests.test_runs import elsewhere, finished, records, same_bits, tensors
from tests.test_training import steps_of

__all__ = ["finished"]  # a fixture
ODD = {"num_layers": 3, "num_heads": 3, "channels": 33, "sequence_length": 37, "tokens_per_step": 148, "micro_batch": 2}
POSITIONS = 37
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
    }[kind]


@pytest.mark.parametrize("kind", ["run", "checkpoint", "best", "hf", "hub", "imported"])
def test_a_run_begins_where_the_weights_are(
    kind: str, trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sizes and numbers are theirs, and where they came from is in the checkpoint."""
    source, out = as_named(kind, trained, tmp_path, monkeypatch), tmp_path / "on"
    assert main(start(trained, source, out)) == 0
    assert [record["loss"] for record in records(out, ("validation",))] == [trained.loss]
    before, after = tensors(trained.run, 12), tensors(out, 1)
    assert all(torch.equal(before[name], after[name]) for name in before if not name.startswith(("m.", "v.")))
    saved = read_toml(str(out / "config.toml"))
    assert {name: saved[name] for name in SIZES} == {name: ODD[name] for name in SIZES}
    origin = checkpoint.find(str(out)).manifest["init"]
    assert origin["from"] == ("hf" if kind in ("hf", "hub") else "checkpoint") and origin["source"] == source
    assert all(len(digest) == 64 for digest in origin["sha256"].values())


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


def interrupt_at(patch: pytest.MonkeyPatch, step: int) -> None:
    original = loop.Stepper.begin

    def begin(stepper: loop.Stepper, now: int) -> None:
        if now == step:
            raise KeyboardInterrupt
        original(stepper, now)

    patch.setattr(loop.Stepper, "begin", begin)


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
        (64, ["--freeze", "blocks.2-1"], "freeze names no parameter of this model: 'blocks.2-1'"),
        (64, ["--freeze", "wte,wpe,blocks,lnf_*"], "leaves no parameter to train"),
        (65, ["--init-from", "no/such/folder"], "expected weights at no/such/folder"),
        (65, ["--init-from", "someone/model"], "a model of that name on the Hub, found neither"),
        (65, ["--init-from", "{run}/log.txt"], "log.txt: a run, a checkpoint,"),
        (65, ["--init-from", "{run}/samples"], "found a folder without them"),
        (64, ["--init-from", "gpt2_124M.bin"], "llm.c"),
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
    found = checkpoint.find(str(run))
    buffers = lambda config, shape: decode_buffers(shape, torch.float32, reference)  # noqa: E731
    return logits(load_model(found, torch.device("cpu"), torch.float32, reference, buffers))


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


@pytest.mark.parametrize("recipe", ["finetune_shakespeare", "finetune_jsonl"])
def test_the_recipes_take_other_weights(recipe: str, trained: Trained, tmp_path: Path) -> None:
    """A few steps of each, on a model with fewer positions than GPT-2; the best is kept."""
    path, out = Path(__file__).parents[1] / "recipes" / f"{recipe}.toml", tmp_path / "on"
    settings = {"init-from": trained.run, "data": trained.data, "out": out, "sequence-length": 32, "tokens-per-step": 256}
    settings |= {"micro-batch": 4, "steps": 3, "eval-every": 1, "sample-tokens": 0, "eval-tokens": 512}
    flags = [part for name, value in settings.items() for part in (f"--{name}", str(value))]
    assert main(["train", "--config", str(path), *flags]) == 0
    losses = {record["step"]: record["loss"] for record in records(out, ("validation",))}
    assert checkpoint.find(f"{out}/best").step == min(losses, key=losses.__getitem__)
    assert tensors(out, 3)["wpe"].shape == (32, 33)


# Freezing.


FROZEN = "wte, blocks.0-0.*, blocks.1.ln?_*"


def test_patterns_name_rows() -> None:
    table = parameter_table(ModelShape(vocab_size=257, sequence_length=16, num_layers=12, num_heads=2, channels=32))

    def names(patterns: str) -> set[str]:
        return {row.name for row in freeze(table, patterns) if row.frozen}

    assert freeze(table, "") == table and names("wte,wpe") == {"wte", "wpe"}
    assert names("blocks.1") == {row.name for row in table if row.name.startswith("blocks.1.")}
    assert names("blocks.2-3.") == names("blocks.2-3") == names("blocks.2-3.*") == names("blocks.2") | names("blocks.3")
    assert names("blocks.*.ln1_*") == {f"blocks.{n}.ln1_{kind}" for n in range(12) for kind in ("weight", "bias")}
    assert names(" blocks.0-11.fc_weight, lnf_bias,") == {"lnf_bias", *(f"blocks.{n}.fc_weight" for n in range(12))}


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"precision": "bf16"},
        {"precision": "bf16", "master_weights": False},
        {"precision": "fp8", "fp8_head": "forward"},
        {"lanes": 4, "micro_batch": 2},
    ],
    ids=["fp32", "bf16", "bf16-alone", "fp8", "lanes"],
)
def test_what_is_frozen_stays(settings: dict, config: RunConfig) -> None:
    """Bit by bit, without moments; the rest moves, and only that decays."""
    config = dataclasses.replace(config, freeze=FROZEN, weight_decay=0.5, **settings)
    fresh, _ = steps_of(config, 0)
    state, _ = steps_of(config, 3)
    frozen = {row.name for row in state.table if row.frozen}
    assert {"wte", "blocks.0.fc_weight", "blocks.1.ln2_bias"} <= frozen and "blocks.1.fc_weight" not in frozen
    for row in state.table:
        for flat in (state.parameters, state.master):
            before = row.view(fresh.parameters if flat is state.parameters else fresh.master)
            assert torch.equal(before, row.view(flat)) == row.frozen, row.name
        for moments in (state.first_moments, state.second_moments):
            assert bool((row.stored(moments) == 0).all()) == row.frozen, row.name


def test_the_norm_is_that_of_what_is_trained(config: RunConfig) -> None:
    """Held against the unfrozen run's gradient of the same step, in float64."""
    whole, everything = steps_of(dataclasses.replace(config, clip_norm=0.0), 1)
    state, results = steps_of(dataclasses.replace(config, freeze=FROZEN, clip_norm=1e-3), 1)
    assert results[0].loss == everything[0].loss

    def norm(names: set[str]) -> float:
        return math.sqrt(
            sum(float(row.view(whole.gradients).double().pow(2).sum()) for row in state.table if row.name in names)
        )

    trained = {row.name for row in state.table if not row.frozen}
    # Float32 squares and sums of up to 2^16 of them, pairwise: a few units in the last place.
    assert abs(norm({row.name for row in state.table}) / everything[0].norm - 1) < 1e-6
    assert abs(norm(trained) / results[0].norm - 1) < 1e-6 and results[0].norm < 0.9 * everything[0].norm
    clipped = state.first_moments.double().norm() / (1 - config.beta1)
    assert abs(clipped - 1e-3) < 1e-8, "clipped to its own norm"


def test_a_gradient_that_is_not_trained_may_be_anything(config: RunConfig) -> None:
    """Not finite where it is frozen: no update is skipped for it. Where it is trained: the step is, and named."""

    def losing(patch: pytest.MonkeyPatch, name: str) -> None:
        original = loop.Stepper.finish

        def finish(stepper: loop.Stepper, step: int) -> None:
            getattr(stepper.state.weight_gradients, name).fill_(math.nan)
            original(stepper, step)

        patch.setattr(loop.Stepper, "finish", finish)

    with pytest.MonkeyPatch.context() as patch:
        losing(patch, "wpe")
        train(dataclasses.replace(config, freeze="wpe", steps=2))
        with pytest.raises(NumericsError, match="non-finite gradients at wte, wpe, blocks"):
            train(elsewhere(config, "thawed", steps=2, max_skips=1))
    with pytest.MonkeyPatch.context() as patch:
        losing(patch, "wte")
        with pytest.raises(NumericsError, match="non-finite gradients at wte, blocks"):
            train(elsewhere(config, "other", freeze="wpe", steps=2, max_skips=1))


def test_a_frozen_run_goes_on_with_the_same_bits(config: RunConfig) -> None:
    config = dataclasses.replace(config, freeze=FROZEN)
    train(config)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        interrupt_at(patch, 6)
        train(elsewhere(config, "broken"))
    train(elsewhere(config, "broken"))
    same_bits(config.out, elsewhere(config, "broken").out, config.steps)
    started = records(config.out, ("run",))[0]
    table = freeze(parameter_table(config.shape(257)), FROZEN)
    assert started["parameters"] == count_parameters(table)
    assert started["trained_parameters"] == count_parameters(row for row in table if not row.frozen)
    assert f"frozen: {FROZEN}" in (Path(config.out) / "log.txt").read_text()
    page = write_report([Path(config.out)], Path(config.out) / "report.html").read_text()
    assert f"({started['trained_parameters']:,} of them not frozen)" in page


def test_nothing_frozen_launches_what_it_always_did(config: RunConfig) -> None:
    state, _ = steps_of(config, 1)
    everything, _ = steps_of(dataclasses.replace(config, freeze="lnf_bias"), 1)
    runs = [
        list(loop.Stepper.update_runs(FakeStepper(s), frozen=frozen))
        for s in (state, everything)
        for frozen in (True, False)
    ]
    assert [len(found) for found in runs] == [0, 2 * config.num_layers, 1, 2 * config.num_layers]


@dataclasses.dataclass
class FakeStepper:
    state: object


# The best checkpoint.


def scripted(patch: pytest.MonkeyPatch, losses: dict[int, float]) -> None:
    """Validations that find these losses after these steps."""
    patch.setattr(loop.Run, "validate", lambda run: losses[run.completed])


def steps_kept(run: RunConfig) -> list[int]:
    return sorted(int(path.name.removeprefix("step_")) for path in (Path(run.out) / "checkpoints").glob("step_*"))


LOSSES = {2: 5.0, 4: 3.0, 6: 2.0, 8: 2.5, 10: 2.0, 12: 4.0}


@pytest.mark.parametrize(
    ("losses", "keep", "best", "kept"),
    [
        (LOSSES, 1, 6, [6, 12]),
        (LOSSES, 2, 6, [6, 8, 12]),
        ({step: 9.0 - step / 2 for step in LOSSES}, 1, 12, [12]),
        ({step: 1.0 + step for step in LOSSES}, 1, 2, [2, 12]),
        ({**LOSSES, 2: math.nan, 4: math.inf}, 0, 6, [4, 6, 8, 12]),
        (dict.fromkeys(LOSSES, math.nan), 1, None, [12]),
    ],
    ids=["in the middle", "two kept", "better and better", "worse and worse", "all kept", "never a number"],
)
def test_the_best_checkpoint_is_kept(
    losses: dict[int, float], keep: int, best: int | None, kept: list[int], config: RunConfig
) -> None:
    config = dataclasses.replace(config, eval_every=2, keep_checkpoints=keep, keep_best=True)
    most, original = [0], checkpoint.prune

    def counting(*given: object) -> None:
        most.append(len(steps_kept(config)))
        original(*given)

    with pytest.MonkeyPatch.context() as patch:
        scripted(patch, losses)
        patch.setattr(checkpoint, "prune", counting)
        train(config)
    assert steps_kept(config) == kept and max(most) <= most_checkpoints(config)
    if best is None:
        with pytest.raises(DataError, match="no checkpoint of a step that was validated"):
            checkpoint.find(f"{config.out}/best")
        return
    assert checkpoint.find(f"{config.out}/best").step == best
    assert checkpoint.find(config.out).step == 12
    said = (Path(config.out) / "log.txt").read_text()
    assert f"step {best}: validation loss {losses[best]:.4f}, the best so far" in said


def test_the_disk_that_a_plan_counts_is_taken(config: RunConfig) -> None:
    """The worst case, one best after another: the newest, the best before, and the one being written."""
    config = dataclasses.replace(config, eval_every=3, save_every=4, keep_checkpoints=1, keep_best=True)
    most, original = [], checkpoint.prune
    with pytest.MonkeyPatch.context() as patch:
        scripted(patch, {3: 3.0, 6: 2.0, 9: 1.0, 12: 4.0})
        patch.setattr(checkpoint, "prune", lambda *given: (most.append(len(steps_kept(config))), original(*given)))
        train(config)
    assert max(most) == most_checkpoints(config) == 3


def test_without_asking_nothing_more_is_saved(finished: RunConfig) -> None:
    assert steps_kept(finished) == [8, 12]
    assert checkpoint.find(f"{finished.out}/best").step == 12, "the best of those that are there"


@pytest.mark.parametrize("moment", ["before its record", "a step later"])
def test_the_best_checkpoint_survives(moment: str, config: RunConfig) -> None:
    """Ended between the checkpoint and the record of its loss, or later: the resumed run has the same checkpoints."""
    config = dataclasses.replace(config, eval_every=2, keep_checkpoints=1, keep_best=True)
    broken = elsewhere(config, "broken")
    with pytest.MonkeyPatch.context() as patch:
        scripted(patch, LOSSES)
        train(config)
        with pytest.MonkeyPatch.context() as fault, pytest.raises(KeyboardInterrupt):
            if moment == "a step later":
                interrupt_at(fault, 7)
            else:
                original = loop.Voice.validation

                def ended(voice: loop.Voice, step: int, *given: object) -> None:
                    if step == 6:
                        raise KeyboardInterrupt
                    original(voice, step, *given)

                fault.setattr(loop.Voice, "validation", ended)
            train(broken)
        assert steps_kept(broken) == ([4, 6] if moment == "before its record" else [6])
        train(broken)
    assert steps_kept(broken) == steps_kept(config) == [6, 12]
    same_bits(config.out, broken.out, 12)
    assert checkpoint.find(f"{broken.out}/best").step == 6


def test_a_damaged_best_checkpoint_is_named(config: RunConfig) -> None:
    config = dataclasses.replace(config, eval_every=2, keep_checkpoints=0, keep_best=True)
    with pytest.MonkeyPatch.context() as patch:
        scripted(patch, LOSSES)
        train(config)
    weights = Path(config.out) / "checkpoints" / "step_00000006" / checkpoint.WEIGHTS_FILE
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    with pytest.raises(DataError, match="step_00000006"):
        checkpoint.find(f"{config.out}/best")
    shutil.rmtree(weights.parent)
    assert checkpoint.find(f"{config.out}/best").step == 8, "the best of those that are there"


@pytest.mark.parametrize(
    "line", ['{"kind": "validation", "step": [], "loss": 1}', '{"kind": "validation", "st', '"validation"']
)
def test_a_record_with_odd_lines(line: str, finished: RunConfig) -> None:
    with (Path(finished.out) / "metrics.jsonl").open("a") as file:
        file.write(line + "\n")
    assert checkpoint.find(f"{finished.out}/best").step == 12


def test_the_best_checkpoint_is_taken_by_commands(
    finished: RunConfig, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    best = f"{finished.out}/best"
    assert main(["sample", best, "--max-tokens", "3"]) == 0
    assert main(["export", best, "--to", "hf", str(tmp_path / "hf")]) == 0
    capsys.readouterr()
    assert main(["evaluate", best]) == 0
    assert "(step 12)" in capsys.readouterr().out
