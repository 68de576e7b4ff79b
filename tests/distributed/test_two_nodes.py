"""A run between two machines, as far as their network goes: namespaces with a cable between them."""

import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.distributed.launching import PATIENCE, TWO_NODES, environment, files_of, wait_for, write_recipe
from tests.distributed.runs import Launcher


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

    def start(*arguments: str, **more: str) -> subprocess.Popen:
        command = [str(TWO_NODES), *arguments]
        started.append(
            subprocess.Popen(
                command, cwd=tmp_path, env=environment(**more), stdout=subprocess.PIPE, stderr=subprocess.STDOUT
            )
        )
        return started[-1]

    yield start
    for process in started:
        if process.poll() is None:
            process.terminate()
            process.communicate(timeout=PATIENCE)


def of(process: subprocess.Popen) -> set[str]:
    return {f"handgrad-{process.pid}-{node}" for node in "ab"}


@pytest.fixture
def recipe(tmp_path: Path, shards: Path) -> Path:
    return write_recipe(tmp_path / "tiny.toml", device="cpu", data=str(shards))


def test_two_nodes(recipe: Path, two_nodes, launcher: Launcher, tmp_path: Path) -> None:
    """Two machines, as far as the network goes, make the same bits as one process."""
    command = ["train", "--config", str(recipe), "--steps", "4", "--out"]
    run = two_nodes(*command, str(tmp_path / "run"))
    told = run.communicate(timeout=PATIENCE)[0].decode()
    assert run.returncode == 0 and "ranks      2 on 2 nodes, 1 of 2 lanes each" in told, told
    assert not of(run) & namespaces()
    launcher.run(1, [*command, str(tmp_path / "one")])
    assert files_of(tmp_path / "run", 4) == files_of(tmp_path / "one", 4)


def test_two_nodes_leave_nothing(two_nodes, tmp_path: Path) -> None:
    """The script is stopped while both nodes run; something that waits is enough for it."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\ntouch "{tmp_path}/$4"\nexec sleep 1000\n')  # $4: --node-rank=0, or 1
    python.chmod(0o755)
    run = two_nodes("train", PYTHON=str(python))
    for rank in range(2):
        wait_for(tmp_path / f"--node-rank={rank}")
    assert of(run) <= namespaces()
    run.send_signal(signal.SIGTERM)
    run.communicate(timeout=PATIENCE)
    assert run.returncode == 143
    assert not of(run) & namespaces()
