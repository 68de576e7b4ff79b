"""The first commands: one message to a model, an export by a flag, epochs, few steps of a preset, a curve."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

import handgrad
from handgrad.cli import main
from handgrad.commands.arguments import parse
from handgrad.data.shards import open_dataset
from handgrad.errors import UsageError
from handgrad.run import autosize
from handgrad.run.open import train
from handgrad.run.packing import training_batches
from handgrad.run.settings import run_config
from handgrad.settings import presets, recipes
from handgrad.settings.config import RunConfig
from handgrad.storage.checkpoint import peek_config
from tests.interop.models import make_checkpoint
from tests.test_commands import refused


def test_a_message_as_a_flag_of_chat(
    tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One answer, nothing else on stdout; nothing is read from stdin, and /quit is a message like any other."""
    run = str(make_checkpoint(tmp_path / "run", "bytes", chat=True, sizes=(2, 2, 32, 160))[0])
    said = []
    monkeypatch.setattr("handgrad.commands.chat.answer", lambda prompt, *_: said.append(prompt.messages) or print("Hello."))
    monkeypatch.setattr("sys.stdin", None)
    for message in ("Hi!", "/quit"):
        assert main(["chat", run, "--prompt", message, "--device", "cpu"]) == 0
        assert capsys.readouterr().out == "Hello.\n" and said.pop()[-1] == {"role": "user", "content": message}
    assert "--prompt is empty" in refused(capsys, 64, "chat", run, "--prompt", " ")


