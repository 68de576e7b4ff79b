"""`handgrad train --ranks N`: the ranks of one machine, started without a launcher."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from handgrad import errors
from handgrad.cli import main
from handgrad.joins.parallel import local, rendezvous
from handgrad.joins.parallel.local import run_ranks, worst_code
from handgrad.machine import devices
from tests.distributed.launching import environment, files_of, wait_for
from tests.distributed.runs import Launcher, arguments, same_run
from tests.test_commands import refused

Program = Callable[[str], list[str]]


@pytest.fixture
def program(tmp_path: Path) -> Program:
    """The command of a rank without torch: `rank` is its number, `here` the test's folder."""

    def command(code: str) -> list[str]:
        path = tmp_path / "rank.py"
        head = "import os, signal, sys, time\nfrom pathlib import Path\nfrom handgrad import errors\n"
        path.write_text(f"{head}rank, here = int(os.environ['RANK']), Path({str(tmp_path)!r})\n{code}\n")
        return [sys.executable, str(path)]

    return command


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """No test leaves a handler behind."""
    before = [signal.getsignal(number) for number in local.FORWARDED]
    yield
    assert [signal.getsignal(number) for number in local.FORWARDED] == before


def test_the_environment_is_torchruns(program: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS")
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "OMP_NUM_THREADS")
    code = f"(here / str(rank)).write_text(' '.join(os.environ[name] for name in {names!r}))"
    assert run_ranks(program(code), 3, environment() | {"OMP_NUM_THREADS": "2"}, 5) == 0
    assert [(tmp_path / str(rank)).read_text() for rank in range(3)] == [f"{r} {r} 3 3 127.0.0.1 2" for r in range(3)]
    given = environment()
    del given["OMP_NUM_THREADS"]
    assert local.rank_environment(2, {**given, "TORCHELASTIC_RUN_ID": "x"})["OMP_NUM_THREADS"] == "1"


@pytest.mark.parametrize(
    ("codes", "worst"),
    [([0, 0], 0), ([0, 75], 75), ([75, -9, 75], 75), ([-9, -9], 137), ([75, 76], 76), ([130, 75], 130), ([0, 1, 130], 1)],
)
def test_the_worst_code(codes: list[int], worst: int) -> None:
    assert worst_code(codes) == worst


def test_an_error_of_all_ranks_is_told_once(program: Program, capfd: pytest.CaptureFixture) -> None:
    code = "for text in ('the same for all', f'of {rank}'): errors.print_message(errors.DataError(text))\nsys.exit(65)"
    assert run_ranks(program(code), 3, environment(), 5) == 65
    told = sorted(capfd.readouterr().err.splitlines())
    assert told == ["handgrad: of 0", "handgrad: of 1", "handgrad: of 2", "handgrad: the same for all"]


