"""Starts every launch template that ships with processes on this CPU instead of its scheduler."""

import os
import stat
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from handgrad.settings import recipes
from tests.distributed.launching import PATIENCE, TWO_NODES, environment, files_of, free_port, launch, write_recipe
from tests.distributed.runs import Launcher
from tests.faults.firing import FIRED

LAUNCH = recipes.FOLDER / "launch"
SHELLS = [LAUNCH / "one_node.sh", LAUNCH / "slurm.sbatch", TWO_NODES]
# What `srun` does with a step of two tasks on one node: starts them, waits for them, exits with the largest exit code.
SRUN = """#!/usr/bin/env python
import os, subprocess, sys, time
command = sys.argv[1:]
while command[0].startswith("-"):
    command.pop(0)
step = {"SLURM_STEP_ID": "0", "SLURM_STEPID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_NTASKS": "2", "SLURM_NPROCS": "2"}
step |= {"SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NODELIST": "localhost", "SLURM_STEP_TASKS_PER_NODE": "2"}
step |= {"SLURM_NODEID": "0", "SLURM_LAUNCH_NODE_IPADDR": "127.0.0.1", "SLURMD_NODENAME": "localhost"}
own = [{"SLURM_PROCID": str(task), "SLURM_LOCALID": str(task)} for task in range(2)]
tasks = [subprocess.Popen(command, env={**os.environ, **step, **one}) for one in own]
if until := os.environ.get("TEST_STOPS_AFTER"):  # as --signal has SLURM do: every task of the step gets the signal
    while '"kind": "step"' not in (open(until).read() if os.path.exists(until) else ""):
        time.sleep(0.1)
    for task in tasks:
        task.terminate()
sys.exit(max(task.wait() % 256 for task in tasks))
"""
SCONTROL = '#!/usr/bin/env bash\necho "$@" >> "$TEST_SCONTROL"\n'


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory, shards: Path) -> Path:
    return write_recipe(tmp_path_factory.mktemp("launch") / "tiny.toml", device="cpu", data=str(shards))


