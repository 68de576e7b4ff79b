"""Ctrl-C ends a command with one line and exit code 130, whatever it is doing; a terminal that goes away stops a training
run like SIGTERM."""

import contextlib
import dataclasses
import fcntl
import json
import os
import pty
import signal
import subprocess
import sys
import termios
import time
from pathlib import Path
from typing import Any

import pytest

from handgrad import errors
from handgrad.data import prepare as preparing
from handgrad.data.prepare import PrepareOptions, prepare
from handgrad.run.loop import StopSignals
from handgrad.settings.config import RunConfig, to_toml

ROOT = Path(__file__).parents[1]
LINE = "handgrad: interrupted\n"
STOPPING = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU)


def listening() -> None:
    """A shell starts what runs in its background with SIGINT ignored."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def start(arguments: list[str], path: Path = ROOT, **how: Any) -> subprocess.Popen:
    how = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "preexec_fn": listening, **how}
    environment = {**os.environ, "PYTHONPATH": f"{path}{os.pathsep}{ROOT}"}
    return subprocess.Popen([sys.executable, *arguments], env=environment, cwd=path, **how)


@pytest.mark.parametrize("command", ["train tiny --data x", "sample x", "bench step"])
def test_no_import_loses_it(command: str, tmp_path: Path) -> None:
    """A library that catches everything, or aborts, while it is imported."""
    (tmp_path / "torch.py").write_text(
        "import signal\ntry:\n    signal.raise_signal(signal.SIGINT)\nexcept BaseException:\n    pass\nprint('lost')\n"
    )
    process = start(["-m", "handgrad", *command.split()], tmp_path)
    assert process.communicate() == ("", LINE)
    assert process.returncode == 130


def test_no_late_import_loses_it(tmp_path: Path) -> None:
    (tmp_path / "late.py").write_text(
        "import signal\ntry:\n    signal.raise_signal(signal.SIGINT)\nexcept BaseException:\n    print('lost')\n"
    )
    code = (
        "import signal, handgrad.errors as errors\n"
        "signal.signal(signal.SIGINT, errors.end_at_once)\n"
        "with errors.interruptible():\n    import late\n"
    )
    process = start(["-c", code], tmp_path)
    assert process.communicate() == ("", LINE)
    assert process.returncode == 130


@pytest.mark.parametrize(("command", "code"), [("recipes", 0), ("", 64)])
def test_one_that_comes_while_python_ends_keeps_the_exit_code(command: str, code: int) -> None:
    """Its modules are taken down, and its handlers are gone."""
    program = (
        "import os, signal, sys\n"
        "from handgrad.__main__ import main\n"
        "class Last:\n    def __del__(self, kill=os.kill, own=os.getpid(), sent=signal.SIGINT):\n        kill(own, sent)\n"
        "last = Last()\n"
        "sys.exit(main())\n"
    )
    process = start(["-c", program, *command.split()])
    _, told = process.communicate()
    assert (process.returncode, told) == (code, "")


def recipe(config: RunConfig, path: Path, **changes: Any) -> str:
    path.write_text(to_toml(dataclasses.replace(config, **changes)))
    return str(path)


def test_twice_in_a_step(config: RunConfig, tmp_path: Path) -> None:
    """The second ends the run before its step is finished and saved."""
    code = (
        "import signal, sys\n"
        "from handgrad import errors\n"
        "from handgrad.__main__ import main\n"
        "from handgrad.training.step import TrainStep\n"
        "errors.REPEAT_SECONDS = 0\n"
        "def begin(*_):\n    signal.raise_signal(signal.SIGINT)\n    signal.raise_signal(signal.SIGINT)\n"
        "TrainStep.begin = begin\n"
        "sys.exit(main())\n"
    )
    process = start(["-c", code, "train", "--config", recipe(config, tmp_path / "run.toml")])
    _, told = process.communicate()
    assert process.returncode == 130 and told.count("\n") == 1, told
    assert told.startswith("handgrad: interrupted before") and "same command" in told
    assert not list(Path(config.out).glob("checkpoints/step_*"))


@pytest.mark.fault(16)
def test_one_signal_by_two_ways(config: RunConfig, tmp_path: Path) -> None:
    """A launcher passes on what its ranks got as well, and the system may be slow: all within a second is one signal."""
    code = (
        "import signal, sys\n"
        "from handgrad.__main__ import main\n"
        "from handgrad.run.loop import Run\n"
        "from handgrad.training.step import TrainStep\n"
        "def twice(original):\n"
        "    def signalled(*given):\n"
        "        for _ in range(2):\n            signal.raise_signal(signal.SIGTERM)\n"
        "        return original(*given)\n"
        "    return signalled\n"
        "TrainStep.begin, Run.save = twice(TrainStep.begin), twice(Run.save)\n"
        "code = main()\n"
        "signal.raise_signal(signal.SIGTERM)\n"  # after all is done
        "sys.exit(code)\n"
    )
    process = start(["-c", code, "train", "--config", recipe(config, tmp_path / "run.toml")])
    _, told = process.communicate()
    assert process.returncode == 75 and told.count("\n") == 1, told
    assert told.startswith("handgrad: stopped by SIGTERM after step 1, saved step 1")
    assert [path.name for path in Path(config.out).glob("checkpoints/step_*")] == ["step_00000001"]


@pytest.mark.parametrize("number", STOPPING)
def test_signals_that_stop_a_run_are_noted(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a limit of CPU time every second until the hard limit; of the others a second one acts as before."""
    monkeypatch.setattr(errors, "REPEAT_SECONDS", 0.0)
    with StopSignals(keeps_process=False) as stop:
        signal.raise_signal(number)
        assert stop.received == number
        monkeypatch.setattr(stop, "act", pytest.fail)
        if number != signal.SIGXCPU:
            monkeypatch.setattr(errors, "REPEAT_SECONDS", 60.0)
        signal.raise_signal(number)
    assert signal.getsignal(number) == signal.SIG_DFL


