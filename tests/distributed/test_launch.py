"""What recipes/launch starts is started: every template with processes on this CPU, in the place of its scheduler."""

import os
import signal
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
LAUNCH = ROOT / "recipes" / "launch"
TWO_NODES = Path(__file__).parent / "two_nodes.sh"
SHELLS = [LAUNCH / "one_node.sh", LAUNCH / "slurm.sbatch", TWO_NODES]
TINY = {
    "num_layers": 1,
    "num_heads": 2,
    "channels": 32,
    "sequence_length": 16,
    "micro_batch": 2,
    "tokens_per_step": 64,
    "steps": 2,
    "warmup_steps": 0,
    "eval_every": 0,
    "eval_tokens": 64,
    "sample_tokens": 0,
    "lanes": 2,
    "join_seconds": 60,
}

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
    while '"step"' not in (open(until).read() if os.path.exists(until) else ""):
        time.sleep(0.1)
    for task in tasks:
        task.terminate()
sys.exit(max(task.wait() % 256 for task in tasks))
"""
SCONTROL = '#!/usr/bin/env bash\necho "$@" >> "$TEST_SCONTROL"\n'


def environment(**more: str) -> dict[str, str]:
    """Ours, with the commands of this Python first, without what a launcher of the tests may have left."""
    kept = {n: v for n, v in os.environ.items() if not n.startswith(("SLURM_", "OMPI_", "PMI_", "PET_", "TORCHELASTIC"))}
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        kept.pop(name, None)
    path = f"{Path(sys.executable).parent}{os.pathsep}{kept['PATH']}"
    return {**kept, "PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **more}


def launch(command: list[str], folder: Path, *, code: int | None = 0, **more: str) -> str:
    """Runs `command` in `folder`; returns all that it said."""
    run = subprocess.run(command, cwd=folder, env=environment(**more), capture_output=True, text=True, timeout=120)
    told = run.stdout + run.stderr
    assert code is None or run.returncode == code, told
    return told


def files_of(out: Path, step: int) -> dict[str, bytes]:
    """A checkpoint's tensors: weights, moments, master weights."""
    folder = out / "checkpoints" / f"step_{step:08d}"
    return {name: (folder / name).read_bytes() for name in ("model.safetensors", "optimizer.safetensors")}


def free_port(least: int = 20000) -> int:
    for port in range(least + os.getpid() % 10000, 40000):
        with socket.socket() as held:
            if held.connect_ex(("127.0.0.1", port)):
                return port
    raise AssertionError("no free port")


def write_recipe(path: Path, **settings: Any) -> Path:
    path.write_text("".join(f"{name} = {value!r}\n" for name, value in {**TINY, **settings}.items()))
    return path


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory, shards: Path) -> Path:
    return write_recipe(tmp_path_factory.mktemp("launch") / "tiny.toml", device="cpu", data=str(shards))


@pytest.fixture(scope="module")
def alone(recipe: Path) -> dict[str, bytes]:
    """What a single process makes of the two lanes."""
    out = recipe.parent / "alone"
    launch([sys.executable, "-m", "handgrad", "train", "--config", str(recipe), "--out", str(out)], recipe.parent)
    return files_of(out, 2)


def read(name: str) -> dict[str, Any]:
    return yaml.safe_load((LAUNCH / name).read_text())


@pytest.mark.parametrize("script", SHELLS, ids=lambda path: path.name)
def test_the_shell_reads_it(script: Path) -> None:
    subprocess.run(["bash", "-n", str(script)], check=True)
    assert script.suffix == ".sbatch" or script.stat().st_mode & stat.S_IXUSR


def test_one_node(recipe: Path, alone: dict[str, bytes], tmp_path: Path) -> None:
    """CONFIG, OUT, GPUS, and further arguments."""
    out = tmp_path / "run"
    told = launch(
        [str(LAUNCH / "one_node.sh"), "--zero", "2"], tmp_path, CONFIG=str(recipe), OUT=str(out), GPUS="2", RESTARTS="0"
    )
    assert "ranks      2, 1 of 2 lanes each" in told and told.count("validation loss") == 1
    assert files_of(out, 2) == alone


