"""`handgrad train --init-from WEIGHTS --data DIR` and nothing else: rows, steps and a learning rate that suit both."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from handgrad.cli import main
from handgrad.data.shards import open_dataset
from handgrad.run import autosize
from handgrad.run.open import train
from handgrad.run.packing import cut_documents, document_lengths
from handgrad.run.settings import run_config
from handgrad.settings.config import RunConfig, check
from handgrad.storage.checkpoint import find, peek_config
from tests.data.chats import talk
from tests.interop.models import make_checkpoint
from tests.test_runs import records
from tests.test_suited import corpus

CPU = torch.device("cpu")
LONG = {"num_layers": 2, "num_heads": 2, "channels": 32, "sequence_length": 131072, "architecture": "llama"}
LLAMA = {"sizes": (2, 2, 32, 8192), "architecture": "llama", "llama": "kv_heads=1,tied"}


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    """Those of a Llama with a context of 8192 tokens, as an import has them: of no run of ours."""
    out, _ = make_checkpoint(tmp_path / "weights", "bytes", **LLAMA)
    return out


def talks(tmp_path: Path) -> Path:
    assert main(["prepare", "questions", "--documents", "200", "--out", str(tmp_path / "talks"), "--workers", "1"]) == 0
    return tmp_path / "talks"


def fitted(given: dict[str, Any], tokens: float = 1e9, device: torch.device = CPU) -> RunConfig:
    """The settings for a corpus of so many tokens, which must hold."""
    return check(autosize.fitted_to_weights({"init_from": "x"} | given, LONG, corpus(tokens), device))


def test_the_bare_command_finetunes(weights: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """In short rows of the long context, at the rates of the documentation; it goes on with its own settings."""
    data, out = talks(tmp_path), tmp_path / "run"
    command = ["train", "--init-from", str(weights), "--data", str(data), "--out", str(out), "--device", "cpu"]
    assert main([*command, "--steps", "2"]) == 0, capsys.readouterr().err
    config = peek_config(out)
    assert config is not None and config["sequence_length"] == 512, "of a corpus of many rows, the device's"
    assert (config["learning_rate"], config["schedule"], config["sample_tokens"]) == (3e-5, "linear", 0)
    assert config["tokens_per_step"] * 4 <= 200 * 180 and config["warmup_steps"] == 1 and config["eval_every"] == 1
    assert main([*command, "--steps", "2"]) == 0, "the same command, of a run that is finished"
    assert "is finished: 2 of 2 steps" in capsys.readouterr().out
    given = {"init_from": str(weights), "data": str(data), "device": "cpu"}
    assert run_config("", "", "", given | {"out": str(out)}).steps == 2, "as the run in the folder has it"
    adapters = run_config("", "", "", given | {"out": str(tmp_path / "adapters"), "lora": "rank=4"})
    assert adapters.learning_rate == 2e-4 and adapters.sequence_length == 512


@pytest.mark.parametrize("count", [3, 20, 200])
@pytest.mark.parametrize("words", [1, 40, 400])
def test_conversations_fit_whole(count: int, words: int, weights: Path, tmp_path: Path) -> None:
    """However few they are, and however short the other split is: up to a step's tokens and the weights' context."""
    rows = [
        [{"role": "user", "content": f"Say {n}."}, {"role": "assistant", "content": "yes " * words}] for n in range(count)
    ]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    command = ["prepare", "--chat", str(tmp_path / "a.jsonl"), "--tokenizer", "bytes", "--out", str(tmp_path / "few")]
    assert main([*command, "--validation-fraction", "0.34" if count == 3 else "0.05"]) == 0
    given = {"init_from": str(weights), "data": str(tmp_path / "few"), "device": "cpu", "out": str(tmp_path / "run")}
    config = run_config("", "", "", given)
    dataset = open_dataset(tmp_path / "few")
    assert cut_documents(dataset, config.sequence_length) == [] and config.sequence_length <= 2048
    assert config.steps >= 100 and config.steps * config.tokens_per_step >= 3 * dataset.tokens("train") * 0.99


def test_from_nothing_conversations_fit_whole_too(tmp_path: Path) -> None:
    data = tmp_path / "talks.jsonl"
    data.write_text(3 * (json.dumps({"messages": talk("Say it.", 90 * "word ")}) + "\n"))
    words = ["--tokenizer", "bytes", "--validation-fraction", "0.4", "--out", str(tmp_path / "talks"), "--workers", "1"]
    assert main(["prepare", "--chat", str(data), *words]) == 0
    longest = max(document_lengths(open_dataset(str(tmp_path / "talks")), "train"))
    config = run_config("", "", "", {"data": str(tmp_path / "talks"), "device": "cpu", "out": "none", "num_layers": 2})
    assert 256 < longest <= config.sequence_length <= 1024


def test_a_small_run_learns_twenty_conversations(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """By the bare commands: the answers, which have a form, become likely. Half of the first loss is left at most."""
    out, _ = make_checkpoint(
        tmp_path / "weights", "bytes", sizes=(1, 2, 32, 256), spread=0.05, data="shards/x", learning_rate=4e-3
    )
    rows = [talk(f"Day {n}?", f"It is day {n}.") for n in range(20)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    assert (
        main(["prepare", "--chat", str(tmp_path / "a.jsonl"), "--tokenizer", str(out), "--out", str(tmp_path / "few")]) == 0
    )
    command = ["train", "--init-from", str(out), "--data", str(tmp_path / "few"), "--out", str(tmp_path / "run")]
    assert main([*command, "--device", "cpu"]) == 0, capsys.readouterr().err
    losses = [line["loss"] for line in records(tmp_path / "run", ("validation",))]
    assert losses[0] > 5 and losses[-1] < losses[0] / 2


def test_what_is_given_counts() -> None:
    """Each alone and with the others, the rest is chosen so that the run can be made."""
    for given in ({}, {"tokens_per_step": 1536}, {"micro_batch": 3}, {"sequence_length": 100}, {"lanes": 4}):
        for more in ({}, {"sequence_length": 96}, {"micro_batch": 2}):
            config = fitted({**given, **more} if given.keys() != more.keys() else given)
            assert all(getattr(config, name) == value for name, value in {**more, **given}.items() if name not in more)
    config = fitted({})
    assert (config.sequence_length, config.tokens_per_step, config.micro_batch) == autosize.CPU_LIMITS
    assert fitted({"sequence_length": 4096}).sequence_length == 4096, "more than the rule would take"
    assert fitted({"tokens_per_step": 128}).sequence_length == 128


def test_a_small_corpus_gets_small_steps() -> None:
    config = fitted({}, 4000)
    assert config.sequence_length == 32 and config.tokens_per_step <= 1000, "the validation split has 64 tokens"
    assert fitted({}, 100).tokens_per_step == 32, "a step of one row"


def test_a_small_gpu_gets_a_small_micro_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autosize, "fits", lambda config, vocab_size, device: config.micro_batch <= 2)
    config = fitted({}, device=torch.device("cuda"))
    assert (config.sequence_length, config.tokens_per_step, config.micro_batch) == (2048, 16384, 2)
    assert fitted({"micro_batch": 8}, device=torch.device("cuda")).micro_batch == 8


def test_a_run_of_ours_goes_on_at_half_its_rate(shards: Path, tmp_path: Path) -> None:
    small = SimpleNamespace(data=str(shards), out=str(tmp_path / "first"))
    sizes = {"num_layers": 1, "num_heads": 2, "channels": 16, "sequence_length": 32, "tokens_per_step": 64}
    sizes |= {"steps": 1, "micro_batch": 2, "eval_tokens": 64, "sample_tokens": 0, "device": "cpu", "learning_rate": 1e-3}
    train(check(RunConfig(data=small.data, out=small.out, **sizes)))
    assert find(small.out).step == 1
    assert autosize.suited_rate(small.out, adapters=False) == 5e-4
    assert autosize.suited_rate(f"{small.out}/best", adapters=True) == 1e-3
    assert autosize.suited_rate("someone/model", adapters=True) == 2e-4
    chosen = run_config("", "", "", {"init_from": small.out, "data": small.data, "out": str(tmp_path / "second")})
    assert (chosen.learning_rate, chosen.sequence_length) == (5e-4, 32)


def test_a_plan_needs_no_data(weights: Path) -> None:
    config = run_config("", "", "", {"init_from": str(weights), "device": "cpu"})
    assert (config.sequence_length, config.tokens_per_step, config.micro_batch) == autosize.CPU_LIMITS
    there = run_config("", "", "", {"init_from": str(weights)}, "plan", device="meta")
    assert (there.sequence_length, there.tokens_per_step) == autosize.GPU_LIMITS[:2], "as a GPU would have it, without one"
    assert there.device == RunConfig.device


def test_the_documentation_has_the_rule() -> None:
    text = (Path(__file__).parents[1] / "docs/finetuning.md").read_text()
    for device, limits in (("CPU", autosize.CPU_LIMITS), ("GPU", autosize.GPU_LIMITS)):
        length, tokens, micro_batch = limits
        assert f"| {device} | {length} | {tokens:,} | {micro_batch} |" in text
    rates = autosize.LEARNING_RATE, autosize.ADAPTERS_LEARNING_RATE
    assert "{:.0e} and {:.0e}".format(*rates).replace("e-0", "e-") in text and autosize.EPOCHS == 3
