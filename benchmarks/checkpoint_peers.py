"""One fault, many formats: a SIGKILL in a save over an older state, and a flipped bit in the numbers.

    python -m benchmarks.checkpoint_peers benchmarks/results/cpu-checkpoint-peers.json

`torch.save`, safetensors and torch.distributed.checkpoint save over the same name, as most do, and by a rename, as the
careful do; handgrad saves as it does in training. A try counts only if the process was killed after the save had begun and
before it had ended. Then the state that is loaded must be the old one or the new one, whole.
"""

import argparse
import contextlib
import os
import random
import shutil
import signal
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from benchmarks.record import keep_commit, write_record
from handgrad.storage import checkpoint
from handgrad.storage.checkpoint import Stored

TRIES = 20
TENSORS, ELEMENTS = 12, 1 << 18  # 12 MiB
OLD, NEW = 1.0, 2.0  # every number of a state
State = dict[str, Tensor]
REFUSALS = (Exception, CheckpointException)  # which is none


def state_of(value: float) -> State:
    return {f"w{number}": torch.full((ELEMENTS,), value) for number in range(TENSORS)}


@dataclass(frozen=True)
class Peer:
    """A way to save a state under a path, and to load it; `numbers`: the file that holds most of them."""

    save: Callable[[State, Path], object]
    load: Callable[[Path], State]
    numbers: Callable[[Path], Path] = lambda path: path


def renamed(save: Callable[[State, Path], object]) -> Callable[[State, Path], object]:
    """Written under another name, which is then changed; of a folder the old one goes first."""

    def act(state: State, path: Path) -> None:
        new = path.with_name(path.name + ".new")
        shutil.rmtree(new, ignore_errors=True)
        save(state, new)
        if path.is_dir():
            shutil.rmtree(path)
        new.rename(path)

    return act


def save_dcp(state: State, path: Path) -> None:
    dcp.save(state, checkpoint_id=path, no_dist=True)


def load_dcp(path: Path) -> State:
    state = state_of(0.0)
    dcp.load(state, checkpoint_id=path, no_dist=True)
    return state


