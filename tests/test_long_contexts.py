"""A model whose context is longer than memory: it writes and is evaluated in the memory of what is asked for."""

from pathlib import Path

import pytest

import handgrad
from handgrad.arena import Plan
from handgrad.cli import main
from handgrad.data.prepare import PrepareOptions, prepare
from handgrad.errors import UsageError
from tests.conftest import write_text
from tests.interop.models import make_checkpoint
from tests.test_commands import refused

CONTEXT = 131072


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run, "run", and the same model from transformers, "hf"."""
    root = tmp_path_factory.mktemp("long")
    shape = {"architecture": "llama", "sizes": (2, 4, 32, CONTEXT), "llama": "kv_heads=2,feed_forward=64"}
    make_checkpoint(root / "run", "bytes", spread=0.5, **shape)
    assert main(["export", str(root / "run"), "--to", "hf", str(root / "hf")]) == 0
    return root


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes of each allocation of a plan."""
    found: list[int] = []
    allocate = Plan.allocate

    def noted(self: Plan, *given: object) -> object:
        found.append(self.total_bytes)
        return allocate(self, *given)

    monkeypatch.setattr(Plan, "allocate", noted)
    return found


def test_windows_of_an_evaluation(
    folder: Path, shards: Path, planned: list[int], capsys: pytest.CaptureFixture, tmp_path: Path
) -> None:
    few = ["--data", str(shards), "--device", "cpu", "--micro-batch", "1", "--eval-tokens", "512"]
    capsys.readouterr()
    assert main(["evaluate", str(folder / "run"), *few, "--context", "64"]) == 0
    told = capsys.readouterr().out
    assert f"in {shards}, windows of 64\n" in told
    model = handgrad.load(folder / "run", device="cpu")
    found = handgrad.evaluate(model, shards, eval_tokens=512, context=64, micro_batch=2)
    assert found.tokens == 512 and f"{found.loss:.4f} nats" in told
    assert main(["evaluate", str(folder / "run"), *few, "--context", "64", "--eval-stride", "16"]) == 0
    assert "windows of 64 every 16" in capsys.readouterr().out
    assert max(planned) < 1 << 20
    longer = write_text(tmp_path / "text.txt", words=20_000)
    prepare(PrepareOptions(str(longer), tmp_path / "shards", tokenizer="bytes", workers=1))
    few[1], few[-1] = str(tmp_path / "shards"), "4096"
    assert main(["evaluate", str(folder / "hf"), *few]) == 0
    assert "windows of 4096\n" in capsys.readouterr().out
    assert f"--context must be at most {CONTEXT}" in refused(
        capsys, 64, "evaluate", str(folder / "hf"), "--context", "131073"
    )
    with pytest.raises(UsageError, match="--context must be at most"):
        handgrad.evaluate(model, shards, context=CONTEXT + 1)
