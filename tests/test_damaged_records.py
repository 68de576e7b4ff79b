"""Damaged lines in a run's record never end a start: they are set aside and named once, and nothing else is lost."""

import shutil
from pathlib import Path

import pytest

from handgrad.errors import StorageError
from handgrad.run.listing import list_runs
from handgrad.run.open import train
from handgrad.settings.config import RunConfig
from handgrad.training.step import TrainStep
from tests.test_runs import elsewhere, records


def change_byte(path: Path, line: int, at: int, byte: bytes) -> bytes:
    """Changes a byte of a line, numbered from 1; returns the line."""
    lines = path.read_bytes().splitlines(keepends=True)
    lines[line - 1] = lines[line - 1][:at] + byte + lines[line - 1][at + 1 :]
    path.write_bytes(b"".join(lines))
    return lines[line - 1]


@pytest.fixture
def run(finished: RunConfig) -> RunConfig:
    """A copy of the finished run that goes on from step 8."""
    copy = elsewhere(finished, "damaged")
    shutil.copytree(finished.out, copy.out)
    shutil.rmtree(Path(copy.out) / "checkpoints" / "step_00000012")
    return copy


def told(run: RunConfig) -> list[str]:
    return [line for line in (Path(run.out) / "log.txt").read_text().splitlines() if "set aside" in line]


@pytest.mark.parametrize("byte", [b"\xe9", b"\x00", b"#"])
@pytest.mark.parametrize("name", ["metrics.jsonl", "main.log"])
def test_a_damaged_line_is_set_aside_and_named_once(finished: RunConfig, run: RunConfig, name: str, byte: bytes) -> None:
    """A byte that is no UTF-8, and two of ASCII. All other lines are those of the unbroken run."""
    path, all_steps = Path(run.out) / name, records(finished.out, ("step",))
    number = 6
    if name == "metrics.jsonl":  # where records of saves stand beside those of steps is a matter of time
        lines = path.read_bytes().splitlines()
        number = next(n for n, line in enumerate(lines, start=1) if line.startswith(b'{"kind": "step", "step": 5,'))
    damaged = change_byte(path, line=number, at=0, byte=byte)
    train(run)
    aside = path.with_name(f"{name}.damaged")
    assert aside.read_bytes() == damaged
    assert len(told(run)) == 1 and f"{path}: set aside a damaged line, {number}, in {aside}" in told(run)[0]
    train(run)
    assert aside.read_bytes() == damaged and len(told(run)) == 1
    if name == "metrics.jsonl":
        assert b'"step": 5,' in damaged
        assert records(run.out, ("step",)) == all_steps[:4] + all_steps[5:]
    else:
        expected = (Path(finished.out) / name).read_bytes().splitlines(keepends=True)
        assert path.read_bytes().splitlines(keepends=True) == expected[:5] + expected[6:]
        assert records(run.out, ("step",)) == all_steps


def test_a_damaged_step_number_is_no_later_step(finished: RunConfig, run: RunConfig) -> None:
    """A line of step 5 that says 85 stands before those of the steps up to 8: it is not cut as one to be done again."""
    path = Path(run.out) / "metrics.jsonl"
    content = path.read_text()
    path.write_text(content.replace('"step": 5,', '"step": 85,', 1))
    train(run)
    aside = path.with_name("metrics.jsonl.damaged").read_text()
    assert aside.count("\n") == 1 and '"step": 85,' in aside and len(told(run)) == 1
    all_steps = records(finished.out, ("step",))
    assert records(run.out, ("step",)) == all_steps[:4] + all_steps[5:]


def test_a_line_that_a_kill_has_cut_is_no_damage(finished: RunConfig, run: RunConfig) -> None:
    """The last line, without its end, belongs to a step that is done again."""
    path = Path(run.out) / "metrics.jsonl"
    content = path.read_bytes()
    path.write_bytes(content[: content.index(b'"step": 11,') + 30])
    train(run)
    assert not told(run) and not list(Path(run.out).glob("*.damaged"))
    assert records(run.out, ("step",)) == records(finished.out, ("step",))


def test_a_finished_run_has_one_end(finished: RunConfig) -> None:
    """Starting it again does nothing, and leaves no trace in its record."""
    path = Path(finished.out) / "metrics.jsonl"
    content = path.read_bytes()
    assert content.count(b'{"kind": "end"') == 1
    train(finished)
    assert path.read_bytes() == content
    longer = elsewhere(finished, Path(finished.out).name, steps=13)
    train(longer, allow_changes=True)
    assert [record["step"] for record in records(longer.out, ("end",))] == [12, 13]
    assert list_runs(Path(longer.out))[0].state == "finished"


@pytest.mark.parametrize("how", ["removed", "moved", "replaced"])
def test_a_folder_that_goes_away_ends_the_run(
    config: RunConfig, tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the next write, and without a new folder in its place."""
    folder, original = Path(config.out), TrainStep.begin

    def begin(training: TrainStep, step: int) -> None:
        if step == 5:
            shutil.move(folder, tmp_path / "elsewhere")
            if how == "removed":
                shutil.rmtree(tmp_path / "elsewhere")
            elif how == "replaced":
                # Without what the save behind training is writing at this moment: it may vanish under the copy.
                shutil.copytree(tmp_path / "elsewhere", folder, ignore=shutil.ignore_patterns("*.partial"))
        assert step < 7, "it goes on"
        original(training, step)

    monkeypatch.setattr(TrainStep, "begin", begin)
    with pytest.raises(StorageError, match=rf"{folder} was moved or removed while the run trained in it; "):
        train(config)
    assert folder.exists() is (how == "replaced")
