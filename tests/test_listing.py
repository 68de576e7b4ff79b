"""`handgrad runs`: every state of a run, told from its files alone."""

import dataclasses
import fcntl
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from handgrad.cli import main
from handgrad.errors import ConfigError, NumericsError, Preempted
from handgrad.format import human_seconds
from handgrad.run.listing import list_runs
from handgrad.run.open import train
from handgrad.settings.config import RunConfig, to_toml
from handgrad.storage import run_files
from handgrad.storage.run_files import LOCK_FILE, take_lock
from handgrad.training.step import TrainStep
from tests.test_commands import refused
from tests.test_runs import elsewhere, interrupt_at

RUN = {"kind": "run", "step": 0, "parameters": 124475904, "steps": 20}


def write_run(folder: Path, *lines: dict[str, Any], age: int = 0) -> Path:
    """A run folder of these lines, last written `age` seconds after the beginning of 2001."""
    folder.mkdir(parents=True)
    (folder / ".lock").touch()
    (folder / "config.toml").write_text(to_toml(RunConfig(steps=20)))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for path in folder.iterdir():
        os.utime(path, (978307200 + age, 978307200 + age))
    return folder


def stop(code: int, **more: Any) -> dict[str, Any]:
    return {"kind": "stop", "step": 7, "code": code, "reason": f"reason {code}", **more}


@pytest.mark.parametrize(
    ("last", "state"),
    [
        ([], "crashed"),
        ([stop(75, signal="SIGTERM")], "waiting"),
        ([stop(75)], "waiting"),
        ([stop(0)], "waiting"),
        ([stop(75, signal="SIGINT")], "stopped"),
        ([stop(130)], "stopped"),
        ([stop(76)], "failed"),
        ([stop(76), RUN], "crashed"),
        ([{"kind": "end", "step": 20}], "finished"),
        ([stop(1), RUN, {"kind": "end", "step": 20}, {"kind": "evaluation", "step": 20}], "finished"),
    ],
)
def test_the_state_follows_from_the_last_marker(last: list[dict[str, Any]], state: str, tmp_path: Path) -> None:
    """Lock or no lock: a process that holds it is at work."""
    steps = [{"kind": "step", "step": 7}, {"kind": "validation", "step": 7, "loss": 3.25}]
    folder = write_run(tmp_path / "run", RUN, *steps, *last)
    (found,) = list_runs(tmp_path)
    assert (found.state, found.step, found.steps, found.validation_loss) == (state, 7, 20, 3.25)
    assert bool(found.reason) is (state == "failed")
    with take_lock(folder):
        assert list_runs(tmp_path)[0].state == "running"


