"""`handgrad train --restarts N`: starts again after a crash, and not after a mistake."""

import os
import signal
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from handgrad import cli
from handgrad.cli import main
from handgrad.joins.parallel import local as supervisor
from handgrad.joins.parallel.local import supervise
from tests.distributed.launching import files_of
from tests.distributed.runs import SETTINGS, Launcher, arguments
from tests.faults.firing import FIRED
from tests.test_commands import SMALL, refused


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "FIRST_PAUSE_SECONDS", 0.01)


def starts(ends: Iterable[tuple[int, int]]) -> tuple[Callable[[list[int]], int], Callable[[], int], list[int]]:
    """(a start that ends with the next code and leaves the next checkpoint, the step of that one, the codes so far)."""
    left, saved, codes = iter(ends), [-1], list[int]()

    def start(received: list[int]) -> int:
        code, saved[0] = next(left)
        codes.append(code)
        return code

    return start, lambda: saved[0], codes


@pytest.mark.parametrize(
    ("ends", "restarts", "made"),
    [
        ([(0, 9)], 3, 1),
        ([(1, 10), (137, 20), (75, 30), (0, 40)], 3, 4),
        ([(1, 10), (1, 20), (1, 30), (0, 40)], 2, 3),  # no more than were asked for
        ([(1, 10), (1, 10), (1, 10)], 9, 3),  # two without a new checkpoint
        ([(137, -1), (137, -1), (0, 9)], 9, 2),
        ([(1, 10), (1, 10), (1, 20), (1, 20), (1, 20)], 9, 5),  # a new one sets the count back
        *(([(code, 10), (0, 20)], 9, 1) for code in (64, 65, 71, 78, 130)),
        *(([(code, 10), (0, 20)], 9, 2) for code in (1, 74, 75, 76, 137)),
    ],
)
def test_when_a_run_starts_again(ends: list[tuple[int, int]], restarts: int, made: int) -> None:
    start, saved_step, codes = starts(ends)
    assert supervise(start, saved_step, restarts) == ends[made - 1][0]
    assert codes == [code for code, _ in ends[:made]]


def test_each_restart_is_told(capfd: pytest.CaptureFixture) -> None:
    start, saved_step, _ = starts([(137, -1), (1, 20), (1, 20), (1, 20)])
    assert supervise(start, saved_step, 5) == 1
    lines = capfd.readouterr().err.splitlines()
    assert lines[0].startswith("handgrad: exit code 137: restart 1 of 5 in ") and lines[0].endswith("from its first step")
    assert lines[1].startswith("handgrad: exit code 1: restart 2 of 5 in ") and lines[1].endswith("from step 20")
    assert lines[3] == "handgrad: gave up: 2 starts without a new checkpoint, the last with exit code 1"


def test_pauses_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Doubling, to a minute at most; on a clock that the test turns."""
    now, pauses = [0.0], list[float]()
    monkeypatch.setattr(supervisor, "FIRST_PAUSE_SECONDS", 1.0)
    monkeypatch.setattr(supervisor.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(supervisor.time, "sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))
    begun = [0.0]

    def start(received: list[int]) -> int:
        pauses.append(now[0] - begun[0])
        begun[0] = now[0]
        return 1

    assert supervise(start, lambda: len(pauses), 8) == 1
    assert [round(pause) for pause in pauses] == [0, 1, 2, 4, 8, 16, 32, 60, 60]


def test_a_signal_ends_the_restarts(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture) -> None:
    """In a run, which the signal has stopped, and in a pause between two."""

    def start(received: list[int]) -> int:
        received.append(signal.SIGTERM)
        return 75

    assert supervise(start, lambda: 10, 5) == 75 and capfd.readouterr().err == ""

    def crash(received: list[int]) -> int:
        signal.setitimer(signal.ITIMER_REAL, 0.02)
        return 1

    previous = signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    monkeypatch.setattr(supervisor, "FIRST_PAUSE_SECONDS", 60.0)
    try:
        assert supervise(crash, lambda: 10, 5) == 75
    finally:
        signal.signal(signal.SIGALRM, previous)
    assert capfd.readouterr().err.splitlines()[-1] == "handgrad: stopped by SIGTERM before restart 1"


@pytest.mark.nightly(but=["2"])
@pytest.mark.fault(29)
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_killed_run_goes_on_with_the_same_bits(
    ranks: int,
    shards: Path,
    tmp_path: Path,
    launcher: Launcher,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture,
) -> None:
    """SIGKILL for a rank between two checkpoints, of two in an exchange; the command itself ends with 0."""
    settings = {"async_save": "false"}  # the save before the kill is whole, however slow the disk
    launcher.run(1, arguments(shards, tmp_path / "undisturbed", **settings))
    monkeypatch.setenv("PYTHON_EXEC", str(launcher.write_program(tmp_path / "python")))
    monkeypatch.setenv("TEST_FAULT", "kill-step:0:6" if ranks == 1 else "kill:1:6")
    monkeypatch.setenv("TEST_STARTED", str(tmp_path / "started"))
    out = tmp_path / "run"
    code, told = main([*arguments(shards, out, **settings), "--restarts", "2", "--ranks", str(ranks)]), capfd.readouterr()
    assert code == 0, told.err
    assert told.err.count(FIRED) == 1 and "was ended by SIGKILL" in told.err and "resumed at step 4" in told.out, told
    assert "restart 1 of 2 in 0 s, from step 4" in told.err and "restart 2" not in told.err, told.err
    assert files_of(out, SETTINGS["steps"]) == files_of(tmp_path / "undisturbed", SETTINGS["steps"])


def test_a_mistake_is_not_repeated(
    tmp_path: Path, launcher: Launcher, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    monkeypatch.setenv("PYTHON_EXEC", str(launcher.write_program(tmp_path / "python")))
    line = ["train", *SMALL, "--data", str(tmp_path / "nowhere"), "--out", str(tmp_path / "run"), "--restarts", "3"]
    assert main(line) == 65
    told = capfd.readouterr().err
    assert "nowhere" in told and "restart" not in told


def test_another_launcher_restarts_by_itself(
    shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    line = refused(capsys, 64, "train", *SMALL, "--data", str(shards), "--out", str(tmp_path / "run"), "--restarts", "3")
    assert "leave --gpus, --ranks and --restarts out" in line


@pytest.mark.parametrize("kind", [MemoryError, type("OutOfMemoryError", (RuntimeError,), {})])
def test_running_out_of_memory_is_one_line(
    kind: type[Exception], capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ask(*_: object) -> int:
        raise kind("Tried to allocate 20.00 GiB.\nMore words")

    monkeypatch.setattr("handgrad.commands.recipes.run", ask)
    assert cli.main(["recipes"]) == 71
    assert capsys.readouterr().err == (
        "handgrad: out of memory: Tried to allocate 20.00 GiB. Try half the --micro-batch; `handgrad plan` shows what takes"
        " memory\n"
    )
