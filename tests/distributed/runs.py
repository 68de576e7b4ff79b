"""Runs of several processes on this machine: started, waited for with a limit, none left behind; and what they wrote."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from handgrad.storage import checkpoint
from tests.distributed.launching import free_port
from tests.faults.firing import FIRED
from tests.test_runs import records, same_bits

ROOT = Path(__file__).parents[2]
LIMIT_SECONDS = 300.0  # reached by no machine that works
# How many threads work on a product decides its bits on a CPU.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1"}
SETTINGS = {
    "num_layers": 2,
    "num_heads": 2,
    "channels": 64,
    "sequence_length": 32,
    "lanes": 4,
    "micro_batch": 2,
    "tokens_per_step": 512,  # two micro-steps a lane
    "steps": 8,
    "warmup_steps": 3,
    "clip_norm": 0.5,  # below every step's norm
    "weight_decay": 0.1,
    "eval_every": 4,
    "eval_tokens": 37 * 32,  # 19 micro-batches, the last not full: nothing that ranks divide
    "save_every": 4,
    "keep_checkpoints": 0,
    "sample_tokens": 0,
    "silence_seconds": 30,
    "device": "cpu",
    "precision": "fp32",
}


def arguments(data: Path | str, out: Path, **settings: object) -> list[str]:
    """`handgrad train` of a tiny model; a setting that is None is not given."""
    flags = {**SETTINGS, "data": data, "out": out, **settings}
    named = [(f"--{name.replace('_', '-')}", str(value)) for name, value in flags.items() if value is not None]
    return ["train", "tiny", *(part for pair in named for part in pair)]


@dataclass
class Rank:
    """A process that was started: what it said, and how it ended."""

    folder: Path

    def number(self, name: str) -> int | None:
        path = self.folder / name
        return int(path.read_text()) if path.exists() else None

    @property
    def code(self) -> int | None:
        return self.number("code")

    @property
    def errors(self) -> str:
        path = self.folder / "errors"
        return path.read_text() if path.exists() else ""

    @property
    def output(self) -> str:
        return (self.folder / "output").read_text()

    @property
    def told(self) -> list[str]:
        """The lines meant for the user."""
        return [line for line in self.errors.splitlines() if line.startswith("handgrad: ")]

    @property
    def fired(self) -> bool:
        return FIRED in self.errors


@dataclass
class Started:
    """The ranks of one start."""

    ranks: list[Rank]

    def wait(self, limit_seconds: float = LIMIT_SECONDS, *, without: Sequence[int] = ()) -> list[int | None]:
        """The exit codes of all ranks, once they have ended, or those `without` have been left behind. What has not ended
        by then, or by the limit, is killed, and has None."""
        deadline = time.monotonic() + limit_seconds
        awaited = [rank for index, rank in enumerate(self.ranks) if index not in without]
        while any(rank.code is None for rank in awaited) and time.monotonic() < deadline:
            time.sleep(0.01)
        codes = [rank.code for rank in self.ranks]
        self.kill()
        return codes

    def see_fault(self) -> None:
        """Waits until the fault has fired; from then on the ranks need not wait for each other as long as configured."""
        deadline = time.monotonic() + LIMIT_SECONDS
        while not any(self.fired) and time.monotonic() < deadline:
            time.sleep(0.01)
        (self.ranks[0].folder.parent / "impatient").touch()

    def kill(self) -> None:
        deadline = time.monotonic() + 60
        for rank in self.ranks:
            while rank.code is None and time.monotonic() < deadline:
                if pid := rank.number("pid"):
                    with contextlib.suppress(ProcessLookupError):  # it has just ended, and its code is not yet written
                        os.kill(pid, signal.SIGKILL)
                time.sleep(0.02)

    @property
    def errors(self) -> str:
        """The output of all ranks, for a failed assertion."""
        return "\n".join(f"--- {index} ({rank.code}):\n{rank.errors}" for index, rank in enumerate(self.ranks))

    @property
    def fired(self) -> list[bool]:
        return [rank.fired for rank in self.ranks]


# `handgrad ...`, or `python -m handgrad ...`, without an import of torch: the server of a `Launcher` forks it.
PROGRAM = """#!{python} -SE
import json, os, signal, sys, tempfile, time
folder, command, parent = tempfile.mkdtemp(dir={folder!r}), sys.argv[1:], os.getppid()
if "-m" in command[:2]:
    command = command[command.index("handgrad") + 1 :]
