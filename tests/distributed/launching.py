"""Starting handgrad as other programs start it: a tiny run, its environment, what it leaves."""

import contextlib
import itertools
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import safetensors

ROOT = Path(__file__).parents[2]
TWO_NODES = Path(__file__).parent / "two_nodes.sh"
PATIENCE = 600.0  # seconds, reached by no machine that works
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


def environment(**more: str) -> dict[str, str]:
    """Ours, with the commands of this Python first, without what a launcher of the tests may have left."""
    kept = {n: v for n, v in os.environ.items() if not n.startswith(("SLURM_", "OMPI_", "PMI_", "PET_", "TORCHELASTIC"))}
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        kept.pop(name, None)
    path = f"{Path(sys.executable).parent}{os.pathsep}{kept['PATH']}"
    return {**kept, "PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **more}


def launch(command: list[str], folder: Path, *, code: int | None = 0, **more: str) -> str:
    """Runs `command` in `folder`; returns all that it said."""
    run = subprocess.run(command, cwd=folder, env=environment(**more), capture_output=True, text=True, timeout=PATIENCE)
    told = run.stdout + run.stderr
    assert code is None or run.returncode == code, told
    return told


def files_of(out: Path, step: int) -> dict[str, bytes]:
    """A checkpoint's tensors by name, as bytes: weights, moments, master weights. Several ranks write several files."""
    folder, found = out / "checkpoints" / f"step_{step:08d}", dict[str, bytes]()
    for path in folder.glob("*.safetensors"):
        found |= {name: tensor["data"] for name, tensor in safetensors.deserialize(path.read_bytes())}
    return found


def own_ports() -> Iterator[int]:
    """Ports below the system's own choices (32768), over and over: other ones in each worker, and begun elsewhere by each
    process."""
    workers, name = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")), os.environ.get("PYTEST_XDIST_WORKER", "gw0")
    each = 10_000 // workers
    first, offset = 20_000 + int(name.removeprefix("gw")) * each, os.getpid() * 97
    return itertools.cycle([first + (offset + number) % each for number in range(each)])


PORTS = own_ports()


def free_port() -> int:
    """One that nobody listens at, and that no other test takes before a rank does."""
    for port in PORTS:
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("", port))
            return port
    raise AssertionError("no free port")


def write_recipe(path: Path, **settings: Any) -> Path:
    path.write_text("".join(f"{name} = {value!r}\n" for name, value in {**TINY, **settings}.items()))
    return path


def wait_for(path: Path, *, containing: str = "") -> None:
    """Until `path` is there, and has `containing` in it if that is given."""
    deadline = time.monotonic() + PATIENCE
    while not path.exists() or (containing and containing not in path.read_text()):
        assert time.monotonic() < deadline, f"{path} does not come"
        time.sleep(0.02)
