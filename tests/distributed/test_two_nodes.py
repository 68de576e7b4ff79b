"""A run between two machines, as far as their network goes: namespaces with a cable between them."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.distributed.launching import TWO_NODES, environment, files_of, launch, wait_for, write_recipe


def namespaces() -> set[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
    return {line.split()[0] for line in listed.splitlines()}


@pytest.fixture
def two_nodes(tmp_path: Path):
    """Starts the script; skips where there are no network namespaces to be had."""
    probe = f"handgrad-probe-{os.getpid()}"
    try:
        made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("needs `ip` of iproute2")
    if made.returncode:
        pytest.skip(f"no network namespaces: {made.stderr.strip()}")
    subprocess.run(["ip", "netns", "del", probe], check=True)
    started: list[subprocess.Popen] = []

    def start(*arguments: str) -> subprocess.Popen:
        command = [str(TWO_NODES), *arguments]
        started.append(
            subprocess.Popen(command, cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        )
        return started[-1]

    yield start
    for process in started:
        if process.poll() is None:
            process.terminate()
            process.communicate(timeout=60)


def of(process: subprocess.Popen) -> set[str]:
    return {f"handgrad-{process.pid}-{node}" for node in "ab"}


@pytest.fixture
def recipe(tmp_path: Path, shards: Path) -> Path:
    return write_recipe(tmp_path / "tiny.toml", device="cpu", data=str(shards))


def test_two_nodes(recipe: Path, two_nodes, tmp_path: Path) -> None:
    """Two machines, as far as the network goes, make the same bits as one process."""
    run = two_nodes("train", "--config", str(recipe), "--steps", "4", "--out", str(tmp_path / "run"))
    told = run.communicate(timeout=120)[0].decode()
    assert run.returncode == 0 and "ranks      2 on 2 nodes, 1 of 2 lanes each" in told, told
    assert not of(run) & namespaces()
    one = tmp_path / "one"
    arguments = ["train", "--config", str(recipe), "--steps", "4", "--out", str(one)]
    launch([sys.executable, "-m", "handgrad", *arguments], tmp_path)
    assert files_of(tmp_path / "run", 4) == files_of(one, 4)


def test_two_nodes_leave_nothing(recipe: Path, two_nodes, tmp_path: Path) -> None:
    """The script is stopped in the middle of a run."""
    run = two_nodes("train", "--config", str(recipe), "--steps", "100000", "--out", str(tmp_path / "run"))
    wait_for(tmp_path / "run" / "metrics.jsonl", containing='"step"')
    assert of(run) <= namespaces()
    run.send_signal(signal.SIGTERM)
    told = run.communicate(timeout=60)[0].decode()
    assert run.returncode == 143 and "stopped by SIGTERM" in told, told
    assert not of(run) & namespaces()
