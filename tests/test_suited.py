"""`handgrad train --data DIR` and at most a network's sizes: a run that suits the data and the machine."""

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from handgrad.cli import main
from handgrad.run import autosize
from handgrad.run.resolve import resolve
from handgrad.run.settings import run_config
from handgrad.settings.config import RunConfig, check, to_dict
from handgrad.storage.checkpoint import peek_config

GPU = torch.device("cuda")


def corpus(tokens: float, vocab_size: int = 50257) -> Any:
    """Of so many training tokens, a hundredth of them for validation."""
    counts = {"train": int(tokens), "validation": max(64, int(tokens) // 100)}
    splits = {split: [SimpleNamespace(token_count=count)] for split, count in counts.items()}
    tokenizer = SimpleNamespace(vocab_size=vocab_size)
    return SimpleNamespace(tokens=counts.get, splits=splits, tokenizer=tokenizer, is_chat=False, manifest=None, codes=None)


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Of a GPU that this machine need not have; plans are made as on a CPU in bf16."""
    found = {"bytes": 141e9}
    properties = lambda device: SimpleNamespace(total_memory=found["bytes"])  # noqa: E731
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)

    def planned(config: RunConfig, vocab_size: int, *, device: torch.device) -> Any:
        return resolve(dataclasses.replace(config, precision="bf16", device="cpu"), vocab_size)

    monkeypatch.setattr(autosize, "resolve", planned)
    return found


def sizes(config: RunConfig) -> tuple[int, int, int]:
    return config.num_layers, config.channels, config.micro_batch


def chosen(tokens: float, device: torch.device, vocab_size: int = 50257) -> RunConfig:
    return check(RunConfig(**autosize.suited_settings(corpus(tokens, vocab_size), device, {})))


def test_the_model_grows_with_the_corpus(memory: dict[str, float]) -> None:
    """Every corpus gets a run that can be made, with an evaluation and a checkpoint before its end."""
    runs = {tokens: chosen(tokens, GPU) for tokens in (1e3, 1e5, 1e6, 5e7, 1e9, 1e10, 2e10, 1e11)}
    assert [sizes(run)[:2] for run in runs.values()] == [
        *[(6, 384)] * 3,
        (8, 512),
        (12, 768),
        (24, 1024),
        (36, 1280),
        (48, 1600),
    ]
    for tokens, run in runs.items():
        assert run.tokens_per_step <= max(tokens / 4, run.sequence_length)
        assert run.steps * run.tokens_per_step <= max(10 * tokens, autosize.LEAST_STEPS * run.tokens_per_step)
        assert run.eval_every < run.steps and run.save_every < run.steps and run.warmup_steps < run.steps
    assert runs[1e9].steps == round(4e9 / 524288) and runs[1e9].micro_batch == 64


def test_a_smaller_gpu_gets_a_smaller_micro_batch_or_model(memory: dict[str, float]) -> None:
    assert sizes(chosen(1e9, GPU)) == (12, 768, 64)
    memory["bytes"] = 24e9
    small = sizes(chosen(1e9, GPU))
    assert small[:2] == (12, 768) and small[2] in (16, 32)
    memory["bytes"] = 16e9
    assert sizes(chosen(1e11, GPU))[0] < 48
    memory["bytes"] = 1e6
    assert sizes(chosen(1e11, GPU)) == (6, 384, 1), "the smallest, which the run refuses with advice"


def test_a_cpus_run_takes_minutes() -> None:
    """The same work whatever the vocabulary; a small corpus is seen at most forty times; the learning rate
    ends at zero."""
    cpu, flops = torch.device("cpu"), []
    for vocab_size in (256, 1024, 50257):
        run = chosen(1e8, cpu, vocab_size)
        shape = run.shape(vocab_size)
        flops.append(run.steps * run.tokens_per_step * shape.flops_per_token)
        assert run.eval_tokens == run.eval_every * run.tokens_per_step, "no more than were trained since the last"
    assert flops == pytest.approx([autosize.CPU_FLOPS] * 3, rel=0.01)
    run = chosen(2e4, cpu, 256)
    assert run.steps * run.tokens_per_step <= 40.5 * 2e4
    assert (run.schedule, run.final_learning_rate_fraction) == ("linear", 0.0) and run.warmup_steps == run.steps // 10


def test_lanes_share_the_batch(memory: dict[str, float], monkeypatch: pytest.MonkeyPatch, shards: Path) -> None:
    """Also where there are more of them than rows in a step, and where ranks decide their number."""
    for device in (GPU, torch.device("cpu")):
        for tokens in (1e3, 1e6, 1e9):
            for lanes in (1, 2, 8, 128):
                run = check(RunConfig(**autosize.suited_settings(corpus(tokens), device, {"lanes": lanes}), lanes=lanes))
                assert run.micro_batch * lanes * run.sequence_length <= run.tokens_per_step
    alone, wanted = chosen(1e6, GPU), {"data": str(shards), "device": "cpu", "out": "none"}
    shared = RunConfig(**autosize.suited_settings(corpus(1e6), GPU, {"lanes": 2}))
    assert shared.tokens_per_step == alone.tokens_per_step and shared.micro_batch == alone.micro_batch // 2
    one, four = (autosize.chosen_settings(wanted | {"lanes": lanes})["micro_batch"] for lanes in (1, 4))
    for name, value in {"WORLD_SIZE": 4, "RANK": 0, "LOCAL_WORLD_SIZE": 4, "LOCAL_RANK": 0, "MASTER_ADDR": "here"}.items():
        monkeypatch.setenv(name, str(value))
    assert one > four == autosize.chosen_settings(wanted)["micro_batch"]


OWN = {"num_layers": 2, "num_heads": 2, "channels": 256}
CHANGES: tuple[dict[str, Any], ...] = (
    {},
    {"micro_batch": 3},
    {"tokens_per_step": 1024},
    {"sequence_length": 20},
    {"micro_batch": 2, "lanes": 4},
    {"learning_rate": 1e-3, "steps": 7},
    {"architecture": "modern", "techniques": ""},
)


@pytest.mark.parametrize("changes", CHANGES, ids=str)
def test_sizes_of_ones_own_leave_the_rest_to_the_rule(shards: Path, changes: dict[str, Any]) -> None:
    """Whatever else is named, but a batch schedule."""
    named = OWN | {"data": str(shards), "device": "cpu", "out": "none"} | changes
    run = check(run_config("", "", "", named))
    assert to_dict(run).items() >= (named | {"techniques": run.techniques}).items()
    assert run.tokens_per_step == changes.get("tokens_per_step", run.tokens_per_step) <= 2048
    assert (run.schedule, run.final_learning_rate_fraction) == ("linear", 0.0) and 0 < run.warmup_steps < run.steps
    assert run.learning_rate == changes.get("learning_rate", 0.4 / 256), "by the width"


def test_a_part_of_the_sizes(shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads keep their width, the rule's own width its rate. Beside a batch schedule, or without data, nothing changes."""
    there = {"data": str(shards), "device": "cpu", "out": "none"}
    run = check(run_config("", "", "", there | {"num_layers": 2, "num_heads": 6}))
    assert run.channels == 6 * 32 and run.learning_rate == 0.4 / 192
    assert run_config("", "", "", there | {"num_layers": 2}).learning_rate == autosize.CPU_SIZES[0].learning_rate
    scheduled = run_config("", "", "", there | OWN | {"batch_schedule": "1:8192"})
    assert scheduled == RunConfig(**there, **OWN, batch_schedule="1:8192")
    monkeypatch.chdir(tmp_path)
    assert run_config("", "", "", dict(OWN)) == RunConfig(**OWN), "no data are prepared here"
    (tmp_path / RunConfig.data).symlink_to(shards)
    assert run_config("", "", "", OWN | {"device": "cpu"}).tokens_per_step <= 2048, "of the default folder"


def test_sizes_without_prepared_data_are_planned(shards: Path, capsys: pytest.CaptureFixture) -> None:
    """A value out of range is refused before anything is chosen by it."""
    words = ["plan", "--num-layers", "2", "--gpu", "h100"]
    assert main([*words, "--data", "nowhere"]) == 0
    assert f"{RunConfig.steps} steps of {RunConfig.tokens_per_step} tokens" in capsys.readouterr().out
    assert main(["plan", "--num-layers", "2", "--channels", "0", "--data", str(shards)]) == 64
    assert "channels must be at least 1, found 0" in capsys.readouterr().err


@pytest.mark.parametrize("sizes", [[], ["--num-layers", "2"]], ids=str)
def test_a_plan_chooses_for_the_machine_that_it_names(
    shards: Path, sizes: list[str], capsys: pytest.CaptureFixture
) -> None:
    """Not for this one: as many lanes as ranks share a step, and a GPU's network is wider."""
    plan = ["plan", *sizes, "--data", str(shards), "--out", "none"]
    assert main([*plan, "--ranks", "4", "--device", "cpu"]) == 0
    printed = capsys.readouterr().out
    assert " = 4 lanes x 1 x " in printed and "128 channels" in printed
    assert main([*plan, "--gpu", "h100", "--gpus", "2", "--device", "cuda"]) == 0
    printed = capsys.readouterr().out
    assert " = 2 lanes x 1 x " in printed and "384 channels" in printed
    assert main([*plan, "--gpu", "h100", "--gpus", "2", "--lanes", "4"]) == 0
    assert " = 4 lanes x 1 x " in capsys.readouterr().out


def test_the_bare_command(
    shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It trains, goes on with the same sizes when the corpus would now give others, and lets an option win."""
    out = tmp_path / "run"
    command = ["train", "--data", str(shards), "--out", str(out), "--device", "cpu", "--sample-tokens", "0"]
    options = ["--steps", "3", "--eval-tokens", "1024"]
    assert main([*command, *options]) == 0
    first = peek_config(out)
    assert first is not None and first["num_layers"] == 4 and first["steps"] == 3 and first["data"] == str(shards)
    settings = autosize.chosen_settings({"data": str(tmp_path / "nothing"), "out": str(out), "device": "cpu"})
    assert settings == {name: first[name] for name in autosize.CHOSEN}, "without a look at the data"
    assert main([*command, *options]) == 0
    monkeypatch.chdir(tmp_path)
    assert main(["train"]) == 64
    assert "say what to train: nothing is prepared in shards yet; `handgrad prepare" in capsys.readouterr().err


def test_the_table_of_the_documentation_is_the_rule() -> None:
    text = (Path(__file__).parents[1] / "docs/training.md").read_text()
    for size in (*autosize.GPU_SIZES, *autosize.CPU_SIZES):
        cells = [f"{size.num_layers}, {size.channels}", f"| {size.sequence_length} | {size.tokens_per_step:,} |"]
        rate = f"{size.learning_rate:.1e}".replace(".0e", "e").replace("e-0", "e-")
        row = next(line for line in text.split("\n") if line.startswith("|") and cells[1] in line and cells[0] in line)
        assert row.endswith(f"| {rate} | {size.epochs} |"), row
    assert "No run has more than 20,000 steps." in text and autosize.MOST_STEPS == 20_000
