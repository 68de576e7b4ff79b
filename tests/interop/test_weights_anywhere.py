"""`sample` and `evaluate` take weights from wherever they are, and find in them what the run's own checkpoint holds."""

from collections.abc import Callable
from pathlib import Path

import pytest

from handgrad.cli import main
from handgrad.config import ModelShape
from tests.test_commands import refused


def test_the_same_from_a_run_and_its_exports(
    exported: Callable[[str], tuple[Path, Path, ModelShape]],
    shards: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture,
) -> None:
    run, folder, _ = exported("bytes")
    assert main(["export", str(run), "--to", "llmc", str(tmp_path / "c")]) == 0
    (tmp_path / "own.jsonl").write_text('{"context": "One and one", "choices": ["is two", "is three"], "answer": 0}\n')
    tasks = ["--tasks", f"own={tmp_path / 'own.jsonl'}", "--data", str(shards), "--device", "cpu"]
    found = []
    for source in (run, folder, tmp_path / "c" / "model.bin"):
        capsys.readouterr()
        assert main(["sample", str(source), "--max-tokens", "8", "--device", "cpu"]) == 0
        text = capsys.readouterr().out
        assert main(["evaluate", str(source), *tasks]) == 0
        first, *lines = capsys.readouterr().out.splitlines()
        assert first == f"checkpoint        {source}{' (step 40)' if source == run else ''}"
        found.append((text, lines))
    assert "own" in found[0][1][-1] or "own" in found[0][1][-3]
    assert found[0] == found[1] == found[2]


def test_a_loss_needs_data(exported: Callable[[str], tuple[Path, Path, ModelShape]], capsys: pytest.CaptureFixture) -> None:
    assert "give --data DIR" in refused(capsys, 64, "evaluate", str(exported("bytes")[1]), "--device", "cpu")


def test_a_run_may_be_named_like_a_file_of_llmc(
    exported: Callable[[str], tuple[Path, Path, ModelShape]], tmp_path: Path
) -> None:
    (tmp_path / "run.bin").symlink_to(exported("bytes")[0])
    assert main(["sample", str(tmp_path / "run.bin"), "--max-tokens", "2", "--device", "cpu"]) == 0
