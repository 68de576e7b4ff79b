"""The threads of a CPU: the choice, what the user has set, quotas of control groups, and the order of loading."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from handgrad.commands.arguments import COMMANDS, EXAMPLES
from handgrad.machine import processor, threads

ROOT = Path(__file__).parents[1]
CHOSEN = {"GOMP_SPINCOUNT": "1000", "KMP_BLOCKTIME": "0"}
HERE = threads.waiting(intel=processor.is_intel())["GOMP_SPINCOUNT"]


def put(root: Path, files: dict[str, str]) -> Path:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return root


@pytest.mark.parametrize(
    ("quota", "number"), [(None, None), (4.0, None), (8.0, None), (3.5, None), (2.5, "3"), (2.0, "2"), (0.25, "1")]
)
def test_only_a_quota_below_the_cores_sets_the_number(quota: float | None, number: str | None) -> None:
    found = threads.choice({}, 4, quota, intel=False)
    assert found.get("OMP_NUM_THREADS") == number and found.items() >= CHOSEN.items()
    assert threads.choice({}, 4, quota, intel=True) == found | {"GOMP_SPINCOUNT": "10000"}


@pytest.mark.parametrize("name", ["OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"])
def test_a_policy_of_the_user_stays(name: str) -> None:
    for intel in (False, True):
        assert threads.choice({name: "PASSIVE"}, 4, None, intel=intel) == {}
        assert threads.choice({name: "PASSIVE"}, 4, 2.0, intel=intel) == {"OMP_NUM_THREADS": "2"}


@pytest.mark.parametrize(
    ("intel", "user", "found"), [(True, None, "AUTO,STRICT"), (True, "AVX2", "AVX2"), (False, None, None)]
)
def test_mkl_sums_alike_on_any_number_of_threads(
    intel: bool, user: str | None, found: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the CPUs where it makes the products; the user's own mode stays."""
    monkeypatch.setattr(processor, "is_intel", lambda: intel)
    monkeypatch.setattr(threads, "chosen", {})
    monkeypatch.setattr(os, "environ", {} if user is None else {"MKL_CBWR": user})
    threads.choose()
    assert os.environ.get("MKL_CBWR") == found


@pytest.mark.parametrize("name", ["OMP_NUM_THREADS", "MKL_NUM_THREADS"])
def test_a_number_of_the_user_stays(name: str) -> None:
    assert threads.choice({name: "7"}, 4, 2.0, intel=False) == CHOSEN


def test_the_quota_is_the_least_of_all_levels(tmp_path: Path) -> None:
    root = put(
        tmp_path,
        {
            "proc/self/cgroup": "0::/jobs/mine\n",
            "sys/fs/cgroup/jobs/mine/cpu.max": "400000 100000\n",
            "sys/fs/cgroup/jobs/cpu.max": "150000 100000\n",
        },
    )
    assert threads.quota(root) == 1.5
    (root / "sys/fs/cgroup/jobs/cpu.max").write_text("max 100000\n")
    assert threads.quota(root) == 4.0


@pytest.mark.parametrize("mounted", ["cpu", "cpu,cpuacct"])
def test_the_quota_of_version_1(tmp_path: Path, mounted: str) -> None:
    """A container's own group is the top of what it sees, under a path that it does not see."""
    folder = f"sys/fs/cgroup/{mounted}"
    group = {
        "proc/self/cgroup": "5:cpuset:/\n3:cpu,cpuacct:/docker/ab12\n0::/\n",
        f"{folder}/cpu.cfs_period_us": "100000\n",
    }
    root = put(tmp_path, {**group, f"{folder}/cpu.cfs_quota_us": "200000\n"})
    assert threads.quota(root) == 2.0
    (root / folder / "cpu.cfs_quota_us").write_text("-1\n")
    assert threads.quota(root) is None


def test_no_control_groups(tmp_path: Path) -> None:
    assert threads.quota(tmp_path) is None


def test_two_threads_of_a_core_count_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1, 2}, raising=False)
    assert threads.cores(tmp_path) == 3
    topology = "sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
    siblings = {0: "0,2\n", 1: "1,3\n", 2: "0,2\n"}
    put(tmp_path, {topology.format(number): text for number, text in siblings.items()})
    assert threads.cores(tmp_path) == 2