def test_signals_of_the_program_stay_its_own() -> None:
    seen: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, _: seen.append(number))
    try:
        with StopSignals(keeps_process=True) as stop:
            signal.raise_signal(signal.SIGUSR1)
        assert seen == [signal.SIGUSR1] and stop.received is None
    finally:
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize("number", STOPPING)
def test_a_signal_before_the_first_step(number: signal.Signals, tmp_path: Path) -> None:
    """Nothing is there to be saved; one line says so, and the exit code that the same command goes on."""
    (tmp_path / "torch.py").write_text(f"import signal\nsignal.raise_signal({int(number)})\nprint('lost')\n")
    process = start(["-m", "handgrad", "train", "tiny", "--data", "x"], tmp_path)
    shown, told = process.communicate()
    assert process.returncode == 75 and shown == "" and told.count("\n") == 1, told
    assert told.startswith(f"handgrad: stopped by {number.name} while no step was under way, nothing to save")


def test_a_terminal_that_goes_away(config: RunConfig, tmp_path: Path) -> None:
    """A dropped connection: the run saves its step, though nobody hears of it."""
    terminal, ours = pty.openpty()

    def own_terminal() -> None:
        fcntl.ioctl(ours, termios.TIOCSCTTY, 0)

    arguments = recipe(
        config, tmp_path / "run.toml", steps=100_000, log_every=1, save_every=0, eval_every=0, sample_every=0
    )
    how = {"stdin": ours, "stdout": ours, "stderr": ours, "start_new_session": True, "preexec_fn": own_terminal}
    process = start(["-m", "handgrad", "train", "--config", arguments], **how)
    os.close(ours)
    shown = b""
    while b"loss" not in shown:
        shown += os.read(terminal, 4096)
    os.close(terminal)
    assert process.wait(60) == 75
    steps = [json.loads(line)["step"] for line in (Path(config.out) / "metrics.jsonl").read_text().splitlines()]
    assert [path.name for path in Path(config.out).glob("checkpoints/step_*")] == [f"step_{steps[-1]:08d}"]


@pytest.mark.parametrize(
    ("tokenizer", "checkpoint_units", "reports", "how"),
    [
        ("bytes", 1, 2, "go on"),  # after a unit that is in the journal
        ("bytes", 32, 2, "start again"),  # before the first of the journal
        ("bpe:300", 32, 2, "go on"),  # with the tokenizer that was trained
        ("bpe:300", 32, 1, "start again"),  # while it is trained
    ],
)
def test_prepare_says_how_it_goes_on(
    tokenizer: str, checkpoint_units: int, reports: int, how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing stays that the same command would not use."""
    monkeypatch.setattr(preparing, "CHECKPOINT_UNITS", checkpoint_units)
    options = PrepareOptions("stories", tmp_path / "shards", tokenizer=tokenizer, documents=3000, workers=1)
    left = iter(range(reports - 1))

    def interrupt(progress: preparing.Progress) -> None:
        if next(left, None) is None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt, match=f"^interrupted; run the same command to {how}$"):
        prepare(options, interrupt)
    assert [path.name for path in tmp_path.iterdir()] == ["shards.partial"] * (how == "go on")
    if how == "go on":
        monkeypatch.setattr(preparing, "train_bpe", None)  # not again
    prepare(options)
    assert [path.name for path in tmp_path.iterdir()] == ["shards"]


def session(leader: int) -> list[Path]:
    """The processes of a session in /proc, but for those that have ended."""
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, _, number = status.read_text().rpartition(")")[2].split()[:4]
            if int(number) == leader and state != "Z":
                found.append(status.parent)
    return found


def imports_torch(process: Path) -> bool:
    try:
        return "libtorch" in (process / "maps").read_text()
    except OSError:
        return False


@pytest.mark.nightly  # of a measuring script
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
def test_a_benchmark_takes_its_processes_along() -> None:
    process = start(["-m", "handgrad", "bench", "step", "--device", "cpu", "--model", "d12"], start_new_session=True)
    deadline = time.monotonic() + 120
    while sum(map(imports_torch, session(process.pid))) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)
    _, told = process.communicate(timeout=60)
    assert process.returncode == 130 and told == LINE
    assert session(process.pid) == []