def test_one_node_starts_again(recipe: Path, alone: dict[str, bytes], tmp_path: Path) -> None:
    """A rank that is killed takes the other along, and torchrun starts both again: they go on from the checkpoint."""
    out = tmp_path / "run"
    (tmp_path / "handgrad").mkdir()
    (tmp_path / "handgrad" / "__main__.py").write_text(KILLED_ONCE)
    told = launch(
        [str(LAUNCH / "one_node.sh"), "--save-every", "1", "--silence-seconds", "5"],
        tmp_path,
        CONFIG=str(recipe),
        OUT=str(out),
        GPUS="2",
        PYTHONPATH=f"{tmp_path}{os.pathsep}{ROOT}",
        TEST_MARK=str(tmp_path / "killed"),
    )
    assert (tmp_path / "killed").exists() and "resumed at step 1" in told, told
    assert files_of(out, 2) == alone


# In the place of `python -m handgrad`: rank 1 is killed in its second step, the first time.
KILLED_ONCE = """
import os, signal, sys
sys.path.pop(0); sys.path[:] = [path for path in sys.path if not os.path.exists(path + "/handgrad/__main__.py") or
                                os.path.exists(path + "/handgrad/cli.py")]
sys.modules.pop("handgrad", None)
from handgrad.cli import main
from handgrad.training.step import Stepper
begin = Stepper.begin
def begin_or_die(self, step, *arguments, **named):
    if step == 1 and os.environ["RANK"] == "1" and not os.path.exists(os.environ["TEST_MARK"]):
        open(os.environ["TEST_MARK"], "w").close()
        os.kill(os.getpid(), signal.SIGKILL)
    return begin(self, step, *arguments, **named)
Stepper.begin = begin_or_die
sys.exit(main())
"""


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
    """SIGTERM to all tasks: they save, the job goes back into the queue and later goes on."""
    job = {**slurm, "CONFIG": str(recipe)}
    stops = {"TEST_STOPS_AFTER": str(tmp_path / "run" / "metrics.jsonl")}
    told = start_batch({**job, **stops}, tmp_path, "--steps", "100000", "--save-every", "0", code=75)
    assert "stopped by SIGTERM" in told
    assert (tmp_path / "scontrol.txt").read_text() == f"requeue {slurm['SLURM_JOB_ID']}\n"
    saved = max((tmp_path / "run" / "checkpoints").iterdir()).name.removeprefix("step_")
    told = start_batch(job, tmp_path, "--steps", str(int(saved) + 1), "--allow-changes", code=0)
    assert f"resumed at step {int(saved)}" in told


def test_slurm_does_not_repeat_a_mistake(recipe: Path, slurm: dict[str, str], tmp_path: Path) -> None:
    told = start_batch({**slurm, "CONFIG": str(recipe)}, tmp_path, "--lanes", "3", code=64)
    assert "lanes must be a power of two" in told and not (tmp_path / "scontrol.txt").exists()


def test_what_slurm_is_asked_for() -> None:
    lines = (LAUNCH / "slurm.sbatch").read_text().split("\n")
    asked = dict(line.removeprefix("#SBATCH --").partition("=")[::2] for line in lines if line.startswith("#SBATCH"))
    assert asked["ntasks-per-node"] == asked["gpus-per-node"] and "gpus-per-task" not in asked
    assert asked["signal"] == "TERM@120", "to the tasks; B: would tell the shell only"
    assert "requeue" in asked and asked["open-mode"] == "append"
    first_command = lines.index("set -euo pipefail")
    assert all(not line.startswith("#SBATCH") for line in lines[first_command:]), "sbatch stops reading at the first command"


def test_skypilot(recipe: Path, alone: dict[str, bytes], tmp_path: Path) -> None:
    task = read("skypilot.yaml")
    known = {"name", "num_nodes", "resources", "volumes", "workdir", "envs", "setup", "run"}
    assert task.keys() == known and task["num_nodes"] == 2
    assert {"infra", "accelerators", "job_recovery"} == task["resources"].keys()
    mounts = tuple(task["volumes"])
    assert task["envs"]["DATA"].startswith(mounts) and task["envs"]["OUT"].startswith(mounts)
    assert (ROOT / task["envs"]["CONFIG"]).exists()
    subprocess.run(["bash", "-n", "-c", task["setup"]], check=True)
    out = tmp_path / "run"
    ours = {"CONFIG": str(recipe), "DATA": str(shards_of(recipe)), "OUT": str(out), "STEPS": "2"}
    assert ours.keys() == task["envs"].keys()
    node = {"SKYPILOT_NODE_RANK": "0", "SKYPILOT_NODE_IPS": "127.0.0.1\n", "SKYPILOT_NUM_NODES": "1"}
    port = str(free_port())
    launch(["bash", "-c", task["run"].replace("29500", port)], tmp_path, **ours, **node, SKYPILOT_NUM_GPUS_PER_NODE="2")
    assert files_of(out, 2) == alone


