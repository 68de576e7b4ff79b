"""CPU threads: their number under a quota, how long a waiting thread spins before it sleeps, and sums that do not depend
on the number of threads.

Environment variables control them. An OpenMP runtime reads them once, when torch loads it; variables that the user has set
stay. By default libgomp's threads spin for milliseconds at the end of every operation. On a busy machine they take the core
from the thread that they wait for.
"""

import math
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from handgrad.machine import processor

# Iterations of libgomp's spin loop: longer than the waits on an idle machine, shorter than a time slice. On Intel CPUs
# AMD's count is too small for the waits in a step of the demo, and the larger count costs nothing on a busy machine; on
# AMD CPUs it does (benchmarks/results/cpu-intel-busy.json, cpu-busy.json).
TURNS, TURNS_ON_INTEL = "1000", "10000"
# On an Intel CPU float32 GEMMs go to MKL (ops/cpu/linear.py). This makes its sums independent of the number of threads:
# https://www.intel.com/content/www/us/en/docs/onemkl/developer-reference-fortran/2023-2/named-constants-for-cnr-control.html
REPRODUCIBLE = {"MKL_CBWR": "AUTO,STRICT"}
# If the user has set one of these, handgrad leaves that choice alone. It sets the number of threads with the first.
NUMBER = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
POLICY = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")

chosen: dict[str, str] = {}  # the variables that this process set


def choose() -> None:
    """Sets the variables that the user has not, unless torch has read them. MKL reads its variable on its first call."""
    if intel := processor.is_intel():
        chosen.update({name: value for name, value in REPRODUCIBLE.items() if name not in os.environ})
    if "torch" not in sys.modules:
        chosen.update(choice(os.environ, cores(), quota(), intel=intel))
    os.environ.update(chosen)


def environment_before() -> dict[str, str]:
    """The environment before `choose`, to hand to a child process."""
    return {name: value for name, value in os.environ.items() if name not in chosen}


def waiting(*, intel: bool) -> dict[str, str]:
    """The variables for waiting threads. Other runtimes count milliseconds: at 0 a thread sleeps at once."""
    return {"GOMP_SPINCOUNT": TURNS_ON_INTEL if intel else TURNS, "KMP_BLOCKTIME": "0"}


def choice(environment: Mapping[str, str], cores: int, quota: float | None, *, intel: bool) -> dict[str, str]:
    """The variables to set. torch picks the number of threads, one per core, unless a quota allows fewer."""
    number = {}
    if quota is not None and math.ceil(quota) < cores and not any(name in environment for name in NUMBER):
        number = {NUMBER[0]: str(max(1, math.ceil(quota)))}
    return number | ({} if any(name in environment for name in POLICY) else waiting(intel=intel))


def cores(root: Path = Path("/")) -> int:
    """Physical cores that this process may use."""
    usable = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    siblings = (root / f"sys/devices/system/cpu/cpu{number}/topology/thread_siblings_list" for number in usable)
    return len({path.read_text() if path.exists() else str(path) for path in siblings})


def quota(root: Path = Path("/")) -> float | None:
    """CPU quota of this process's control groups in CPUs, the smallest of all levels; None without a limit.

    Files: https://docs.kernel.org/admin-guide/cgroup-v2.html (`cpu.max`: quota and period) and
    https://docs.kernel.org/scheduler/sched-bwc.html (version 1: one file each)."""
    limits = []
    for folder, version in processor.group_folders("cpu", root):
        files = ("cpu.max",) if version == 2 else ("cpu.cfs_quota_us", "cpu.cfs_period_us")
        if all((folder / file).exists() for file in files):
            limit, period = " ".join((folder / file).read_text() for file in files).split()
            if limit not in ("max", "-1"):
                limits.append(int(limit) / int(period))
    return min(limits, default=None)


def describe(threads: int) -> str:
    """'2 threads on 2 cores, no CPU quota; GOMP_SPINCOUNT=1000 ...', and who set each."""
    limit = quota()
    number = next((name for name in NUMBER if name in os.environ), "")
    by = f" by {source(number)}" if number else ""
    parts = f"{threads} threads{by} on {cores()} cores, " + (
        "no CPU quota" if limit is None else f"a quota of {limit:g} CPUs"
    )
    if not (waiting := [name for name in POLICY if name in os.environ]):
        return f"{parts}; waiting threads spin as the runtime has it, slow beside other work"
    names = ", ".join(f"{name}={os.environ[name]}" for name in waiting)
    if set(waiting) <= chosen.keys():
        return f"{parts}; {names}, chosen by handgrad: waiting threads soon sleep and leave their core to other work"
    return f"{parts}; {names}, set by the user"


def source(name: str) -> str:
    return f"{name}={os.environ[name]} " + ("(chosen for the quota)" if name in chosen else "(set by the user)")
