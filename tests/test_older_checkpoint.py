"""Commands that fall back to an older checkpoint say so in a line; with --strict they refuse, and name file and tensor."""

import dataclasses
import shutil
from pathlib import Path

import pytest

import handgrad
from handgrad.cli import main
from handgrad.run.open import train
from handgrad.settings.config import RunConfig, to_toml
from tests.conftest import small_run
from tests.test_commands import refused


@pytest.fixture(scope="module")
def trained(shards: Path, tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    config = dataclasses.replace(small_run(shards, tmp_path_factory.mktemp("older") / "run"), sample_tokens=0)
    train(config)
    return config


@pytest.fixture
def run(trained: RunConfig, tmp_path: Path) -> Path:
    """Its newest checkpoint is damaged in the middle of a tensor."""
    copy = Path(shutil.copytree(trained.out, tmp_path / "run"))
    path = copy / "checkpoints" / "step_00000012" / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)
    return copy


def commands(run: Path, trained: RunConfig, folder: Path) -> dict[str, list[str]]:
    recipe = folder / "warm.toml"
    recipe.write_text(to_toml(dataclasses.replace(trained, init_from=str(run), out=str(folder / "warm"), steps=1)))
    return {
        "sample": ["sample", str(run), "--max-tokens", "2"],
        "evaluate": ["evaluate", str(run), "--data", trained.data, "--eval-tokens", "64"],
        "export": ["export", str(run), str(folder / "exported"), "--to", "hf"],
        "train": ["train", "--config", str(recipe)],
    }


@pytest.mark.fault(6)
@pytest.mark.parametrize("name", ["sample", "evaluate", "export", "train"])
def test_a_fallback_is_told_or_refused(
    run: Path, trained: RunConfig, name: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    command = commands(run, trained, tmp_path)[name]
    error = refused(capsys, 65, *command, "--strict")
    assert f"{run}/checkpoints/step_00000012/model.safetensors: its SHA-256 differs" in error
    assert "the file is damaged, first in blocks." in error and "leave --strict out" in error
    assert main(command) == 0
    (told,) = [line for line in capsys.readouterr().err.splitlines() if "passed over" in line]
    assert told.startswith("handgrad: passed over step_00000012: ") and told.endswith("takes step_00000008 instead")


def test_python_tells_it(run: Path, capsys: pytest.CaptureFixture) -> None:
    assert handgrad.load(run).shape.num_layers == 2
    assert "takes step_00000008 instead" in capsys.readouterr().err


@pytest.mark.fault(6)
def test_a_strict_run_is_not_resumed(run: Path, trained: RunConfig, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Neither is anything moved."""
    recipe = tmp_path / "again.toml"
    recipe.write_text(to_toml(dataclasses.replace(trained, out=str(run))))
    error = refused(capsys, 65, "train", "--config", str(recipe), "--strict")
    assert "step_00000012/model.safetensors" in error and "first in blocks." in error
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["step_00000008", "step_00000012"]
    assert main(["train", "--config", str(recipe)]) == 0