fault = os.environ.get("TEST_FAULT", "none")
order = dict(folder=folder, fault=fault, command=command, environment=dict(os.environ), cwd=os.getcwd())
with open(folder + ".part", "w") as file:
    json.dump(order, file)
os.rename(folder + ".part", os.path.join({orders!r}, os.path.basename(folder) + ".order"))
def wait_for(name):
    while not os.path.exists(folder + name):
        if os.getppid() != parent:
            sys.exit("its parent is gone")
        time.sleep(0.01)
    return int(open(folder + name).read())
signal.signal(signal.SIGTERM, lambda *_: os.kill(wait_for("/pid"), signal.SIGTERM))
code = wait_for("/code")
sys.stdout.write(open(folder + "/output").read())
sys.stderr.write(open(folder + "/errors").read())
if code < 0:  # by the same signal
    sys.stdout.flush()
    sys.stderr.flush()
    if -code != signal.SIGKILL:
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
sys.exit(code)
"""


class Launcher:
    """Starts ranks, by a process that has imported everything and forks them."""

    def __init__(self, folder: Path):
        self.folder, self.all = folder, list[Started]()
        self.orders = folder / "orders"  # which the server looks through many times a second
        self.orders.mkdir()
        command = [sys.executable, "-m", "tests.distributed.worker", "serve", str(self.orders)]
        self.environment = {**os.environ, **ENVIRONMENT}
        self.server = subprocess.Popen(command, cwd=ROOT, env=self.environment, stdin=subprocess.PIPE)

    def write_program(self, path: Path) -> Path:
        path.write_text(PROGRAM.format(python=sys.executable, folder=str(self.folder), orders=str(self.orders)))
        path.chmod(0o755)
        return path

    def start(
        self,
        size: int,
        command: Sequence[str],
        fault: str = "none",
        *,
        others: Sequence[str] | None = None,
        only: Sequence[int] | None = None,
        port: int | None = None,
        cwds: Sequence[Path] = (),
        environment: dict[str, str] | None = None,
    ) -> Started:
        """`size` ranks, or `only` some of them; `others`: the command of all but the first; `cwds`: where they start;
        `environment`: in the place of this process's."""
        port, folder = port or free_port(), self.folder / str(len(self.all))
        environment = self.environment if environment is None else environment
        ranks = []
        for rank in range(size) if only is None else only:
            place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_PORT": port}
            place = {} if size == 1 else {name: str(value) for name, value in place.items()}
            (folder / str(rank)).mkdir(parents=True)
            ranks.append(Rank(folder / str(rank)))
            order = {
                "folder": str(ranks[-1].folder),
                "fault": fault,
                "command": list(others if others and rank else command),
                "environment": {**environment, **place, "TEST_FOLDER": str(folder)},
                "cwd": str(cwds[rank] if cwds else ROOT),
            }
            part = folder / f"{rank}.part"
            part.write_text(json.dumps(order))
            part.rename(self.orders / f"{folder.name}.{rank}.order")
        self.all.append(Started(ranks))
        return self.all[-1]

    def run(self, size: int, command: Sequence[str], fault: str = "none", *, cwds: Sequence[Path] = ()) -> Started:
        """A start whose ranks all come to a good end."""
        started = self.start(size, command, fault, cwds=cwds)
        assert started.wait() == [0] * size, started.errors
        return started

    def close(self) -> None:
        for started in self.all:
            started.kill()
        assert self.server.stdin is not None
        self.server.stdin.close()
        self.server.wait(60)


def same_run(a: Path, b: Path, step: int) -> None:
    """Both runs have the same bits after `step`: weights, moments, scales, and the record of all steps."""
    same_bits(a, b, step)
    states = [checkpoint.open_checkpoint(run / "checkpoints" / f"step_{step:08d}").manifest for run in (a, b)]
    assert states[0].get("fp8") == states[1].get("fp8")
    assert len(records(a, ("step",))) == step and records(a, ("validation",))


def saved_steps(run: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step_")) for path in (run / "checkpoints").glob("step_????????"))


def settings_of(run: Path, step: int) -> dict:
    """The configuration that a checkpoint holds."""
    return checkpoint.open_checkpoint(run / "checkpoints" / f"step_{step:08d}").manifest["config"]