@pytest.fixture(scope="module", autouse=True)
def forks(launcher: Launcher, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Makes a fork of all that torchrun and slurm.sbatch start as Python."""
    program = str(launcher.write_program(tmp_path_factory.mktemp("programs") / "python"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHON_EXEC", program)
        patch.setenv("PYTHON", program)
        yield


@pytest.fixture(scope="module")
def alone(recipe: Path, launcher: Launcher) -> dict[str, bytes]:
    """The two lanes computed by a single process."""
    out = recipe.parent / "alone"
    launcher.run(1, ["train", "--config", str(recipe), "--out", str(out)])
    return files_of(out, 2)


def read(name: str) -> dict[str, Any]:
    return yaml.safe_load((LAUNCH / name).read_text())


@pytest.mark.parametrize("script", SHELLS, ids=lambda path: path.name)
def test_the_shell_reads_it(script: Path) -> None:
    subprocess.run(["bash", "-n", str(script)], check=True)
    assert script.suffix == ".sbatch" or script.stat().st_mode & stat.S_IXUSR


def test_one_node_starts_again(recipe: Path, launcher: Launcher, tmp_path: Path) -> None:
    """CONFIG, OUT, GPUS and further arguments. Row 29 of the faults, the rest of it: a rank that is killed takes the other
    along, torchrun starts both again, and they go on from the last checkpoint."""
    steps = ["--steps", "6", "--save-every", "2", "--keep-checkpoints", "0", "--async-save", "false"]
    command, ours = [str(LAUNCH / "one_node.sh"), "--zero", "2", *steps], {"CONFIG": str(recipe), "GPUS": "2"}
    told = launch(command, tmp_path, **ours, OUT=str(tmp_path / "run"), RESTARTS="1", TEST_FAULT="kill:1:3")
    assert told.count(FIRED) == 1 and "resumed at step 2" in told and told.count("validation loss") == 1
    assert "ranks      2, 1 of 2 lanes each" in told
    launcher.run(1, ["train", "--config", str(recipe), "--out", str(tmp_path / "alone"), *steps])
    assert files_of(tmp_path / "run", 6) == files_of(tmp_path / "alone", 6)


@pytest.mark.nightly  # test_two_nodes.py has two nodes, test_one_node_starts_again a restart
def test_two_agents_start_again_by_c10d(recipe: Path, launcher: Launcher, tmp_path: Path) -> None:
    """torchrun's agents of two nodes find each other by c10d. The one whose rank is killed counts a restart, the other one
    may not, and both keep the store of the first start: the ranks find each other all the same."""
    out, steps = tmp_path / "run", ["--steps", "6", "--save-every", "2", "--keep-checkpoints", "0", "--async-save", "false"]
    agent = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1", "--max-restarts=3"]
    meeting = ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_port()}", "--rdzv-id=c10d"]
    command = [*agent, *meeting, "-m", "handgrad", "train", "--config", str(recipe), "--out", str(out), *steps]
    fault = {"TEST_FAULT": "kill:1:3", "TEST_STARTED": str(tmp_path / "started"), "GLOO_SOCKET_IFNAME": "lo"}
    logs = [(tmp_path / f"agent_{node}").open("w+") for node in "ab"]
    agents = [subprocess.Popen(command, env=environment(**fault), stdout=log, stderr=log) for log in logs]
    codes = [agent.wait(PATIENCE) for agent in agents]
    told = "".join(Path(log.name).read_text() for log in logs)
    assert codes == [0, 0] and told.count(FIRED) == 1 and "resumed at step 2" in told, told
    launcher.run(1, ["train", "--config", str(recipe), "--out", str(tmp_path / "alone"), *steps])
    assert files_of(out, 6) == files_of(tmp_path / "alone", 6)


@pytest.fixture
def slurm(tmp_path: Path) -> dict[str, str]:
    """A node with SLURM's commands, on which a job has been started."""
    for name, text in {"srun": SRUN, "scontrol": SCONTROL}.items():
        command = tmp_path / "bin" / name
        command.parent.mkdir(exist_ok=True)
        command.write_text(text)
        command.chmod(0o755)
    job = {"SLURM_JOB_ID": str(free_port() - 20000), "SLURM_JOB_NODELIST": "localhost", "SLURM_NTASKS": "2"}
    job |= {"SLURM_CPUS_PER_TASK": "1", "SLURM_PROCID": "0", "SLURM_NNODES": "1"}  # of the batch script itself
    return {**job, "TEST_SCONTROL": str(tmp_path / "scontrol.txt"), "OUT": str(tmp_path / "run")}


def start_batch(slurm: dict[str, str], folder: Path, *arguments: str, code: int) -> str:
    path = f"{folder / 'bin'}{os.pathsep}{environment()['PATH']}"
    return launch(["bash", str(LAUNCH / "slurm.sbatch"), *arguments], folder, code=code, **slurm, PATH=path)


def test_slurm(recipe: Path, alone: dict[str, bytes], slurm: dict[str, str], tmp_path: Path) -> None:
    told = start_batch({**slurm, "CONFIG": str(recipe)}, tmp_path, code=0)
    assert "ranks      2, 1 of 2 lanes each" in told
    assert files_of(tmp_path / "run", 2) == alone
    assert not (tmp_path / "scontrol.txt").exists()


def test_slurm_stops_a_job_and_starts_it_again(recipe: Path, slurm: dict[str, str], tmp_path: Path) -> None:
    """SIGTERM to all tasks: they save, and the job goes back into the queue."""
    job = {**slurm, "CONFIG": str(recipe)}
    stops = {"TEST_STOPS_AFTER": str(tmp_path / "run" / "metrics.jsonl")}
    told = start_batch({**job, **stops}, tmp_path, "--steps", "100000", "--save-every", "0", code=75)
    assert "stopped by SIGTERM" in told
    assert (tmp_path / "scontrol.txt").read_text() == f"requeue {slurm['SLURM_JOB_ID']}\n"


def test_slurm_does_not_repeat_a_mistake(slurm: dict[str, str], tmp_path: Path) -> None:
    mistaken = tmp_path / "mistaken"
    mistaken.write_text("#!/bin/sh\nexit 64\n")
    mistaken.chmod(0o755)
    start_batch({**slurm, "PYTHON": str(mistaken)}, tmp_path, code=64)
    assert not (tmp_path / "scontrol.txt").exists()


def test_what_slurm_is_asked_for() -> None:
    lines = (LAUNCH / "slurm.sbatch").read_text().split("\n")
    asked = dict(line.removeprefix("#SBATCH --").partition("=")[::2] for line in lines if line.startswith("#SBATCH"))
    assert asked["ntasks-per-node"] == asked["gpus-per-node"] and "gpus-per-task" not in asked
    assert asked["signal"] == "TERM@120", "to the tasks; B: would tell the shell only"
    assert "requeue" in asked and asked["open-mode"] == "append"
    first_command = lines.index("set -euo pipefail")
    assert all(not line.startswith("#SBATCH") for line in lines[first_command:]), (
        "sbatch stops reading at the first command"
    )


@pytest.mark.nightly  # test_launchers.py has its variables, test_one_node_starts_again torchrun
def test_skypilot(recipe: Path, alone: dict[str, bytes], tmp_path: Path) -> None:
    task = read("skypilot.yaml")
    known = {"name", "num_nodes", "resources", "volumes", "workdir", "envs", "setup", "run"}
    assert task.keys() == known and task["num_nodes"] == 2
    assert {"infra", "accelerators", "job_recovery"} == task["resources"].keys()
    mounts = tuple(task["volumes"])
    assert task["envs"]["DATA"].startswith(mounts) and task["envs"]["OUT"].startswith(mounts)
    assert task["envs"]["CONFIG"] in recipes.recipe_names()
    subprocess.run(["bash", "-n", "-c", task["setup"]], check=True)
    out = tmp_path / "run"
    ours = {"CONFIG": str(recipe), "DATA": str(shards_of(recipe)), "OUT": str(out), "STEPS": "2"}
    assert ours.keys() == task["envs"].keys()
    node = {"SKYPILOT_NODE_RANK": "0", "SKYPILOT_NODE_IPS": "127.0.0.1\n", "SKYPILOT_NUM_NODES": "1"}
    port = str(free_port())
    launch(["bash", "-c", task["run"].replace("29500", port)], tmp_path, **ours, **node, SKYPILOT_NUM_GPUS_PER_NODE="2")
    assert files_of(out, 2) == alone


def shards_of(recipe: Path) -> str:
    return tomllib.loads(recipe.read_text())["data"]


@pytest.mark.nightly  # test_launchers.py has its variables, test_two_nodes.py two nodes
def test_kubeflow(recipe: Path, alone: dict[str, bytes], tmp_path: Path) -> None:
    """Two nodes, as two pods would: each runs the command with what the runtime puts into its environment."""
    job = read("kubeflow_trainjob.yaml")
    assert (job["apiVersion"], job["kind"]) == ("trainer.kubeflow.org/v1alpha1", "TrainJob")
    assert job["spec"].keys() == {"runtimeRef", "trainer", "runtimePatches"}
    assert job["spec"]["runtimeRef"] == {"name": "torch-distributed"}
    trainer = job["spec"]["trainer"]
    assert trainer.keys() == {"numNodes", "numProcPerNode", "image", "command", "args", "env", "resourcesPerNode"}
    assert trainer["resourcesPerNode"]["limits"]["nvidia.com/gpu"] == trainer["numProcPerNode"]
    assert all(isinstance(word, str) for word in trainer["args"]) and trainer["args"][5] in recipes.recipe_names()
    assert not any(entry["name"].startswith("PET_") for entry in trainer["env"]), "the runtime sets them"
    (patch,) = job["spec"]["runtimePatches"]
    (node,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    pod = node["template"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert node["name"] == container["name"] == "node"
    assert {volume["name"] for volume in pod["volumes"]} == {mount["name"] for mount in container["volumeMounts"]}

    mount = container["volumeMounts"][0]["mountPath"]
    out = tmp_path / "run"
    ours = {"gpt2-124m": str(recipe), f"{mount}/fineweb": shards_of(recipe), f"{mount}/runs/gpt2-124m": str(out)}
    command = [ours.get(word, word) for word in (*trainer["command"], *trainer["args"])]
    assert set(ours.values()) <= set(command)
    port = str(free_port())
    shared = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "1", "PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": port}
    shared |= {entry["name"]: entry["value"] for entry in trainer["env"]}
    pods = [
        subprocess.Popen(
            command,
            cwd=tmp_path,
            env=environment(**shared, PET_NODE_RANK=rank),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        for rank in "01"
    ]
    told = [pod.communicate(timeout=PATIENCE)[0].decode() for pod in pods]
    assert [pod.returncode for pod in pods] == [0, 0], "\n".join(told)
    assert files_of(out, 2) == alone


@pytest.mark.nightly  # test_one_node_starts_again has torchrun, test_local_ranks.py the one line
def test_torchrun_has_an_error_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mistake that all ranks make is said by one of them, and ends torchrun's own report."""
    monkeypatch.delenv("PYTHON_EXEC")
    command = ["torchrun", "--standalone", "--nproc-per-node", "2", "-m", "handgrad", "train", "tny"]
    told = launch(command, tmp_path, code=1).splitlines()
    said = [line for line in told if line.startswith("handgrad: ")]
    assert len(said) == 1 and "unknown preset 'tny'" in said[0], told
    root_cause = told[next(number for number, line in enumerate(told) if line.startswith("Root Cause")) :]
    assert any(line.endswith(said[0]) for line in root_cause), told
