"""The scripts that play faults for longer than a test may: their faults exist, and they judge rightly."""

import os
import random
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from benchmarks import chaos, gpu_faults, soak
from tests.distributed import worker
from tests.faults import rows

pytestmark = pytest.mark.nightly  # of a measuring script: nothing that the package promises rests on it


def test_the_rows_of_gpus_are_played() -> None:
    played = {*gpu_faults.ONE_GPU, *gpu_faults.TWO_GPUS}
    assert played == {number for number, row in rows.read_rows().items() if "gpu" in row.runs_on}
    assert set(gpu_faults.NEEDS_KERNELS) < played


@pytest.mark.parametrize("kind", chaos.KINDS)
def test_the_faults_of_chaos_exist(kind: str) -> None:
    """Those that a process brings along; its checkpoints are as large as they are, and it has two ranks."""
    run = SimpleNamespace(size_bytes=1000, ranks=2)
    for seed in range(50):
        fault, codes = chaos.KINDS[kind](random.Random(seed), run, 3)
        name, rank, number = fault.split(":") if fault else ("kill", "0", "0")
        assert name in worker.FAULTS and int(rank) in (0, 1) and int(number) >= 0 and codes


@pytest.fixture
def checkpoint_peers() -> ModuleType:
    """Imported by its tests alone: every worker collects this file, and torch.distributed.checkpoint takes a second."""
    from benchmarks import checkpoint_peers

    return checkpoint_peers


@pytest.mark.parametrize("name", ["`torch.save`", "safetensors' `save_file`", "handgrad"])
def test_what_a_format_holds(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, checkpoint_peers: ModuleType
) -> None:
    """The old state, the new one, or neither; a flipped bit changes a number or is refused."""
    monkeypatch.setattr(checkpoint_peers, "ELEMENTS", 1 << 13)
    peer = checkpoint_peers.PEERS[name]
    path = checkpoint_peers.fresh(peer, tmp_path / "old")
    assert checkpoint_peers.outcome(peer, path) == "old"
    code, _, told = checkpoint_peers.in_child(checkpoint_peers.saving(peer, path))
    assert (code, told, checkpoint_peers.outcome(peer, path)) == (0, "be", "new")
    file = peer.numbers(path)
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    assert checkpoint_peers.outcome(peer, path) == ("old" if name == "handgrad" else "lost")
    found = checkpoint_peers.flips(peer, tmp_path, random.Random(0))
    assert found["refused"] == (found["tries"] if name == "handgrad" else 0)


def test_a_kill_is_seen(checkpoint_peers: ModuleType) -> None:
    def act(pipe: int) -> None:
        os.write(pipe, b"b")
        time.sleep(60)

    code, seconds, told = checkpoint_peers.in_child(act, 0.01)
    assert (code, told) == (-9, "b") and seconds < 30


def test_the_log_of_a_soak_is_read() -> None:
    lines = [
        "tests/a.py::test_b[0 to 9] ",
        "[gw0] [  5%] PASSED tests/a.py::test_b[0 to 9] ",
        "1 failed, 18 passed in 165.67s",
    ]
    assert [bool(soak.OUTCOME.search(line)) for line in lines] == [False, True, False]
    assert soak.OUTCOME.search("tests/a.py::test_b[0 to 9] FAILED   [ 5%]") is None, "of a single process"
