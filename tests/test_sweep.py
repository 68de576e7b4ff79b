"""`handgrad sweep`: every combination once, whatever fails or ends in between, and what came of it."""

import json
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from handgrad.api.records import metrics
from handgrad.cli import main
from handgrad.commands.arguments import parse
from handgrad.machine import devices
from handgrad.run.listing import list_runs
from handgrad.tools import sweep
from handgrad.tools.sweep import Group, gpu_places
from tests.test_commands import SMALL, refused

if TYPE_CHECKING:  # it imports tests that use this module's fixtures
    from tests.distributed.runs import Launcher

Arguments = Callable[..., list[str]]


@pytest.fixture
def command(shards: Path, tmp_path: Path, launcher: "Launcher", monkeypatch: pytest.MonkeyPatch) -> Arguments:
    """`handgrad sweep` of runs of four steps, forks of a process that has imported everything."""
    monkeypatch.setenv("PYTHON_EXEC", str(launcher.write_program(tmp_path / "python")))

    def arguments(*over: str, more: tuple[str, ...] = ()) -> list[str]:
        quick = ["--sample-tokens", "0", "--save-every", "2"]
        return ["sweep", *SMALL, *quick, "--data", str(shards), "--out", str(tmp_path / "sweep"), *more, "--over", *over]

    return arguments


def results(folder: Path) -> dict:
    return json.loads((folder / "sweep" / "sweep.json").read_text())


