"""The memory that limits leave: of control groups, of `ulimit`; a run that needs more is refused before it begins."""

import resource
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from handgrad.machine import devices, processor
from tests.test_commands import SMALL, refused
from tests.test_threads import put

UNLIMITED = {"proc/self/status": "VmSize:\t 2048 kB\nVmData:\t 1024 kB\nName:\tpython\n"}


@pytest.fixture
def soft_limit() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_AS)
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


def test_the_limits_of_all_levels(tmp_path: Path) -> None:
    root = put(
        tmp_path,
        {
            **UNLIMITED,
            "proc/self/cgroup": "0::/jobs/mine\n",
            "sys/fs/cgroup/jobs/mine/memory.max": "max\n",
            "sys/fs/cgroup/jobs/mine/memory.current": "100\n",
            "sys/fs/cgroup/jobs/memory.max": "5000\n",
            "sys/fs/cgroup/jobs/memory.current": "1200\n",
            "sys/fs/cgroup/jobs/memory.stat": "anon 800\ninactive_file 300\n",
        },
    )
    assert processor.memory_left(root) == [4100], "files in the cache make room"
    (root / "sys/fs/cgroup/jobs/memory.current").write_text("9000\n")
    assert processor.memory_left(root) == [0]


def test_the_limit_of_version_1(tmp_path: Path) -> None:
    folder = "sys/fs/cgroup/memory/job"
    files = {"memory.limit_in_bytes": "5000", "memory.usage_in_bytes": "1000", "memory.stat": "total_inactive_file 10\n"}
    groups = {"proc/self/cgroup": "5:cpu,cpuacct:/job\n4:memory:/job\n"}
    root = put(tmp_path, {**UNLIMITED, **groups, **{f"{folder}/{n}": v for n, v in files.items()}})
    assert min(processor.memory_left(root)) == 4010
    own = "inactive_file 1\nactive_file 2\ndirty 4\n"  # without the groups below
    below = "total_inactive_file 10\ntotal_active_file 600\ntotal_dirty 30\ntotal_writeback 7\ntotal_unevictable 50\n"
    (root / folder / "memory.stat").write_text(own + below)
    assert min(processor.memory_left(root)) == 4000 + 10 + 600 - 30 - 7


@pytest.mark.parametrize(
    ("stat", "left"),
    [
        ({"active_file": 3000, "inactive_file": 500}, 1100 + 3500),
        ({"active_file": 3000, "file": 3900, "shmem": 900, "unevictable": 100}, 1100 + 3000),
        ({"active_file": 3000, "file_dirty": 200, "file_writeback": 40}, 1100 + 3000 - 240),
        ({"active_file": 100, "file_dirty": 200}, 1100),
        ({"active_file": 3900, "inactive_file": 200}, 5000),
    ],
    ids=["a full cache", "shared and locked memory", "unwritten pages", "counts of two moments", "no more than the limit"],
)
def test_the_part_of_the_page_cache_that_makes_room(stat: dict[str, int], left: int, tmp_path: Path) -> None:
    """Files that a process has read twice are active: the kernel evicts them all the same before a limit kills anything."""
    folder = "sys/fs/cgroup/job"
    counts = {"memory.max": "5000\n", "memory.current": "3900\n"}
    counts["memory.stat"] = "".join(f"{name} {number}\n" for name, number in stat.items())
    files = {f"{folder}/{name}": text for name, text in counts.items()}
    root = put(tmp_path, {**UNLIMITED, "proc/self/cgroup": "0::/job\n", **files})
    assert processor.memory_left(root) == [left]


def test_no_limit(tmp_path: Path) -> None:
    assert processor.memory_left(tmp_path) == []


@pytest.mark.parametrize("limit", processor.ADDRESS_LIMITS)
def test_the_limits_of_ulimit(limit: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda asked: (3 << 20 if asked == limit else resource.RLIM_INFINITY, 0))
    assert processor.memory_left(put(tmp_path, UNLIMITED)) == [
        (3 << 20) - (2 << 20 if limit == resource.RLIMIT_AS else 1 << 20)
    ]


@pytest.mark.fault(41)
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
@pytest.mark.usefixtures("soft_limit")
def test_a_run_above_its_limit(shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    in_use = processor.values(Path("/proc/self/status"), ":")["VmSize"] * 1024
    resource.setrlimit(resource.RLIMIT_AS, (in_use + (1 << 30), resource.getrlimit(resource.RLIMIT_AS)[1]))
    assert (devices.available_bytes(torch.device("cpu")) or 0) <= 1 << 30
    large = ["--channels", "2048", "--num-layers", "8", "--data", str(shards), "--out", str(tmp_path / "run")]
    line = refused(capsys, 65, "train", *SMALL, *large)
    assert "the run needs" in line and "cpu has" in line and "even one sample at a time does not fit" in line
    assert not (tmp_path / "run").exists()