def test_a_rank_that_is_killed_is_named_and_the_others_end(
    program: Program, capfd: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that do not end by themselves get SIGTERM, and SIGKILL in the end."""
    monkeypatch.setattr(local, "KILL_SECONDS", 0.3)
    code = "signal.signal(signal.SIGTERM, signal.SIG_IGN) if rank == 2 else None\n"
    code += "(here / f'{rank}').touch()\nwhile rank or len(list(here.glob('[12]'))) < 2: time.sleep(0.01)\n"
    code += "os.kill(os.getpid(), signal.SIGKILL)"
    assert run_ranks(program(code), 3, environment(), 0.1) == 137
    assert "handgrad: rank 0 was ended by SIGKILL" in capfd.readouterr().err


@pytest.mark.parametrize("number", local.FORWARDED)
def test_a_signal_reaches_every_rank_once(number: int, program: Program, tmp_path: Path) -> None:
    """Also from a terminal, whose Ctrl-C goes to the whole group of processes."""
    code = f"count = []\nsignal.signal({int(number)}, lambda *_: count.append(1))\n"
    code += "(here / f'{rank}.up').touch()\nwhile not count: time.sleep(0.01)\n"
    code += "time.sleep(0.2)\n(here / f'{rank}.count').write_text(str(len(count)))\nsys.exit(75)"
    call = "import os, sys; from handgrad.joins.parallel.local import run_ranks; sys.exit(run_ranks(%r, 2, os.environ, 5))"
    launched = subprocess.Popen([sys.executable, "-c", call % program(code)], env=environment(), start_new_session=True)
    for rank in range(2):
        wait_for(tmp_path / f"{rank}.up")
    os.killpg(launched.pid, number)
    assert launched.wait(60) == 75
    assert [(tmp_path / f"{rank}.count").read_text() for rank in range(2)] == ["1", "1"]


@pytest.mark.skipif(sys.platform != "linux", reason="needs prctl")
def test_ranks_do_not_outlive_their_launcher(program: Program, tmp_path: Path) -> None:
    code = "from handgrad.joins.parallel.local import end_with_launcher\n"
    code += "signal.signal(signal.SIGTERM, lambda *_: ((here / f'{rank}.down').touch(), os._exit(75)))\n"
    code += "end_with_launcher()\n(here / f'{rank}.up').touch()\ntime.sleep(300)"
    call = "import os, sys; from handgrad.joins.parallel.local import run_ranks; sys.exit(run_ranks(%r, 2, os.environ, 5))"
    launched = subprocess.Popen([sys.executable, "-c", call % program(code)], env=environment())
    for rank in range(2):
        wait_for(tmp_path / f"{rank}.up")
    launched.kill()
    launched.wait(60)
    for rank in range(2):
        wait_for(tmp_path / f"{rank}.down")


@pytest.mark.nightly  # the tour trains by --ranks, test_same_bits.py compares
def test_the_bits_are_those_of_another_launcher(
    launcher: Launcher, shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    """By forks, then by processes of their own that are stopped on the way and go on."""
    launcher.run(2, arguments(shards, tmp_path / "launched", lanes=None))
    ours = arguments(shards, tmp_path / "ours", lanes=None, log_every=1)
    with monkeypatch.context() as patch:
        patch.setenv("PYTHON_EXEC", str(launcher.write_program(tmp_path / "python")))
        assert main([*ours, "--ranks", "2", "--steps", "8"]) == 0
    same_run(tmp_path / "launched", tmp_path / "ours", 8)
    assert capfd.readouterr().out.count("next       handgrad sample") == 1
    out = tmp_path / "stopped"
    command = [sys.executable, "-m", "handgrad", *arguments(shards, out, lanes=None), "--ranks", "2"]
    with (tmp_path / "told").open("w") as told:
        stopped = subprocess.Popen(command, env=environment(), stdout=told, stderr=told, start_new_session=True)
        wait_for(out / "metrics.jsonl", containing='"kind": "step"')
        os.killpg(stopped.pid, signal.SIGINT)
        code = stopped.wait(120)
    text = (tmp_path / "told").read_text()
    assert code == 75 and text.count("handgrad: stopped by SIGINT after step") == 1 and "Traceback" not in text, text
    launcher.run(2, arguments(shards, out, lanes=None))
    assert files_of(out, 8) == files_of(tmp_path / "launched", 8)


def test_a_bug_of_all_ranks_shows_one_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    def end(code: int) -> None:
        raise SystemExit(code)

    monkeypatch.setattr(rendezvous.os, "_exit", end)
    for rank, text in enumerate(("of all", "of all", "of one")):
        (tmp_path / str(rank)).mkdir()
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / str(rank) / "error.json"))
        with pytest.raises(SystemExit, match="1"):
            rendezvous.exit_now(RuntimeError(text), prints=True)
    assert capsys.readouterr().err.splitlines() == ["RuntimeError: of all", "RuntimeError: of one"]


def test_a_mistake_is_told_once(
    launcher: Launcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    monkeypatch.setenv("PYTHON_EXEC", str(launcher.write_program(tmp_path / "python")))
    assert main([*arguments(tmp_path / "nothing", tmp_path / "run"), "--ranks", "2"]) == 65
    told = capfd.readouterr().err
    assert told.count("handgrad: ") == 1 and told.count("\n") == 1, told


def test_refusals(shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    command = ["train", "tiny", "--data", str(shards), "--out", str(tmp_path / "run")]
    assert "--gpus 2 needs 2 GPUs, torch finds 0 on this machine" in refused(capsys, 64, *command, "--gpus", "2")
    assert "use --ranks 2" in refused(capsys, 64, *command, "--gpus", "2", "--device", "cpu")
    assert "give one of them" in refused(capsys, 64, *command, "--gpus", "2", "--ranks", "2")
    assert "--ranks must be at least 1" in refused(capsys, 64, *command, "--ranks", "0")
    with monkeypatch.context() as patch:
        patch.setattr(devices, "gpu_count", lambda: 4)
        told = "--gpus 8 needs 8 GPUs, torch finds 4 on this machine; use --gpus 4"
        assert told in refused(capsys, 64, *command, "--gpus", "8")
        assert "--ranks 8 needs 8 GPUs" in refused(capsys, 64, *command, "--ranks", "8")
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "0"), ("LOCAL_WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    assert "torchrun has started 2 processes" in refused(capsys, 64, *command, "--ranks", "2")
    assert not (tmp_path / "run").exists()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus(shards: Path, tmp_path: Path) -> None:
    bf16 = {"lanes": None, "device": "cuda", "precision": "bf16"}
    for name, start in (("torchrun", ["torchrun", "--standalone", "--nproc-per-node=2", "-m"]), ("ours", ["python", "-m"])):
        more = [] if name == "torchrun" else ["--gpus", "2"]
        command = [*start, "handgrad", *arguments(shards, tmp_path / name, **bf16), *more]
        subprocess.run(command, env=environment(), check=True, timeout=300)
    same_run(tmp_path / "torchrun", tmp_path / "ours", 8)


def test_a_rank_that_is_stopped_says_nothing_after_the_one_that_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its launcher stops it because the other has failed; without such a one the first of those stopped says so."""
    for rank in ("0", "1"):
        (tmp_path / rank).mkdir()

    def asks(rank: int, text: str, **how: bool) -> bool:
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / str(rank) / "error.json"))
        return errors.is_first_to_print(text, **how)

    assert asks(0, "stopped", of_all=True) and not asks(1, "stopped", of_all=True)
    assert asks(0, "unknown preset") and not asks(1, "unknown preset")
    (tmp_path / "handgrad_other").mkdir()
    assert not asks(1, "stopped by SIGTERM", of_all=True) and asks(1, "stopped by SIGTERM")