def shards_of(recipe: Path) -> str:
    import tomllib

    return tomllib.loads(recipe.read_text())["data"]


def test_kubeflow(recipe: Path, alone: dict[str, bytes], tmp_path: Path) -> None:
    """Two nodes, as two pods would: each runs the command with what the runtime puts into its environment."""
    job = read("kubeflow_trainjob.yaml")
    assert (job["apiVersion"], job["kind"]) == ("trainer.kubeflow.org/v1alpha1", "TrainJob")
    assert job["spec"].keys() == {"runtimeRef", "trainer", "runtimePatches"}
    assert job["spec"]["runtimeRef"] == {"name": "torch-distributed"}
    trainer = job["spec"]["trainer"]
    assert trainer.keys() == {"numNodes", "numProcPerNode", "image", "command", "args", "env", "resourcesPerNode"}
    assert trainer["resourcesPerNode"]["limits"]["nvidia.com/gpu"] == trainer["numProcPerNode"]
    assert all(isinstance(word, str) for word in trainer["args"]) and (ROOT / trainer["args"][5]).exists()
    assert not any(entry["name"].startswith("PET_") for entry in trainer["env"]), "the runtime sets them"
    (patch,) = job["spec"]["runtimePatches"]
    (node,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    pod = node["template"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert node["name"] == container["name"] == "node"
    assert {volume["name"] for volume in pod["volumes"]} == {mount["name"] for mount in container["volumeMounts"]}

    mount = container["volumeMounts"][0]["mountPath"]
    out = tmp_path / "run"
    ours = {"recipes/gpt2-124m.toml": str(recipe), f"{mount}/fineweb": shards_of(recipe), f"{mount}/runs/gpt2-124m": str(out)}
    command = [ours.get(word, word) for word in (*trainer["command"], *trainer["args"])]
    assert set(ours.values()) <= set(command)
    port = str(free_port())
    shared = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "1", "PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": port}
    shared |= {entry["name"]: entry["value"] for entry in trainer["env"]}
    pods = [
        subprocess.Popen(
            command, cwd=tmp_path, env=environment(**shared, PET_NODE_RANK=rank), stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        for rank in "01"
    ]
    told = [pod.communicate(timeout=120)[0].decode() for pod in pods]
    assert [pod.returncode for pod in pods] == [0, 0], "\n".join(told)
    assert files_of(out, 2) == alone


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


def test_two_nodes(recipe: Path, two_nodes, tmp_path: Path) -> None:
    """Two machines, as far as the network goes, make the same bits as one process."""
    run = two_nodes("train", "--config", str(recipe), "--steps", "4", "--out", str(tmp_path / "run"))
    told = run.communicate(timeout=120)[0].decode()
    assert run.returncode == 0 and "ranks      2, 1 of 2 lanes each" in told, told
    assert not of(run) & namespaces()
    one = tmp_path / "one"
    arguments = ["train", "--config", str(recipe), "--steps", "4", "--out", str(one)]
    launch([sys.executable, "-m", "handgrad", *arguments], tmp_path)
    assert files_of(tmp_path / "run", 4) == files_of(one, 4)


def test_two_nodes_leave_nothing(recipe: Path, two_nodes, tmp_path: Path) -> None:
    """The script is stopped in the middle of a run."""
    run = two_nodes("train", "--config", str(recipe), "--steps", "100000", "--out", str(tmp_path / "run"))
    deadline = time.monotonic() + 60
    while not (tmp_path / "run" / "metrics.jsonl").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert of(run) <= namespaces()
    run.send_signal(signal.SIGTERM)
    told = run.communicate(timeout=60)[0].decode()
    assert run.returncode == 143 and "stopped by SIGTERM" in told, told
    assert not of(run) & namespaces()
