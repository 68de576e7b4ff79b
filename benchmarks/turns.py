"""Contenders in processes of their own, which work on request and sleep while another works.

A process of its own has its own peak memory, its own start and its own state of the libraries. The protocol is lines: a
contender makes its first step unasked and reports it, then answers each line on its stdin with one line of JSON on its
stdout. "go 10" means ten seconds of steps. The end of its stdin ends it.
"""

import atexit
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TextIO

import torch

from benchmarks.contenders import More
from benchmarks.measuring import EnergySampler
from benchmarks.record import ROOT
from handgrad.errors import HandgradError
from handgrad.machine import devices

PATIENCE_SECONDS = 30  # before a process that should end is killed


class PeerFailed(Exception):
    """A contender cannot take part; the others can."""


class Run(Protocol):
    """The steps of a contender, in its process."""

    completed: int

    def turn(self, more: More) -> list[float]: ...


# The contender's side.


def answers() -> TextIO:
    """The pipe to the asking process. From now on other prints to stdout go to stderr."""
    pipe = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    return pipe


@contextlib.contextmanager
def excuses(pipe: TextIO) -> Iterator[None]:
    """Sends the reason if the contender cannot continue, if a person can act on it."""
    try:
        yield
    except torch.OutOfMemoryError:
        say(pipe, {"failed": "out of memory; a smaller --micro-batch or fewer --contenders may fit"})
    except HandgradError as error:
        say(pipe, {"failed": str(error)})
    except BrokenPipeError:  # the process that asked has ended
        os._exit(1)


def contend(
    make: Callable[[], Run],
    device: torch.device,
    lines: Iterable[str],
    pipe: TextIO,
    clock: Callable[[], float] = time.perf_counter,
) -> None:
    """Makes the contender and its first step, then a turn for each line."""
    with excuses(pipe):
        run = make()
        first = run.turn(lambda launched: False)
        say(pipe, {"loss": first[0], **memory(device)})
        for line in lines:
            command, argument = line.split()
            assert command == "go", f"expected 'go SECONDS', found {line!r}"
            say(pipe, timed_turn(run, float(argument), device, clock))


def say(pipe: TextIO, answer: dict[str, Any]) -> None:
    pipe.write(json.dumps(answer) + "\n")
    pipe.flush()


def timed_turn(
    run: Run, seconds: float, device: torch.device, clock: Callable[[], float] = time.perf_counter
) -> dict[str, Any]:
    """Makes steps for about `seconds`, from an idle device to an idle device: their number, their exact time, the power."""
    wait(device)
    with EnergySampler(device) as sampler:
        start = clock()
        losses = run.turn(lambda launched: clock() - start < seconds)
        wait(device)
        elapsed = clock() - start
    return {"steps": len(losses), "seconds": elapsed, "loss": losses[-1], "power": sampler.summary, **memory(device)}


def wait(device: torch.device) -> None:
    """Waits for the device, unless this process has not used it: a program of others may have taken all of its memory."""
    if device.type != "cuda" or torch.cuda.is_initialized():
        devices.synchronize(device)


def memory(device: torch.device) -> dict[str, int | None]:
    """The process's peak so far, in bytes, as torch's allocator counts it; None without one."""
    cuda = device.type == "cuda" and torch.cuda.is_initialized()
    return {
        "allocated_bytes": torch.cuda.max_memory_allocated(device) if cuda else None,
        "reserved_bytes": torch.cuda.max_memory_reserved(device) if cuda else None,
    }


# The asking side.


class Peer:
    """A contender's process, from outside."""

    def __init__(self, name: str, command: Sequence[str], environment: Mapping[str, str] | None = None):
        self.name = name
        self.start = time.perf_counter()
        pipe = subprocess.PIPE
        variables = {**os.environ, **(environment or {})}
        # In a group of its own: Ctrl-C is for the asking process, which ends this one.
        how = {"text": True, "cwd": ROOT, "env": variables, "process_group": 0}
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, **how)
        atexit.register(self.end)

    def answer(self) -> dict[str, Any]:
        """Its next line; raises `PeerFailed` if it reports a failure or has ended."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise PeerFailed(f"stopped with exit code {self.process.wait()}; its last output stands above")
        answer = json.loads(line)
        if "failed" in answer:
            raise PeerFailed(answer["failed"])
        return answer

    def ask(self, line: str) -> dict[str, Any]:
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # `answer` reports the end
            self.process.stdin.write(line + "\n")
            self.process.stdin.flush()
        return self.answer()

    def elapsed_seconds(self) -> float:
        """Since the process was started."""
        return time.perf_counter() - self.start

    def close(self) -> None:
        """Ends the process, after an interrupt at once, and waits until its memory is free."""
        if isinstance(sys.exception(), KeyboardInterrupt):
            self.end()
        assert self.process.stdin is not None and self.process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        try:
            self.process.wait(PATIENCE_SECONDS)
        except subprocess.TimeoutExpired:
            self.end()
        self.process.stdout.close()

    def end(self) -> None:
        """Kills the process and those that it started, and waits until it is gone: gigabytes take a while to free."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


def alternate(peers: dict[str, Peer], rounds: int) -> tuple[dict[str, list[dict[str, Any]]], dict[str, str]]:
    """(the answers of each peer to "step" in so many rounds, the reasons of those that failed). Closes and removes a peer
    that fails; the others go on."""
    turns: dict[str, list[dict[str, Any]]] = {name: [] for name in peers}
    failed: dict[str, str] = {}
    for number in range(rounds):
        for name, peer in list(peers.items()):
            try:
                turns[name].append(peer.ask("step"))
            except PeerFailed as failure:
                failed[name] = str(failure)
                note(f"{name}: {failure}")
                peer.close()
                del peers[name], turns[name]
        note(f"turn {number + 1} of {rounds}")
    return turns, failed


def note(text: str) -> None:
    """Prints progress to stderr; the figures go to stdout."""
    print(text, file=sys.stderr, flush=True)
