"""Long contexts: a model whose context is longer than memory writes and is evaluated in the memory of what is asked for;
a run trains at 32,768 tokens a row."""

from dataclasses import replace
from pathlib import Path

import pytest

import handgrad
from handgrad.cli import main
from handgrad.data.prepare import PrepareOptions, prepare
from handgrad.errors import UsageError
from handgrad.memory.arena import Plan
from handgrad.run.open import train
from handgrad.run.resolve import generation_plan, resolve
from handgrad.settings.config import RunConfig
from tests.conftest import small_run, write_text
from tests.interop.models import make_checkpoint
from tests.test_commands import refused
from tests.test_runs import records

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


LLAMA = {"architecture": "llama", "llama": "kv_heads=1,feed_forward=32", "num_heads": 1, "channels": 8, "num_layers": 1}


@pytest.mark.nightly(but=["masked-8192"])
@pytest.mark.parametrize(("packing", "length"), [("stream", 32768), ("masked", 32768), ("masked", 8192)])
def test_a_run_trains_at_32768_tokens(packing: str, length: int, tmp_path: Path) -> None:
    """Windows, plan, step, validation, save and text; the first loss is that of words all alike."""
    texts = write_text(tmp_path / "text.txt", words=20_000)
    prepare(PrepareOptions(str(texts), tmp_path / "shards", tokenizer="bytes", validation_fraction=0.4, workers=1))
    config = replace(small_run(tmp_path / "shards", tmp_path / "run"), **LLAMA, packing=packing, steps=2, save_every=0)
    config = replace(config, sequence_length=length, tokens_per_step=length, micro_batch=1, recompute=1, eval_every=2)
    train(replace(config, warmup_steps=0, eval_tokens=length))
    first, second = records(config.out, ("step",))
    (validation,) = records(config.out, ("validation",))
    assert second["loss"] < first["loss"] and abs(first["loss"] - 5.55) < 0.05, "ln(257) = 5.55"
    assert abs(validation["loss"] - second["loss"]) < 0.1


def test_a_run_writes_in_the_memory_of_its_texts(config: RunConfig) -> None:
    """Not in that of its context; a text longer than a cache of 1024 tokens has a longer one."""
    long = replace(config, **LLAMA, sequence_length=32768, micro_batch=1, tokens_per_step=32768, sample_tokens=1023)
    bytes_of = [
        generation_plan(resolve(each, 257)).total_bytes
        for each in (long, replace(long, sequence_length=1024, tokens_per_step=1024), replace(long, sample_tokens=1024))
    ]
    assert bytes_of[0] == bytes_of[1] < bytes_of[2]