@pytest.mark.parametrize(
    ("schedule", "left"),
    [("", 100 / 5 * 10), ("10:2048", 100 / 5 * 20), ("6:2048", 100 / (1 + 4 * 2) * 10 * 2)],
    ids=["steps of one size", "a batch that grows later", "a batch that grew"],
)
def test_the_time_left_of_a_running_run(schedule: str, left: float, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Of tokens, as a batch may grow, since the last start: here after step 5, with 15 of 20 steps left to make then."""
    start = {**RUN, "step": 5, "time": 1000.0}
    last = {"kind": "step", "step": 10, "time": 1100.0}
    folder = write_run(tmp_path / "run", {**RUN, "time": 3.0}, {"kind": "step", "step": 5, "time": 9.0}, start, last)
    recipe = RunConfig(steps=20, tokens_per_step=1024, batch_schedule=schedule)
    (folder / "config.toml").write_text(to_toml(recipe))
    assert list_runs(tmp_path)[0].seconds_left is None, "nobody is at work"
    with take_lock(folder):
        (found,) = list_runs(tmp_path)
        assert found.seconds_left == pytest.approx(left) and found.exit_code is None
        capsys.readouterr()
        assert main(["runs", str(tmp_path)]) == 0
        assert (
            capsys.readouterr().out.splitlines()[-1]
            == f"running  run: {human_seconds(left)} left at the pace of this start"
        )
        (folder / "metrics.jsonl").write_text(json.dumps(start) + "\n")
        assert list_runs(tmp_path)[0].seconds_left is None, "no step yet"


def test_a_look_at_the_lock_refuses_no_trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`handgrad runs` holds it, shared, for an instant; a trainer that starts in it waits up to a second."""
    (tmp_path / LOCK_FILE).touch()
    waited = []
    with (tmp_path / LOCK_FILE).open("rb") as looking:
        fcntl.flock(looking, fcntl.LOCK_SH)

        def sleep(seconds: float) -> None:
            waited.append(seconds)
            if len(waited) == 3:
                looking.close()

        monkeypatch.setattr(run_files, "sleep", sleep, raising=False)
        with take_lock(tmp_path), pytest.raises(ConfigError, match="another process is training"):
            assert len(waited) == 3
            take_lock(tmp_path)
    assert 0.9 < sum(waited[3:]) < 1.1


def test_real_runs(config: RunConfig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each ended in its own way."""
    config = dataclasses.replace(config, steps=4, eval_every=2, save_every=2, out=str(tmp_path / "runs" / "done"))
    train(config)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        interrupt_at(patch, 2)
        train(elsewhere(config, "interrupted"))
    original = TrainStep.begin

    def signalled(number: int) -> None:
        def begin(training: TrainStep, step: int) -> None:
            if step == 1:
                os.kill(os.getpid(), number)
            original(training, step)

        with monkeypatch.context() as patch, pytest.raises(Preempted):
            patch.setattr(TrainStep, "begin", begin)
            train(elsewhere(config, signal.Signals(number).name))

    signalled(signal.SIGTERM)
    signalled(signal.SIGINT)
    with pytest.raises(NumericsError):
        train(elsewhere(config, "diverged", learning_rate=1e30, warmup_steps=0))
    found = {run.name: run for run in list_runs(tmp_path / "runs")}
    states = {name: run.state for name, run in found.items()}
    assert states == {
        "done": "finished",
        "interrupted": "stopped",
        "SIGTERM": "waiting",
        "SIGINT": "stopped",
        "diverged": "failed",
    }
    assert found["diverged"].exit_code == 76 and "finite" in found["diverged"].reason
    assert found["done"].validation_loss and found["done"].size_bytes > 10_000
    train(elsewhere(config, "SIGTERM"))
    assert {run.name: run.state for run in list_runs(tmp_path / "runs")}["SIGTERM"] == "finished"


def test_the_table(tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Newest first, at most 80 characters a row, a broken folder by its reason, and the same as JSON."""
    monkeypatch.setenv("COLUMNS", "80")
    step = {"kind": "step", "step": 7, "loss": 4.0}
    long = "a/sweep/learning_rate=0.0003,seed=1,weight_decay=0.1,warmup_steps=100"
    write_run(tmp_path / long, RUN, step, {"kind": "validation", "step": 7, "loss": float("nan")}, age=100)
    write_run(tmp_path / "b", RUN, {"kind": "step", "step": 20}, {"kind": "end", "step": 20}, age=300)
    write_run(tmp_path / "odd", RUN, age=200)
    (tmp_path / "odd" / "metrics.jsonl").write_text('{"kind": "run", "steps": \n')
    os.utime(tmp_path / "odd" / "metrics.jsonl", (978307400, 978307400))
    (tmp_path / "no run").mkdir()
    write_run(tmp_path / "cut", RUN, step, age=50)
    with (tmp_path / "cut" / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "step", "st')
    os.utime(tmp_path / "cut" / "metrics.jsonl", (978307250, 978307250))
    (tmp_path / "link").symlink_to(tmp_path / "b")
    assert main(["runs", str(tmp_path)]) == 0
    heading, *lines = capsys.readouterr().out.splitlines()
    assert heading.split() == ["run", "model", "step", "loss", "size", "state", "written"]
    assert [line.split()[0] for line in lines[:2]] == ["b", "link"] and "124.5M" in lines[0] and "20/20" in lines[0]
    assert lines[2].startswith("odd ") and "broken" in lines[2]
    assert lines[3].startswith("…") and "warmup_steps=100 " in lines[3] and "crashed" in lines[3]
    assert lines[4].startswith("cut ") and " 7/20 " in lines[4]
    assert all(len(line) <= 80 for line in [heading, *lines[:5]])
    assert lines[5].startswith("broken   odd: expected a JSON object") and len(lines) == 6
    assert main(["runs", str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [run["name"] for run in found] == ["b", "link", "odd", long, "cut"]
    assert found[0]["state"] == "finished" and found[0]["written"] == "2001-01-01T00:05:00+00:00"
    assert found[3]["validation_loss"] is None and found[3]["parameters"] == 124475904
    assert main(["runs", str(tmp_path / "no run")]) == 0
    assert capsys.readouterr().out == f"no runs in {tmp_path / 'no run'}\n"
    assert "is no folder" in refused(capsys, 65, "runs", str(tmp_path / "nothing"))


@pytest.mark.parametrize("damage", ["metrics.jsonl", "config.toml", "binary", "toml", "empty"])
def test_a_broken_run_has_its_reason(damage: str, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", RUN)
    if damage in ("metrics.jsonl", "config.toml"):
        (folder / damage).unlink()
    else:
        name, content = {
            "binary": ("config.toml", b"\xff\xfe"),
            "toml": ("config.toml", b"steps = = many"),
            "empty": ("metrics.jsonl", b""),
        }[damage]
        (folder / name).write_bytes(content)
    (found,) = list_runs(tmp_path)
    assert found.state == "broken" and str(folder) in found.reason
    with take_lock(folder):
        assert list_runs(tmp_path)[0].state == "running", "it is still starting"


def test_no_torch_is_loaded(tmp_path: Path) -> None:
    write_run(tmp_path / "run", RUN)
    code = "import sys; from handgrad.cli import main; main(sys.argv[1:]); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code, "runs", str(tmp_path)], check=True, stdout=subprocess.DEVNULL)
