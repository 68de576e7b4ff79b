"""Checkpoints that several ranks write, each its part: read by any number of them and by every command."""

import json
import shutil
from pathlib import Path

import pytest

import handgrad
from handgrad.cli import main
from handgrad.errors import DataError
from handgrad.storage import checkpoint
from handgrad.storage.manifest import OPTIMIZER_FILE, WEIGHTS_FILE
from tests.distributed.launching import files_of
from tests.distributed.runs import Launcher, arguments, same_run, saved_steps
from tests.test_checkpoints import damage
from tests.test_runs import records

PARTS = {
    2: ["model-0000{}-of-00002.safetensors", "optimizer-0000{}-of-00002.safetensors"],
    4: ["model-0000{}-of-00004.safetensors", "optimizer-0000{}-of-00004.safetensors"],
}


def folder_of(run: Path, step: int) -> Path:
    return checkpoint.folder_of(run / "checkpoints", step)


@pytest.fixture(scope="module")
def alone(launcher: Launcher, shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of one rank."""
    run = tmp_path_factory.mktemp("alone") / "run"
    launcher.run(1, arguments(shards, run))
    return run


@pytest.fixture(scope="module")
def shared(launcher: Launcher, shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """That of two."""
    run = tmp_path_factory.mktemp("shared") / "run"
    launcher.run(2, arguments(shards, run))
    return run


@pytest.mark.nightly(but=["4-1"])
@pytest.mark.parametrize(("ranks", "zero"), [(2, 1), (4, 1), (4, 0)])
def test_each_rank_writes_its_part(
    ranks: int, zero: int, launcher: Launcher, shards: Path, tmp_path: Path, alone: Path
) -> None:
    """Together the tensors of one file, bit for bit, while the other ranks train on; one file and one writer without."""
    run, still = tmp_path / "run", tmp_path / "still"
    launcher.run(ranks, arguments(shards, run, zero=zero), "slow-disk:1:6")
    launcher.run(ranks, arguments(shards, still, zero=zero, async_save="false"))
    for step in (4, 8):
        found = {path.name for path in folder_of(run, step).iterdir()}
        names = {pattern.format(number) for pattern in PARTS[ranks] for number in range(1, ranks + 1)}
        assert found == {*names, "manifest.json"}
        assert json.loads((folder_of(run, step) / "manifest.json").read_text())["schema"] == 2
        assert {path.name for path in folder_of(still, step).iterdir()} == {WEIGHTS_FILE, OPTIMIZER_FILE, "manifest.json"}
        assert files_of(run, step) == files_of(alone, step) == files_of(still, step)
    same_run(alone, run, 8)
    order = [record["kind"] + str(record["step"]) for record in records(run, ("step", "save"))]
    assert order.index("save4") > order.index("step6"), "nothing is committed before all have written"
    assert [record["step"] for record in records(run, ("save",))] == [4, 8]


def test_resumed_by_other_numbers_of_ranks(launcher: Launcher, shards: Path, tmp_path: Path, alone: Path) -> None:
    """Two, one, four."""
    for ranks, steps in ((2, 3), (1, 5), (4, 8)):
        settings = {"save_every": steps, "eval_every": 4}
        fault = "none" if steps == 8 else f"signal:0:{steps - 1}"
        started = launcher.start(ranks, arguments(shards, tmp_path / "run", **settings), fault)
        assert started.wait() == [0 if steps == 8 else 75] * ranks, started.errors
        assert len(list(folder_of(tmp_path / "run", steps).glob("model*.safetensors"))) == ranks
    same_run(alone, tmp_path / "run", 8)


def test_a_rank_that_cannot_write_ends_all(launcher: Launcher, shards: Path, tmp_path: Path, alone: Path) -> None:
    """In one line; the others have written their parts, which go, and the run goes on from the checkpoint before."""
    for rank in (0, 1):
        run = tmp_path / str(rank)
        started = launcher.start(2, arguments(shards, run), f"disk:{rank}:1")
        assert started.wait() == [74, 74], started.errors
        told = [line for one in started.ranks for line in one.told]
        assert len(told) == 1 and "step_00000008 failed: No space left on device; free some space" in told[0]
        assert started.fired == [rank == 0, rank == 1]
        assert [path.name for path in (run / "checkpoints").iterdir()] == ["step_00000004"]
        launcher.run(2, arguments(shards, run))
        same_run(alone, run, 8)


def test_a_stop_while_others_write(launcher: Launcher, shards: Path, tmp_path: Path, alone: Path) -> None:
    """Rank 1 has not written step 4 when rank 0 is told to stop: both checkpoints come to stand."""
    run = tmp_path / "run"
    started = launcher.start(2, arguments(shards, run), "slow-disk:1:0+signal:0:5")
    assert started.wait() == [75, 75], started.errors
    assert "after step 6, saved step 6" in started.ranks[0].errors and saved_steps(run) == [4, 6]
    launcher.run(2, arguments(shards, run))
    same_run(alone, run, 8)


# What reads them.


def test_every_command_reads_parts(alone: Path, shared: Path, shards: Path, tmp_path: Path, capsys) -> None:
    """As it reads one file."""
    commands = {
        "sample": ["sample", "{run}", "--max-tokens", "6", "--seed", "3"],
        "evaluate": ["evaluate", "{run}", "--data", str(shards), "--eval-tokens", "256"],
        "checkpoints": ["checkpoints", "{run}", "--verify"],
        "best": ["sample", "{run}/best", "--max-tokens", "3"],
    }
    for name, command in commands.items():
        said = []
        for run in (alone, shared):
            assert main([word.format(run=run) for word in command]) == 0, name
            said.append(capsys.readouterr().out.replace(str(run), "RUN").splitlines())
        assert len(said[0]) == len(said[1]) and (name != "sample" or said[0] == said[1]), said
    exported = []
    for run in (alone, shared):
        for to in ("hf", "llmc"):
            out = tmp_path / f"{run.parent.name}-{to}"
            assert main(["export", str(run), str(out), "--to", to]) == 0
            exported.append(
                {path.name: path.read_bytes() for path in out.iterdir() if path.suffix in (".bin", ".safetensors")}
            )
    assert exported[:2] == exported[2:] and all(exported)


def test_a_run_starts_from_parts(shared: Path, launcher: Launcher, shards: Path, tmp_path: Path) -> None:
    launcher.run(1, arguments(shards, tmp_path / "run", init_from=shared, steps=2, eval_every=0))
    (record,) = records(tmp_path / "run", ("run",))
    assert sorted(record["init"]["sha256"]) == [name.format(n) for name in PARTS[2][:1] for n in (1, 2)]
    assert handgrad.load(shared).origin["step"] == 8


@pytest.mark.parametrize("how", ["flip", "cut", "missing"])
@pytest.mark.parametrize("file", ["model-00002-of-00002.safetensors", "optimizer-00001-of-00002.safetensors"])
def test_a_damaged_part_is_named(shared: Path, tmp_path: Path, file: str, how: str) -> None:
    """With its first damaged tensor; the checkpoint before is taken."""
    run = Path(shutil.copytree(shared, tmp_path / "run"))
    damage(folder_of(run, 8) / file, how)
    found, passed_over = checkpoint.newest(run / "checkpoints")
    assert found is not None and found.step == 4
    assert len(passed_over) == 1 and file in passed_over[0]
    assert how == "missing" or "first in " in passed_over[0]


def test_a_part_that_is_not_listed_is_missed(shared: Path, tmp_path: Path) -> None:
    from tests.test_passed_over import with_manifest

    folder = Path(shutil.copytree(folder_of(shared, 8), tmp_path / "step_00000008"))
    files = json.loads((folder / "manifest.json").read_text())["files"]
    del files["model-00001-of-00002.safetensors"]
    with_manifest(folder, files=files)
    with pytest.raises(DataError, match="expected both files as files"):
        checkpoint.open_checkpoint(folder)