@pytest.mark.report
def test_a_sweep_and_the_same_again(command: Arguments, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Two at once; a run that diverges stops no other; the second call runs only that one."""
    given = command("learning_rate=1e-3,1e30", "seed=1,2", more=("--jobs", "2", "--warmup-steps", "0"))
    assert main(given) == 76
    told = capsys.readouterr()
    folder = tmp_path / "sweep"
    found = {run.name: run.state for run in list_runs(folder)}
    good, bad = ([f"learning_rate={rate},seed={seed}" for seed in (1, 2)] for rate in ("0.001", "1e+30"))
    assert {name for name, state in found.items() if state == "finished"} == set(good)
    assert found.keys() <= {*good, *bad}
    for name in bad:
        assert f"failed     {name} (exit code 76): " in told.err
    assert "finite" in told.err and "Traceback" not in told.err
    content = results(tmp_path)
    assert [run["exit_code"] for run in content["runs"]] == [0, 0, 76, 76]
    losses = [run["validation_loss"] for run in content["runs"][:2]]
    assert content["best"]["settings"] == {"learning_rate": 0.001} and content["best"]["validation_losses"] == losses
    assert content["best"]["mean"] == pytest.approx(sum(losses) / 2) and len(content["groups"]) == 1
    assert content["best"]["spread"] == pytest.approx(abs(losses[0] - losses[1]) / 2**0.5)
    error = abs(losses[0] - losses[1]) / 2  # the spread over the root of two runs
    assert content["best"]["standard_error"] == pytest.approx(error)
    line = f"best       learning_rate=0.001: validation loss {content['best']['mean']:.4f} ± {error:.4f} over 2 seeds\n"
    row = f"{content['best']['mean']:.4f}  {error:>9.4f}  {content['best']['spread']:.4f}\n"
    assert line in told.out and row in told.out
    page = (folder / "report.html").read_text()
    assert all(name in page for name in good)
    before = {path: path.read_bytes() for name in good for path in (folder / name).glob("metrics.jsonl")}
    assert main(given) == 76
    told = capsys.readouterr()
    assert [told.out.count(f"{name} was finished, validation loss") for name in good] == [1, 1]
    assert before == {path: path.read_bytes() for path in before}
    assert results(tmp_path) == content


def test_an_interrupted_sweep_goes_on(
    command: Arguments, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C after the first run: one line, 130, no process left; the same command runs the others."""
    given = command("seed=1,2,3")
    started = []

    def start(*arguments: object) -> subprocess.Popen:
        if started:
            os.kill(os.getpid(), signal.SIGINT)
        started.append(original(*arguments))
        return started[-1]

    with monkeypatch.context() as patch:
        original = sweep.start
        patch.setattr(sweep, "start", start)
        assert main(given) == 130
    told = capsys.readouterr()
    assert told.err.startswith("handgrad: stopped by SIGINT with ") and told.err.count("\n") == 1, told.err
    assert len(started) == 2 and all(process.poll() is not None for process in started)
    states = [run["exit_code"] for run in results(tmp_path)["runs"]]
    assert states[0] == 0 and states[2] is None
    assert main(given) == 0
    assert "seed=1 was finished" in capsys.readouterr().out
    assert [run["exit_code"] for run in results(tmp_path)["runs"]] == [0, 0, 0]
    assert [run.state for run in list_runs(tmp_path / "sweep")] == ["finished"] * 3


def test_other_settings_are_not_taken_for_finished(command: Arguments, capsys: pytest.CaptureFixture) -> None:
    assert main(command("seed=1")) == 0
    assert main(command("seed=1", more=("--log-every", "3"))) == 0
    assert "seed=1 was finished" in capsys.readouterr().out, "what does not touch the numbers may change"
    assert main(command("seed=1", more=("--beta1", "0.5"))) == 78
    assert "beta1: 0.9 -> 0.5" in capsys.readouterr().err


def test_it_is_the_run_of_train(command: Arguments, shards: Path, tmp_path: Path) -> None:
    """The same bits."""
    assert main(command("seed=7")) == 0
    alone = [
        "--sample-tokens",
        "0",
        "--save-every",
        "2",
        "--data",
        str(shards),
        "--out",
        str(tmp_path / "alone"),
        "--seed",
        "7",
    ]
    assert main(["train", *SMALL, *alone]) == 0
    files = [f"checkpoints/step_00000004/{name}.safetensors" for name in ("model", "optimizer")]
    for file in files:
        assert (tmp_path / "alone" / file).read_bytes() == (tmp_path / "sweep" / "seed=7" / file).read_bytes()


@pytest.mark.parametrize(
    ("over", "told"),
    [
        (["learning_rat=1"], "unknown setting 'learning_rat' (did you mean learning_rate?)"),
        (["seed=1,x"], "seed must be a whole number, found 'x'"),
        (["seed="], "seed must be a whole number, found ''"),
        (["seed"], "--over takes KEY=VALUE,VALUE,..., found 'seed'"),
        (["seed=1,1.0"], "--over gives seed=1 twice"),
        (["seed=1", "seed=2"], "--over names seed twice"),
        (["out=a,b"], "--over cannot vary out"),
        (["learning_rate=1e-3", "beta1=0.9,2"], "beta1 must be in [0, 1), found 2.0"),
        (["precision=fp32,float16"], "precision must be one of"),
    ],
)
def test_mistakes_are_told_before_anything_starts(
    over: list[str], told: str, shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    where = ["--data", str(shards), "--out", str(tmp_path / "sweep")]
    assert told in refused(capsys, 64, "sweep", "tiny", *where, "--over", *over)
    assert not (tmp_path / "sweep").exists()


def test_the_start_of_a_sweep(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """A preset, a recipe in its place or by --config; the sweep's folder by --out, the recipe, or by default."""
    recipe = tmp_path / "recipe.toml"
    recipe.write_text('preset = "tiny"\nsteps = 7\nout = "from/recipe"\n')
    for words, folder in (
        ([str(recipe)], "from/recipe"),
        (["--config", str(recipe)], "from/recipe"),
        (["tiny", "--steps", "7"], "runs/sweep"),
        (["tiny", "--steps", "7", "--out", "x"], "x"),
    ):
        made = parse("sweep", [*words, "--over", "weight-decay=0,0.1", "overfit_one_batch=true"]).sweep
        assert [str(run.folder) for run in made.runs] == [
            f"{folder}/weight_decay={value},overfit_one_batch=true" for value in ("0.0", "0.1")
        ]
        assert all(run.config.steps == 7 and run.config.overfit_one_batch for run in made.runs)
    assert "--over is missing" in refused(capsys, 64, "sweep", "tiny")
    (run,) = parse("sweep", ["tiny", "--over", "init_from="]).sweep.runs
    assert run.name == "init_from="


def test_a_run_for_each_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    assert gpu_places(None, 0, {}) == [{}] and gpu_places(2, 0, {}) == [{}, {}]
    devices_of = lambda *given: [place["CUDA_VISIBLE_DEVICES"] for place in gpu_places(*given)]  # noqa: E731
    assert devices_of(None, 3, {}) == ["0", "1", "2"]
    assert devices_of(None, 2, {"CUDA_VISIBLE_DEVICES": "5,GPU-7"}) == ["5", "GPU-7"]
    assert devices_of(3, 2, {}) == ["0", "1", "0"] and devices_of(1, 2, {}) == ["0"]
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    for available, count in ((True, 2), (False, 0)):  # a GPU whose driver does not answer is none
        monkeypatch.setattr("torch.cuda.is_available", lambda available=available: available)
        assert devices.gpu_count() == count


def test_a_warm_up_as_long_as_the_run(
    command: Arguments, shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """Runs whose schedule never begins compare nothing: the run says it, and the sweep, once for equal ones."""
    line = "warm-up    10 steps in a run of 4: the learning rate ends at 1.20e-03 on its way to 3.00e-03; --warmup-steps"
    assert main(command("seed=1,2")) == 0
    assert capsys.readouterr().out.count(line) == 1 and line in (tmp_path / "sweep" / "seed=1" / "log.txt").read_text()
    rates = [record["learning_rate"] for record in metrics(tmp_path / "sweep" / "seed=1", "step")]
    assert rates[-1] == pytest.approx(1.2e-3)
    assert main(["train", *SMALL, "--warmup-steps", "3", "--data", str(shards), "--out", str(tmp_path / "run")]) == 0
    assert "warm-up" not in capsys.readouterr().out


def test_groups_are_ordered_by_their_mean() -> None:
    def outcome(rate: float, seed: int, loss: float | None, code: int = 0) -> sweep.Outcome:
        settings = {"learning_rate": rate, "seed": seed}
        run = sweep.SweepRun(f"{rate},{seed}", settings, parse("plan", ["tiny"]).run_config)
        return sweep.Outcome(run, code, loss=loss)

    outcomes = [
        outcome(1.0, 1, 4.0),
        outcome(1.0, 2, 2.0),
        outcome(2.0, 1, 1.0),
        outcome(2.0, 2, 0.5, 76),
        outcome(3.0, 1, None),
    ]
    groups = sweep.groups_of(outcomes)
    assert groups == [Group({"learning_rate": 2.0}, [1.0]), Group({"learning_rate": 1.0}, [4.0, 2.0])]
    assert groups[1].mean == 3.0 and groups[1].spread == pytest.approx(2**0.5) and groups[0].spread is None
    lines = sweep.table(groups)
    assert [line.split() for line in lines[1:]] == [["2.0", "1", "1.0000"], ["1.0", "2", "3.0000", "1.0000", "1.4142"]]