def largest(folder: Path) -> Path:
    return max((path for path in folder.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)


def save_handgrad(state: State, path: Path) -> None:
    tensors = [Stored.of(name, tensor) for name, tensor in state.items()]
    checkpoint.save(path, int(state["w0"][0]), tensors, {"config": {}}, {})


def load_handgrad(path: Path) -> State:
    found, _ = checkpoint.newest(path)
    if found is None:
        raise FileNotFoundError(path)
    return {name: found.tensor(checkpoint.WEIGHTS_FILE, name, (ELEMENTS,)) for name in state_of(0.0)}


def load_torch(path: Path) -> State:
    return torch.load(path, weights_only=True)


PEERS = {
    "`torch.save`": Peer(torch.save, load_torch),
    "`torch.save`, then a rename": Peer(renamed(torch.save), load_torch),
    "safetensors' `save_file`": Peer(safetensors.torch.save_file, safetensors.torch.load_file),
    "`save_file`, then a rename": Peer(renamed(safetensors.torch.save_file), safetensors.torch.load_file),
    "`torch.distributed.checkpoint`": Peer(save_dcp, load_dcp, largest),
    "the same, then a rename": Peer(renamed(save_dcp), load_dcp, largest),
    "handgrad": Peer(save_handgrad, load_handgrad, lambda path: largest(max((path).glob("step_*")))),
}


def in_child(act: Callable[[int], object], kill_after: float | None = None) -> tuple[int, float, str]:
    """(exit code, seconds, the bytes in its pipe) of an `act` in a fork, which is killed so long after its first
    byte."""
    read, write = os.pipe()
    pid = os.fork()
    if not pid:
        code = 1
        with contextlib.suppress(BaseException):
            act(write)
            code = 0
        os._exit(code)
    os.close(write)
    told = os.read(read, 1)
    begun = time.perf_counter()
    if kill_after is not None:
        while time.perf_counter() - begun < kill_after:
            pass
        os.kill(pid, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    seconds = time.perf_counter() - begun
    told += os.read(read, 9)
    os.close(read)
    return code, seconds, told.decode()


def saving(peer: Peer, path: Path) -> Callable[[int], None]:
    state = state_of(NEW)

    def act(pipe: int) -> None:
        os.write(pipe, b"b")  # begins
        peer.save(state, path)
        os.write(pipe, b"e")  # ended

    return act


def outcome(peer: Peer, path: Path) -> str:
    """The state that a load finds: old, new, or lost, which is an error or something between."""
    try:
        found = peer.load(path)
    except REFUSALS:
        return "lost"
    for name, value in (("old", OLD), ("new", NEW)):
        if found.keys() == state_of(0.0).keys() and all(bool((tensor == value).all()) for tensor in found.values()):
            return name
    return "lost"


def kills(peer: Peer, folder: Path, dice: random.Random) -> dict[str, Any]:
    """The outcomes of as many kills as counted, at moments that spread over the time of a save."""
    times = []
    for number in range(3):
        path = fresh(peer, folder / f"timed{number}")
        code, seconds, told = in_child(saving(peer, path))
        assert (code, told) == (0, "be"), f"a save without a kill: {code}, {told}"
        assert outcome(peer, path) == "new"
        times.append(seconds)
    counts, attempts = {"old": 0, "new": 0, "lost": 0}, 0
    while sum(counts.values()) < TRIES:
        attempts += 1
        path = fresh(peer, folder / f"killed{attempts}")
        code, _, told = in_child(saving(peer, path), dice.uniform(0, statistics.median(times)))
        if code == -signal.SIGKILL and told == "b":
            counts[outcome(peer, path)] += 1
        shutil.rmtree(path.parent)
    milliseconds = round(1e3 * statistics.median(times), 1)
    return {"tries": TRIES, **counts, "attempts": attempts, "save_ms": milliseconds}


def fresh(peer: Peer, folder: Path) -> Path:
    """The path of an old state."""
    folder.mkdir()
    peer.save(state_of(OLD), folder / "state")
    assert outcome(peer, folder / "state") == "old"
    return folder / "state"


def flips(peer: Peer, folder: Path, dice: random.Random) -> dict[str, int]:
    """Loads of files of which one bit of the numbers is flipped: refused, or silently another number."""
    counts = {"refused": 0, "silent": 0}
    path = fresh(peer, folder / "flipped")
    file = peer.numbers(path)
    whole = file.read_bytes()
    for _ in range(TRIES):
        content, place = bytearray(whole), dice.randrange(len(whole) // 4, len(whole) * 3 // 4)
        content[place] ^= 1 << dice.randrange(8)
        file.write_bytes(content)
        try:
            found = peer.load(path)
        except REFUSALS:
            counts["refused"] += 1
            continue
        assert any(bool((tensor != OLD).any()) for tensor in found.values()), "the bit did not flip"
        counts["silent"] += 1
    return {"tries": TRIES, **counts}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", help="the record")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    keep_commit()
    warnings.filterwarnings("ignore", message="Detected an existing checkpoint")  # on purpose
    torch.set_num_threads(1)  # forks
    rows: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for number, (name, peer) in enumerate(PEERS.items()):
            place, dice = Path(folder, str(number)), random.Random(f"{given.seed} {name}")
            place.mkdir()
            rows[name] = {"kills": kills(peer, place, dice), "flips": flips(peer, place, dice)}
            print(f"{name:<32} {rows[name]}", flush=True)
    size = 4 * TENSORS * ELEMENTS
    versions = {"safetensors": safetensors.__version__}
    write_record(given.out, torch.device("cpu"), libraries=versions, seed=given.seed, state_bytes=size, rows=rows)


if __name__ == "__main__":
    main()