def test_the_doctors_line(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*threads.NUMBER, *threads.POLICY):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(threads, "cores", lambda: 4)
    monkeypatch.setattr(threads, "quota", lambda: 1.5)
    assert threads.describe(4).endswith("; waiting threads spin as the runtime has it, slow beside other work")
    monkeypatch.setattr(threads, "chosen", {"OMP_NUM_THREADS": "2", **CHOSEN})
    for name, value in threads.chosen.items():
        monkeypatch.setenv(name, value)
    line = threads.describe(2)
    assert line.startswith("2 threads by OMP_NUM_THREADS=2 (chosen for the quota) on 4 cores, a quota of 1.5 CPUs; ")
    assert "GOMP_SPINCOUNT=1000, KMP_BLOCKTIME=0, chosen by handgrad" in line
    monkeypatch.setattr(threads, "chosen", {})
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    assert "(set by the user)" in (line := threads.describe(2)) and "OMP_WAIT_POLICY=ACTIVE" in line
    assert line.endswith(", set by the user")


# A fresh process prints its variables after `code`; `torch` stands in sys.modules where the code loaded it.
SHOW = (
    "; import os, sys; print('torch' in sys.modules, os.environ.get('GOMP_SPINCOUNT'), os.environ.get('OMP_WAIT_POLICY'))"
)


@pytest.mark.parametrize(
    ("code", "user", "shown"),
    [
        ("import handgrad", {}, "False None None"),
        ("import handgrad; handgrad.RunConfig", {}, f"False {HERE} None"),
        ("import handgrad; handgrad.RunConfig", {"OMP_WAIT_POLICY": "ACTIVE"}, "False None ACTIVE"),
        ("import torch, handgrad; handgrad.RunConfig", {}, "True None None"),
        ("from handgrad.cli import main; main(['report', 'nowhere'])", {}, f"{HERE} None"),
    ],
)
def test_variables_are_set_before_torch_is_loaded(code: str, user: dict[str, str], shown: str) -> None:
    command = [sys.executable, "-c", code + SHOW]
    run = subprocess.run(command, env=unset() | user, cwd=ROOT, capture_output=True, text=True, check=True)
    assert run.stdout.strip().endswith(shown)


def unset() -> dict[str, str]:
    """This process's environment without the variables that this file is about."""
    return {name: value for name, value in os.environ.items() if name not in (*threads.NUMBER, *threads.POLICY)}


# Runs each command line of argv[1] in a process of its own, which ends where torch is imported. There it appends itself and
# its environment to the file argv[2].
AT_TORCH = """
import json, os, sys

class Finder:
    def find_spec(self, name, path, target=None):
        if name == "torch":
            with open(file, "a") as out:
                print(json.dumps([words, dict(os.environ)]), file=out)
            os._exit(0)

words, lines, file = [], json.loads(sys.argv[1]), sys.argv[2]
sys.meta_path.insert(0, Finder())
from handgrad import __main__, cli
for words in lines:
    if os.fork() == 0:
        sys.argv = ["handgrad", *words]
        __main__.main()
        os._exit(0)
    os.wait()
"""
# Beside the example of every command: runs that choose their settings by data or weights, as soon as they are parsed.
PARSED_WITH_TORCH = [
    *(f"{command} --data shards" for command in ("train", "plan", "profile")),
    *(f"{command} --init-from weights" for command in ("train", "plan")),
    "train --init-from weights --data shards --lora rank=8",
]
WITHOUT_TORCH = {
    *("prepare", "import"),
    *("report", "watch", "runs", "checkpoints", "recipes"),
    *("diff", "certificate", "plot", "completion"),
}


def test_every_command_chooses_before_torch_is_loaded(tmp_path: Path) -> None:
    lines = [shlex.split(line) for line in PARSED_WITH_TORCH]
    lines += [shlex.split(example)[1:] for example in EXAMPLES.values()]
    assert {words[0] for words in lines} == COMMANDS.keys()
    lines += [["train", "--config", "gpt2-124m"], ["plan", "tiny"]]
    command, environment = [sys.executable, "-c", AT_TORCH, json.dumps(lines), "torch"], unset() | {"PYTHONPATH": str(ROOT)}
    subprocess.run(command, env=environment, cwd=tmp_path, check=True, capture_output=True, timeout=300)
    loads = [json.loads(line) for line in (tmp_path / "torch").read_text().splitlines()]
    assert {words[0] for words in lines} - {words[0] for words, _ in loads if words} <= WITHOUT_TORCH
    chosen = threads.waiting(intel=processor.is_intel()).items()
    assert [shlex.join(words) for words, environment in loads if not environment.items() >= chosen] == []