def test_an_export_names_its_folder_once(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """By its place or as a flag, before or after the other flags; the format is hf unless --to names another."""
    run = str(make_checkpoint(tmp_path / "run", "bytes")[0])
    for number, words in enumerate((["--out", "DIR"], ["DIR"], ["--dtype", "bf16", "DIR"], ["--to", "llmc", "DIR"])):
        out = tmp_path / f"exported {number}"
        assert main(["export", run, *(str(out) if word == "DIR" else word for word in words)]) == 0, capsys.readouterr().err
        assert any(out.glob("model*"))
    assert "expected one of DIR and --out DIR, found neither; `handgrad export" in refused(capsys, 64, "export", run)
    assert "found both, a and b" in refused(capsys, 64, "export", run, "a", "--out", "b")


SIZES = ["--sequence-length", "32", "--tokens-per-step", "8192", "--micro-batch", "8", "--device", "cpu"]
SMALL = ["--num-layers", "1", "--channels", "32", "--num-heads", "2", "--sample-tokens", "0"]


@pytest.mark.nightly(but=["start1", "start3"])
@pytest.mark.parametrize("start", [["tiny"], ["tiny", "--packing", "whole"], ["tiny", "--batch-schedule", "1:16384"], []])
def test_epochs_become_steps_once(start: list[str], shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """The run says how many, makes the fewest that suffice, keeps them in its folder, and resumes by the same command."""
    out = tmp_path / "run"
    command = ["train", *start, "--data", str(shards), "--out", str(out), *SIZES, *(SMALL if start else [])]
    if start:
        assert main([*command, "--epochs", "1.5"]) == 0
        lines = capsys.readouterr().out
        (steps,) = re.findall(r"^epochs     1\.5 epochs = (\d+) steps$", lines, re.MULTILINE)
        assert f" = {steps} steps" in (out / "log.txt").read_text(), "the run prints it, which goes on without a reader"
        begun = peek_config(out)
        assert begun is not None and begun["steps"] == int(steps) and "epochs" not in begun
        resolved = RunConfig(**begun)
        asked = 1.5 * training_batches(resolved, open_dataset(shards)).samples_per_epoch * 32
        assert resolved.batch.tokens_before(int(steps) - 1) < asked <= resolved.batch.tokens_before(int(steps))
        assert main([*command, "--epochs", "1.5"]) == 0 and "is finished" in capsys.readouterr().out
    with_steps = [*command, "--epochs", "3", "--steps", "4"]
    assert "found steps 4 and epochs 3.0; leave one of them out" in refused(capsys, 64, *with_steps)
    assert "epochs must be a number above 0, found 0.0" in refused(capsys, 64, *command, "--epochs", "0")


def test_epochs_of_a_bare_run_pace_it(shards: Path, tmp_path: Path) -> None:
    """The warm-up, validations and saves follow the steps, as without epochs."""
    words = ["--data", str(shards), "--out", str(tmp_path / "run"), "--device", "cpu"]
    config = parse("train", [*words, "--epochs", "30"]).run_config
    again = parse("train", [*words, "--steps", str(config.steps)]).run_config
    assert config == again and config.steps > 100 and config.warmup_steps == config.steps // 10


def test_epochs_in_a_recipe_and_in_python(shards: Path, tmp_path: Path) -> None:
    """A flag --steps wins over a recipe's epochs, --epochs over its steps."""
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(f'preset = "tiny"\nepochs = 2\ndata = "{shards}"\n')
    steps = run_config("", str(recipe), "", {}).steps
    assert steps == handgrad.preset("tiny", data=shards, epochs=2).steps
    assert run_config("", str(recipe), "", {"steps": 7}).steps == 7
    recipe.write_text(f'preset = "tiny"\nsteps = 2\ndata = "{shards}"\n')
    assert run_config("", str(recipe), "", {"epochs": 2.0}).steps == steps
    recipe.write_text(f'preset = "tiny"\nepochs = 0.1\nwarmup_steps = 30\ndata = "{shards}"\n')
    own = run_config("", str(recipe), "", {})
    assert own.warmup_steps == 30 > own.steps / 4, "its own epochs cut no warm-up of its own, as its own steps do not"
    assert run_config("", str(recipe), "", {"epochs": 0.1}).warmup_steps < 30
    assert run_config("", str(recipe), "", {"warmup_steps": 9}).warmup_steps == 9
    with pytest.raises(UsageError, match="epochs must be a number above 0, found 'two'"):
        handgrad.preset("tiny", data=shards, epochs="two")  # type: ignore[arg-type]


# The warm-up.


@pytest.mark.parametrize("name", presets.PRESETS)
def test_a_presets_own_steps_keep_its_warm_up(name: str) -> None:
    config = presets.PRESETS[name]()
    assert run_config(name, "", "", {}) == config
    assert run_config(name, "", "", {"steps": config.steps}) == config
    assert run_config(name, "", "", {"steps": 20}).warmup_steps == min(5, config.warmup_steps)
    assert run_config(name, "", "", {"steps": 20, "warmup_steps": 30}).warmup_steps == 30


@pytest.mark.parametrize("name", recipes.recipe_names())
def test_a_recipes_own_steps_keep_its_warm_up(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("handgrad.run.settings.from_weights", lambda settings, planned, bare: settings)
    own = run_config("", name, "", {})
    assert own.warmup_steps < own.steps
    assert run_config("", name, "", {"steps": 8}).warmup_steps <= 2


def test_a_resumed_run_keeps_its_warm_up(config: RunConfig, shards: Path, tmp_path: Path) -> None:
    """One that goes on for more steps, and one of an earlier version, which took the preset's whole warm-up."""
    settings = {"data": str(shards), "out": str(tmp_path / "run"), "steps": "8", "device": "cpu", "sample_tokens": "0"}
    first = run_config("tiny", "", "", settings)
    train(first)
    assert (first.warmup_steps, run_config("tiny", "", "", settings | {"steps": "800"}).warmup_steps) == (2, 2)
    train(replace(first, out=str(tmp_path / "old"), warmup_steps=50))
    train(run_config("tiny", "", "", settings | {"out": str(tmp_path / "old")}))


def test_the_small_presets_are_gpt2_at_the_sizes_of_the_modern_ones() -> None:
    for depth in (4, 6):
        small, modern = presets.preset(f"d{depth}"), presets.preset(f"m{depth}")
        assert small.architecture == "gpt2" and small.optimizer == "adamw" and small.channels // small.num_heads == 64
        for name in ("num_layers", "channels", "steps", "tokens_per_step", "sequence_length"):
            assert getattr(small, name) == getattr(modern, name), name


# The curve.


def test_a_curve_in_the_terminal_and_in_a_file(
    config: RunConfig, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", "b"):
        train(replace(config, out=str(tmp_path / "runs" / name), learning_rate={"a": 1e-3, "b": 1e-2}[name]))
    capsys.readouterr()
    for width in (60, 100):
        monkeypatch.setenv("COLUMNS", str(width))
        assert main(["plot", str(tmp_path / "runs" / "a")]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert max(map(len, lines)) <= width and lines[-2:][0].split() == ["*", "a,", "training", lines[-2].split()[-1]]
        plot = [line.partition("|")[2] for line in lines if "|" in line]
        marks = [(row, cells.index("*")) for row, cells in enumerate(plot) if "*" in cells]
        assert marks[0][0] == 0 and marks == sorted(marks, key=lambda mark: mark[1]), "the loss falls to the right"
        assert sum("o" in line for line in plot) and lines[-1].split()[:2] == ["o", "validation"]
        assert float(lines[0].split()[0]) > float(lines[15].split()[0])
    assert main(["plot", str(tmp_path / "runs")]) == 0
    shown = capsys.readouterr().out
    assert "* a, training" in shown and "+ b, training" in shown and "validation" not in shown
    picture = tmp_path / "both.png"
    assert main(["plot", str(tmp_path / "runs"), "--out", str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG") and capsys.readouterr().out == f"{picture}\n"
    assert "there is no run" in refused(capsys, 65, "plot", str(tmp_path / "nothing"))
    assert "writes PNG" in refused(capsys, 64, "plot", str(tmp_path / "runs"), "--out", str(tmp_path / "losses.jpg"))


def test_the_intervals_of_a_chosen_run_are_round(shards: Path) -> None:
    """So that its lines, validations and saves stand at round steps."""
    for steps in (37, 1372, 9999):
        chosen = autosize.chosen_settings({"data": str(shards), "device": "cpu", "out": "none", "steps": steps})
        for name in ("log_every", "eval_every", "sample_every", "save_every"):
            assert re.fullmatch(r"[125]0*|250", str(chosen[name])), (steps, name, chosen[name])
