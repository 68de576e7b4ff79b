"""`handgrad checkpoints`: the list, the verification, the removal."""

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from handgrad.cli import main
from handgrad.run.open import train
from handgrad.settings.config import RunConfig
from handgrad.storage import checkpoint
from handgrad.storage.run_files import take_lock
from tests.conftest import small_run
from tests.test_best_checkpoint import scripted, steps_kept
from tests.test_commands import refused

Output = Callable[..., str]


@pytest.fixture(scope="module")
def kept(shards: Path, tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    """Checkpoints of the steps 2 to 12, of which 4 is the best, and 6 and 12 are major."""
    config = small_run(shards, tmp_path_factory.mktemp("kept") / "run")
    config = dataclasses.replace(config, save_every=2, eval_every=4, keep_checkpoints=0, keep_every=6)
    with pytest.MonkeyPatch.context() as patch:
        scripted(patch, {4: 1.5, 8: 2.0, 12: 3.0})
        train(config)
    return config


@pytest.fixture
def run(kept: RunConfig, tmp_path: Path) -> RunConfig:
    """A copy that a test may change."""
    shutil.copytree(kept.out, tmp_path / "run")
    return dataclasses.replace(kept, out=str(tmp_path / "run"))


@pytest.fixture
def output(capsys: pytest.CaptureFixture) -> Output:
    def checkpoints(*arguments: str) -> str:
        capsys.readouterr()
        assert main(["checkpoints", *arguments]) == 0, capsys.readouterr().err
        return capsys.readouterr().out

    return checkpoints


def test_the_list(kept: RunConfig, output: Output) -> None:
    lines = output(kept.out).splitlines()
    assert lines[0].split() == ["step", "kind", "size", "loss", "age"]
    rows = [line.split() for line in lines[1:]]
    assert [row[0] for row in rows] == ["12", "10", "8", "6", "4", "2"]
    kinds = [" ".join(word for word in row if word.strip(",") in ("last", "major", "best")) for row in rows]
    assert kinds == ["last, major", "", "", "major", "best", ""]
    assert ["1.5000" in line for line in lines[1:]] == [False, False, False, False, True, False]
    assert all("KiB" in line for line in lines[1:])


def test_the_verification_names_the_file(run: RunConfig, output: Output, capsys: pytest.CaptureFixture) -> None:
    assert output(run.out, "--verify").count("ok ") == 6
    path = Path(run.out) / "checkpoints" / "step_00000006" / "optimizer.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    capsys.readouterr()
    assert main(["checkpoints", run.out, "--verify"]) == 65
    told = capsys.readouterr()
    assert told.out.count("ok ") == 5 and f"damaged   {path.parent}: {path}: " in told.out
    assert told.err.startswith(f"handgrad: 1 of 6 checkpoints are damaged: {path}: its SHA-256 differs")


def test_pruning_leaves_the_newest_the_best_and_major_ones(run: RunConfig, output: Output) -> None:
    told = output(run.out, "--prune", "2")
    assert [line.split("/")[-1] for line in told.splitlines()] == ["step_00000008", "step_00000002"]
    assert steps_kept(run) == [4, 6, 10, 12]
    assert output(run.out, "--prune", "2") == ""
    assert output(run.out, "--prune", "1").endswith("step_00000010\n")
    train(dataclasses.replace(run, steps=13), allow_changes=True)
    assert checkpoint.find(run.out).step == 13


def test_a_damaged_newest_checkpoint_does_not_count(run: RunConfig, output: Output, capsys: pytest.CaptureFixture) -> None:
    """The newest valid one is kept, and the damaged one moved aside; without a valid one nothing is removed."""
    path = Path(run.out) / "checkpoints" / "step_00000012" / "manifest.json"
    path.write_text(path.read_text().replace('"step": 12', '"step": 13'))
    assert "moved step_00000012 to" in output(run.out, "--prune", "1")
    assert steps_kept(run) == [4, 6, 10] and (path.parents[1] / "damaged" / "step_00000012").is_dir()
    for manifest in Path(run.out).glob("checkpoints/*/manifest.json"):
        manifest.unlink()
    assert "nothing was removed" in refused(capsys, 65, "checkpoints", run.out, "--prune", "1")
    assert steps_kept(run) == [4, 6, 10]


def test_refusals(run: RunConfig, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    with take_lock(Path(run.out)):
        assert "prune when it has ended" in refused(capsys, 78, "checkpoints", run.out, "--prune", "1")
    assert steps_kept(run) == [2, 4, 6, 8, 10, 12]
    assert "holds no checkpoint" in refused(capsys, 65, "checkpoints", str(tmp_path))
    assert "--prune must be at least 1" in refused(capsys, 64, "checkpoints", run.out, "--prune", "0")
