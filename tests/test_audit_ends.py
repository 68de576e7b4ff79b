"""The ends of an audited run: checkpoints without a link of their own, chains that begin late, weights from elsewhere."""

import json
import math
import shutil
from pathlib import Path

import pytest

from handgrad.joins.audit.chain import content_of, linked, links
from handgrad.run.open import train
from handgrad.storage.manifest import MANIFEST
from handgrad.storage.run_files import AUDIT_FILE
from tests.forging import edit_manifest, edit_tensors, flip, lines_of, make_older, redo, write_lines
from tests.test_audit import audited, caught, faulty_run, finished, run, swapped_sample, verify

__all__ = ["finished", "run"]  # fixtures


def replace_checkpoint(run: Path, other: Path, name: str) -> None:
    shutil.rmtree(run / "checkpoints" / name)
    shutil.copytree(other / "checkpoints" / name, run / "checkpoints" / name)


@pytest.fixture(scope="module")
def unaudited(shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another run, whose checkpoints name no link."""
    config = audited(shards, tmp_path_factory.mktemp("unaudited") / "run", seed=2, audit_every=0)
    train(config)
    return Path(config.out)


# Checkpoints.


def test_a_checkpoint_behind_the_last_link_is_compared(unaudited: Path, shards: Path, tmp_path: Path, capsys) -> None:
    """Its run ends between two links."""
    run = tmp_path / "run"
    train(audited(shards, run, audit_every=5))
    assert verify(run) == 0
    assert "2 links and 3 checkpoints equal, bit by bit, of steps 0 to 12 (" in capsys.readouterr().out
    assert verify(run, "--from", 8) == 0  # over the link of step 10
    edit_tensors(run / "checkpoints" / "step_00000012", flip("wte"))
    redo(run, lines_of(run))
    error = caught(run, capsys, 77)
    assert "step 12: no link; in" in error and "elements of wte differ" in error
    assert verify(run, "--to", 10) == 0  # the control: what is left is the run's
    replace_checkpoint(run, unaudited, "step_00000012")
    assert "its manifest has config.seed 2, the chain 1337" in caught(run, capsys, 65)


def test_a_checkpoint_of_an_unaudited_run(run: Path, unaudited: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With its manifest edited until it agrees with the chain."""
    name = "step_00000008"
    own = json.loads((run / "checkpoints" / name / MANIFEST).read_text())
    replace_checkpoint(run, unaudited, name)
    shared = ("config", "versions", "identity", "tokenizer", "chat", "loss_window", "norm_window")
    edit_manifest(run / "checkpoints" / name, lambda content: content.update({key: own[key] for key in shared}))
    assert "is not the checkpoint that was saved at step 8" in caught(run, capsys, 65)
    redo(run, lines_of(run))
    assert "elements of wte differ" in caught(run, capsys, 77)


@pytest.mark.parametrize("name", ["loss_window", "norm_window", "loss_scale"])
def test_a_number_of_a_manifest(name: str, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """That a run goes on with: the windows of the spike detector, the loss scale. Every hash is made to fit."""
    folder = run / "checkpoints" / "step_00000012"
    edit_manifest(folder, lambda content: content[name].__setitem__(0, math.nextafter(content[name][0], 100.0)))
    assert "is not the checkpoint that was saved at step 12" in caught(run, capsys, 65)
    redo(run, lines_of(run))
    error = caught(run, capsys, 77)
    assert f"step 12: every tensor is equal; {name} in the manifest of {folder} are others" in error


def test_a_seal_belongs_to_a_link(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = lines_of(run)
    next(line for line in lines if (line["kind"], line["step"]) == ("checkpoint", 8))["link"] = "0" * 64
    write_lines(run, lines)
    assert "checkpoint 8, belongs to link 000000000000, which is not in the chain" in caught(run, capsys, 65)


def test_a_fault_between_two_links(shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A sample is swapped in step 6. The link of step 10 cannot say which step went wrong; a checkpoint comes closer."""
    run = faulty_run(audited(shards, tmp_path / "run", audit_every=5), swapped_sample)
    error = caught(run, capsys, 77)
    assert "step 8: no link; in" in error and "elements of wte differ" in error
    shutil.rmtree(run / "checkpoints")
    error = caught(run, capsys, 77)
    assert "step 10: one of the steps 6 to 10 is another (loss, norm, state.m, state.v, state.weights; loss" in error


# Chains.


def test_a_chain_that_begins_anew_holds_from_there(run: Path, shards: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A line was lost, and the run went on: what was before is set aside, what follows can be verified."""
    shutil.rmtree(run / "checkpoints" / "step_00000012")
    damaged = [line for line in lines_of(run) if line["step"] != 3]
    write_lines(run, damaged)
    train(audited(shards, run), allow_changes=True)
    assert [line["step"] for line in lines_of(run)] == [8, 8, 9, 10, 11, 12, 12]
    aside = (run / f"{AUDIT_FILE}.damaged").read_text()
    assert [json.loads(line) for line in aside.splitlines()] == [line for line in damaged if line["step"] <= 8]
    assert f"set aside in {run / AUDIT_FILE}.damaged, a chain begins here" in (run / "log.txt").read_text()
    assert verify(run) == 0
    assert "4 links and 1 checkpoint equal, bit by bit, of steps 8 to 12, none before step 8" in capsys.readouterr().out
    assert "the nearest is 8" in caught(run, capsys, 64, "--from", 4)


def test_a_line_that_a_kill_has_cut(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Or that is being written: `verify` takes what stands. Of a checkpoint it is the line that a resumed run adds."""
    chain = run / AUDIT_FILE
    text = chain.read_text()
    chain.write_text(text[:-40])
    assert "the chain has no line for it" in caught(run, capsys, 65)
    shutil.rmtree(run / "checkpoints" / "step_00000012")
    lines = [line for line in text.splitlines(keepends=True) if '"step": 12' not in line]
    last = next(line for line in text.splitlines() if line.startswith('{"kind": "step", "step": 12'))
    chain.write_text("".join(lines) + last[:-40])
    assert verify(run) == 0
    chain.write_text(chain.read_text() + "\n")
    assert "line 15 of" in caught(run, capsys, 65)


def test_a_chain_without_its_beginning(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_lines(run, lines_of(run)[1:])
    assert "line 1, step 1, has no begin before it: lines were removed" in caught(run, capsys, 65)


def test_the_state_of_a_later_begin(run: Path, shards: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run went on with other versions after step 8; a replay from step 0 runs through."""
    for forged in (False, True):
        contents = []
        for line in links(lines_of(run)):
            contents.append(content_of(line))
            if line["step"] == 8 and line["kind"] == "step":
                state = {name: "0" * 32 if forged else digest for name, digest in line["state"].items()}
                contents.append({**contents[0], "step": 8, "state": state})
        lines = []
        for content in contents:
            lines.append(linked(content, lines[-1]["link"] if lines else ""))
        copy = run.with_name(f"forged-{forged}")
        copy.mkdir()
        write_lines(copy, lines)
        if forged:
            assert "step 8: the state that it begins anew with is another" in caught(copy, capsys, 77, "--data", shards)
        else:
            assert verify(copy, "--data", shards) == 0


def test_an_audit_that_paused(run: Path, shards: Path) -> None:
    """Steps without an audit and with another rate: a chain begins at their checkpoint, and the run resumes there."""
    shutil.rmtree(run / "checkpoints" / "step_00000012")
    train(audited(shards, run, audit_every=0, learning_rate=1e-3), allow_changes=True)
    train(audited(shards, run, learning_rate=1e-3, steps=16), allow_changes=True)
    begins = [line for line in lines_of(run) if line["kind"] == "begin"]
    assert [(line["step"], line["config"]["learning_rate"]) for line in begins] == [(12, 1e-3)]
    note = f"{AUDIT_FILE}.damaged, a chain begins here; its manifest has config.learning_rate 0.001"
    assert note in (run / "log.txt").read_text()
    assert verify(run) == 0
    train(audited(shards, run, learning_rate=1e-3, steps=16))


def test_a_chain_of_format_1(run: Path, shards: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It holds for what it proves, and `verify` says what it lacks; a run goes on from it in format 2."""
    make_older(run)
    assert verify(run) == 0
    out = capsys.readouterr().out
    assert "older      a chain of format 1, without a hash of the code" in out and "12 links and 3 checkpoints equal" in out
    shutil.rmtree(run / "checkpoints" / "step_00000012")
    train(audited(shards, run))
    begins = [line for line in lines_of(run) if line["kind"] == "begin"]
    assert [(line["step"], line["format"]) for line in begins] == [(0, 1), (8, 2)]
    assert verify(run) == 0
    edit_manifest(run / "checkpoints" / "step_00000004", lambda content: content["config"].update(num_heads=4))
    write_lines(run, [line for line in lines_of(run) if (line["kind"], line["step"]) != ("checkpoint", 4)])
    assert "its manifest has config.num_heads 4, the chain" in caught(run, capsys, 65)


# Weights from elsewhere.


@pytest.mark.parametrize("lora", ["", "rank=4,alpha=8,on=qkv"], ids=["all weights", "adapters"])
def test_initial_weights_that_lie_elsewhere(
    lora: str, finished: Path, unaudited: Path, shards: Path, tmp_path: Path, capsys
):
    """They are named by their hashes, before any step is made."""
    base, moved, run = tmp_path / "base", tmp_path / "moved", tmp_path / "run"
    shutil.copytree(finished, base)
    train(audited(shards, run, init_from=str(base), lora=lora, steps=8))
    base.rename(moved)
    assert str(base) in caught(run, capsys, 65)
    assert verify(run, "--init-from", moved) == 0
    assert verify(run, "--init-from", moved, "--from", 4) == 0
    error = caught(run, capsys, 65, "--init-from", unaudited)
    assert "started from weights whose model.safetensors is " in error and "give --init-from" in error
    if lora:
        assert "which has changed" in caught(run, capsys, 65, "--init-from", unaudited, "--from", 4)
