"""An audited run: its chain, the replays that hold, and every fault that one of them names."""

import dataclasses
import hashlib
import math
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from handgrad.cli import main
from handgrad.data.batches import Batches
from handgrad.data.prepare import PrepareOptions, prepare
from handgrad.errors import ConfigError, DataError
from handgrad.joins.audit.chain import check_chain, content_of, linked, links, read_chain
from handgrad.run.open import open_run, train
from handgrad.settings.config import RunConfig
from handgrad.storage import checkpoint
from handgrad.storage.manifest import OPTIMIZER_FILE, WEIGHTS_FILE
from handgrad.storage.run_files import AUDIT_FILE
from handgrad.training.design import Schedule
from handgrad.training.step import SpikeWindow, TrainStep
from tests import forging
from tests.conftest import small_run, write_text
from tests.forging import edit_tensors, lines_of, redo, write_lines
from tests.test_runs import launch_ahead, records

FAULTY = 5  # the 0-based step of a fault: step 6


def audited(shards: Path, out: Path, **settings: object) -> RunConfig:
    quiet = {"precision": "fp32", "eval_every": 0, "sample_tokens": 0, "keep_checkpoints": 0, "audit_every": 1}
    return dataclasses.replace(small_run(shards, out), **{**quiet, **settings})


@pytest.fixture(scope="module")
def finished(shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 12 steps, with checkpoints after 4, 8 and 12."""
    config = audited(shards, tmp_path_factory.mktemp("audited") / "run")
    train(config)
    return Path(config.out)


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    """A copy to tamper with."""
    return shutil.copytree(finished, tmp_path / "copy")


def verify(run: Path, *flags: object) -> int:
    return main(["verify", str(run), *map(str, flags)])


def caught(run: Path, capsys: pytest.CaptureFixture[str], code: int, *flags: object) -> str:
    """The line about a record that does not hold."""
    capsys.readouterr()
    assert verify(run, *flags) == code
    return capsys.readouterr().err


# The chain.


def test_a_link_follows_from_the_one_before(finished: Path) -> None:
    lines = lines_of(finished)
    check_chain(lines, finished)
    assert [line["step"] for line in links(lines)] == list(range(13))
    assert links(lines)[-1]["samples"] == [88, 96]
    sealed = {line["step"]: line for line in lines if line["kind"] == "checkpoint"}
    for step in (4, 8, 12):
        found = checkpoint.open_checkpoint(finished / "checkpoints" / f"step_{step:08d}")
        link = next(line for line in lines if line["kind"] == "step" and line["step"] == step)
        assert found.manifest["audit"] == {"step": step, "link": link["link"]}
        assert sealed[step]["link"] == link["link"]


def test_a_link_is_the_hash_of_sorted_ascii() -> None:
    """Anybody can make it with other tools."""
    content = b'{"a":"\\u00e9","b":[1,2],"previous":"x"}'
    assert linked({"b": [1, 2], "a": "\u00e9"}, "x")["link"] == hashlib.sha256(content).hexdigest()


def test_the_numbers_of_a_link_are_those_of_the_record(finished: Path) -> None:
    found = {line["step"]: line for line in lines_of(finished) if line["kind"] == "step"}
    for record in records(finished, ("step",)):
        for name in ("loss", "norm", "learning_rate"):
            assert float.fromhex(found[record["step"]][name]) == record[name]


def test_an_interrupted_run_has_the_chain_of_an_unbroken_one(finished: Path, shards: Path, tmp_path: Path) -> None:
    """Stopped after step 6, of which no checkpoint stands, it goes on from step 4."""
    config = audited(shards, tmp_path / "run")
    with open_run(config) as run:
        run.begin()
        run.advance(6)
    train(config)
    assert links(lines_of(tmp_path / "run")) == links(lines_of(finished))


def test_a_loop_one_step_behind_the_device_has_the_same_chain(finished: Path, shards: Path, tmp_path: Path, monkeypatch):
    """The loop of a GPU: a link is made when the next step has begun."""
    launch_ahead(monkeypatch)
    train(audited(shards, tmp_path / "run"))
    assert links(lines_of(tmp_path / "run")) == links(lines_of(finished))
    assert verify(tmp_path / "run") == 0


def test_links_of_every_third_step(finished: Path, shards: Path, tmp_path: Path) -> None:
    """Their contents are those of the whole chain; a checkpoint names the newest, and a replay holds from it."""
    train(audited(shards, tmp_path / "run", audit_every=3))
    whole = {line["step"]: content_of(line) for line in links(lines_of(finished))}
    assert [(line["step"], content_of(line) == whole[line["step"]]) for line in links(lines_of(tmp_path / "run"))] == [
        (step, True) for step in (0, 3, 6, 9, 12)
    ]
    saved = checkpoint.open_checkpoint(tmp_path / "run" / "checkpoints" / "step_00000008")
    assert saved.manifest["audit"]["step"] == 6
    assert verify(tmp_path / "run", "--from", 4) == 0


def test_no_audit_writes_nothing(shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(audited(shards, tmp_path / "run", audit_every=0, steps=4))
    assert not (tmp_path / "run" / AUDIT_FILE).exists()
    assert "the run was not audited; train with --audit-every 1" in caught(tmp_path / "run", capsys, 65)


def test_an_audit_changes_no_bit(finished: Path, shards: Path, tmp_path: Path) -> None:
    train(audited(shards, tmp_path / "run", audit_every=0))
    for name in (WEIGHTS_FILE, OPTIMIZER_FILE):
        audit, plain = (run / "checkpoints" / "step_00000012" / name for run in (finished, tmp_path / "run"))
        assert audit.read_bytes() == plain.read_bytes()


def test_a_resume_refuses_a_chain_that_does_not_fit(run: Path, shards: Path) -> None:
    shutil.rmtree(run / "checkpoints" / "step_00000012")
    lines = lines_of(run)
    config = audited(shards, run)
    for damaged in (lines[:8], [*lines[:3], *lines[4:]]):
        write_lines(run, damaged)
        with pytest.raises(ConfigError, match=r"does not fit the checkpoint.*--allow-changes"):
            train(config)
    train(config, allow_changes=True)
    again = lines_of(run)
    assert [line["step"] for line in again if line["kind"] == "begin"] == [8]


def test_a_checkpoint_gets_the_line_that_a_kill_left_out(run: Path, finished: Path, shards: Path) -> None:
    shutil.rmtree(run / "checkpoints" / "step_00000012")
    write_lines(run, [line for line in lines_of(run) if (line["kind"], line["step"]) != ("checkpoint", 8)])
    train(audited(shards, run))
    assert [line for line in lines_of(run) if line["step"] == 8] == [
        line for line in lines_of(finished) if line["step"] == 8
    ]


def test_other_settings_begin_anew_in_the_chain(run: Path, shards: Path) -> None:
    """A replay takes each part with its settings, from the checkpoint between them."""
    shutil.rmtree(run / "checkpoints" / "step_00000012")
    train(audited(shards, run, learning_rate=1e-3), allow_changes=True)
    begins = [line for line in lines_of(run) if line["kind"] == "begin"]
    assert [(line["step"], line["config"]["learning_rate"]) for line in begins] == [(0, 3e-3), (8, 1e-3)]
    assert verify(run) == 0


# Replays that hold.


def test_an_untouched_run_holds(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert verify(finished) == 0
    assert "12 links and 3 checkpoints equal, bit by bit, of steps 0 to 12" in capsys.readouterr().out
    assert verify(finished, "--from", 4, "--to", 7) == 0
    assert "3 links equal, bit by bit, of steps 4 to 7" in capsys.readouterr().out
    assert verify(finished, "--segments", 2, "--seed", 1) == 0
    assert "8 links and 2 checkpoints" in capsys.readouterr().out


@pytest.mark.nightly(but=["0.1", "fp8", "modern"])
@pytest.mark.parametrize(
    "settings",
    [
        {"dropout": 0.1},
        {"precision": "fp8"},
        {"precision": "bf16", "master_weights": False},
        {"optimizer": "muon", "lanes": 2},
        {"architecture": "modern"},
        {"precision": "fp16"},
    ],
    ids=lambda settings: next(iter(settings.values())),
)
def test_what_a_replay_repeats(settings: dict, shards: Path, tmp_path: Path) -> None:
    """Every run accumulates two micro-batches."""
    train(audited(shards, tmp_path / "run", steps=6, save_every=3, **settings))
    assert verify(tmp_path / "run") == 0
    assert verify(tmp_path / "run", "--from", 3) == 0


def test_a_skipped_step_is_repeated(shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SpikeWindow, "limit", lambda window, z: 1.5 if z and len(window.values) > 2 else math.inf)
    train(audited(shards, tmp_path / "run", skip_norm_z=4.0))
    assert {line["skipped"] for line in lines_of(tmp_path / "run") if line["kind"] == "step"} == {False, True}
    assert verify(tmp_path / "run") == 0 and verify(tmp_path / "run", "--from", 8) == 0


# Faults while the run was made: the replay is right, and differs.


def faulty_run(config: RunConfig, patch: Callable[[pytest.MonkeyPatch], None]) -> Path:
    with pytest.MonkeyPatch.context() as patching:
        patch(patching)
        train(config)
    return Path(config.out)


def flip(buffer: str) -> Callable[[pytest.MonkeyPatch], None]:
    """Flips a bit of an element between the gradients and the update of a step."""

    def patch(patching: pytest.MonkeyPatch) -> None:
        original = TrainStep.launch_norm

        def launch_norm(training: TrainStep, step: int) -> None:
            flat = training.state.master if buffer == "weights" else training.state.optimizer[buffer]
            if step == FAULTY:
                flat.view(torch.int32)[77] ^= 1 << 20
            original(training, step)

        patching.setattr(TrainStep, "launch_norm", launch_norm)

    return patch


def other_rate(patching: pytest.MonkeyPatch) -> None:
    original = Schedule.rate
    patching.setattr(Schedule, "rate", lambda schedule, step: original(schedule, step) * (1 + 1e-4 * (step == FAULTY)))


def swapped_sample(patching: pytest.MonkeyPatch) -> None:
    original = Batches.locate_all

    def other(batches: Batches, first_sample: int, samples: int) -> np.ndarray:
        places = original(batches, first_sample, samples)
        if first_sample <= FAULTY * 8 + 1 < first_sample + samples:
            places[FAULTY * 8 + 1 - first_sample] = original(batches, 3, 1)[0]
        return places

    patching.setattr(Batches, "locate_all", other)


@pytest.mark.parametrize(
    ("fault", "named"),
    [
        (flip("weights"), "the update of equal gradients left other bits in weights (state.weights)"),
        (flip("m"), "left other bits in m, weights (state.m, state.weights)"),
        (flip("v"), "left other bits in v, weights (state.v, state.weights)"),
        (other_rate, "the learning rate is another (learning_rate, state.weights; learning_rate 0.00"),
        (swapped_sample, "a sample or the arithmetic is another (loss, norm, state.m, state.v, state.weights; loss"),
    ],
    ids=["weight", "first moment", "second moment", "learning rate", "sample"],
)
def test_a_fault_in_a_step_is_named(fault, named: str, shards: Path, tmp_path: Path, capsys) -> None:
    """The control is `test_an_untouched_run_holds`."""
    run = faulty_run(audited(shards, tmp_path / "run", steps=8), fault)
    error = caught(run, capsys, 77)
    assert "step 6: " in error and named in error


# Records that were tampered with.


def test_other_data_of_equal_length(finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    same, text = tmp_path / "same", write_text(tmp_path / "text.txt")
    prepare(PrepareOptions(str(text), same, tokenizer="bytes", workers=1))
    assert verify(finished, "--data", same) == 0  # the control: the same text, prepared elsewhere
    text.write_text(text.read_text().replace("river", "revir"))
    prepare(PrepareOptions(str(text), tmp_path / "other", tokenizer="bytes", workers=1))
    error = caught(finished, capsys, 65, "--data", tmp_path / "other")
    assert "was trained on data" in error and "give --data with the run's shards" in error


def test_an_edited_link(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = lines_of(run)
    edited = next(line for line in lines if line["kind"] == "step" and line["step"] == 6)
    edited["loss"] = (float.fromhex(edited["loss"]) * 0.99).hex()
    write_lines(run, lines)
    assert "step 6, was edited" in caught(run, capsys, 65)


def test_a_removed_line(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = lines_of(run)
    write_lines(run, [line for line in lines if line["step"] != 6])
    assert "step 7, does not follow step 5: a line between them was removed" in caught(run, capsys, 65)
    write_lines(run, [line for line in lines if line["step"] < 10])
    assert "up to step 9: it is another run's checkpoint, or links were removed" in caught(run, capsys, 65)


def test_a_forged_chain_of_whole_links(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Hashed anew where it was edited, it fails at the replay."""
    forged = lines_of(run)
    next(line for line in links(forged) if line["step"] == 6)["loss"] = (1.0).hex()
    redo(run, forged)
    assert "metrics.jsonl: loss of step 6 is 4." in caught(run, capsys, 65)
    (run / "metrics.jsonl").unlink()
    error = caught(run, capsys, 77)
    assert "step 6: the forward pass gave another loss" in error and "loss 1, replayed 4." in error


def test_a_checkpoint_of_another_run(run: Path, shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(audited(shards, tmp_path / "other", seed=2, steps=8))
    folder = run / "checkpoints" / "step_00000008"
    shutil.rmtree(folder)
    shutil.copytree(tmp_path / "other" / "checkpoints" / folder.name, folder)
    assert "which is not in the chain" in caught(run, capsys, 65)


@pytest.mark.parametrize("name", ["wpe", "m.wte"])
def test_a_bit_of_a_checkpoint(name: str, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = run / "checkpoints" / "step_00000008"
    edit_tensors(folder, forging.flip(name))
    assert "is not the checkpoint that was saved at step 8" in caught(run, capsys, 65)
    redo(run, lines_of(run))
    error = caught(run, capsys, 77, "--to", 10)
    assert "step 8: every digest is equal; in" in error and " 1 of " in error and f"elements of {name} differ" in error
    buffer = name.partition(".")[0] if name.startswith("m.") else "weights"
    assert f"is not the state of the link; {buffer} differ" in caught(run, capsys, 77, "--from", 8)


def test_damage_is_told_before_any_replay(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    weights = run / "checkpoints" / "step_00000004" / WEIGHTS_FILE
    content = bytearray(weights.read_bytes())
    content[-9] ^= 1
    weights.write_bytes(content)
    assert "the file is damaged" in caught(run, capsys, 65)


def test_another_machine_is_named_first(finished: Path, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("handgrad.tools.record.versions_of", lambda device, ops: {"torch": "9.9"})
    error = caught(finished, capsys, 78)
    assert "torch: 2." in error and "-> 9.9" in error and "device: cpu" in error and "--allow-changes" in error
    assert verify(finished, "--allow-changes") == 0
    assert "other      torch" in capsys.readouterr().out


def test_steps_that_no_replay_reaches(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "expected --from with a checkpoint at hand, or 0, found 5; the nearest is 4" in caught(
        run, capsys, 64, "--from", 5
    )
    assert "up to the record's last step 12, found 13" in caught(run, capsys, 64, "--to", 13)


def test_a_damaged_line_is_named(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with (run / AUDIT_FILE).open("a") as file:
        file.write('{"kind": "step"\n')
    assert "line 17 of" in caught(run, capsys, 65)
    with pytest.raises(DataError, match="expected begin, step or checkpoint"):
        write_lines(run, [{"kind": "other", "step": 1}])
        read_chain(run / AUDIT_FILE)
