"""Sends a run's figures to trackers: Weights & Biases, TensorBoard, Trackio. No tracker can harm the run.

Each has a thread and a bounded queue. The training thread only enqueues records. If a tracker is slow, down or full, its
sink drops records and the run warns once. A figure's name is its place in metrics.jsonl: kind/field.
"""

import contextlib
import importlib
import importlib.util
import math
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from handgrad.errors import UsageError
from handgrad.names import nearest_name

PACKAGES = ("wandb", "tensorboard", "trackio")  # also the trackers' names
WAITING = 10_000  # most records in a queue, each a few hundred bytes
LAST_SECONDS = 10.0  # to drain the queues when a run ends
SKIPPED_FIELDS = ("kind", "step", "time")


class Tracker(Protocol):
    """An open tracker. Its methods may block and may raise anything."""

    def send(self, step: int, figures: dict[str, float]) -> None: ...

    def finish(self) -> None: ...


Opens = Callable[[], Tracker]


def chosen(log_to: str) -> list[str]:
    """The trackers in a comma-separated list. Raises `UsageError` for an unknown or missing one."""
    names = list(dict.fromkeys(name.strip() for name in log_to.split(",") if name.strip()))
    for name in names:
        if name not in PACKAGES:
            raise UsageError(
                f"unknown tracker {name!r} in log_to{nearest_name(name, PACKAGES)}; known: {', '.join(PACKAGES)}"
            )
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise UsageError(
                f"log_to {name} needs the package {name}, which is not installed: `pip install {name}`, or train without"
                " it; metrics.jsonl has every figure"
            )
    return names


def figures(record: dict[str, Any]) -> dict[str, float]:
    """The numbers of a record by name: step/loss, gpu/watts, evaluation/hellaswag/acc_norm. Leaves out tasks' standard
    errors and non-finite numbers; metrics.jsonl has them."""
    prefix = f"{record['kind']}/{record['task']}" if "task" in record else str(record["kind"])
    if isinstance(record.get("metrics"), dict):
        record = {name: pair[0] for name, pair in record["metrics"].items()}
    elif isinstance(record.get("tensors"), dict):
        record = record["tensors"]
    return dict(_numbers(prefix, {key: value for key, value in record.items() if key not in SKIPPED_FIELDS}))


def _numbers(prefix: str, content: dict[str, Any]) -> Iterator[tuple[str, float]]:
    for key, value in content.items():
        if isinstance(value, dict):
            yield from _numbers(f"{prefix}/{key}", value)
        elif isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            yield f"{prefix}/{key}", value


class Sink:
    """One tracker behind its queue. `opens` and all calls to the tracker run on the sink's thread."""

    def __init__(self, name: str, opens: Opens, size: int):
        self.name, self.opens = name, opens
        self.queue: queue.Queue[tuple[int, dict[str, float]]] = queue.Queue(size)
        self.warnings: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.warned, self.ending = False, threading.Event()
        self.thread = threading.Thread(target=self._work, name=f"log to {name}", daemon=True)
        self.thread.start()

    def put(self, step: int, values: dict[str, float]) -> None:
        try:
            self.queue.put_nowait((step, values))
        except queue.Full:
            self.warn(f"falls behind and misses figures from step {step} on")

    def warn(self, fault: str) -> None:
        """Leaves one warning for the training thread to print."""
        if not self.warned:
            self.warned = True
            self.warnings.put(f"log_to {self.name} {fault}; training continues, and metrics.jsonl has every figure")

    def _work(self) -> None:
        try:
            tracker = self.opens()
        except BaseException as error:  # a library's SystemExit must not end the run
            self.warn(f"could not start ({_named(error)})")
            return
        while not (self.ending.is_set() and self.queue.empty()):
            with contextlib.suppress(queue.Empty):
                record = self.queue.get(timeout=0.1)
                self._attempt(lambda record=record: tracker.send(*record), f"failed at step {record[0]}")
        self._attempt(tracker.finish, "failed at the end")

    def _attempt(self, action: Callable[[], None], fault: str) -> None:
        try:
            action()
        except BaseException as error:
            self.warn(f"{fault} ({_named(error)})")

    def end(self, until: float) -> None:
        """Waits for the queue to drain, until `time.monotonic()` reaches `until` at most."""
        self.thread.join(max(0.0, until - time.monotonic()))
        if self.thread.is_alive():
            self.warn(f"is not done {LAST_SECONDS:.0f} s after the end, and misses about {self.queue.qsize()} records")


def _named(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}".rstrip(": ")


class Sinks:
    """All trackers of a run."""

    def __init__(self, trackers: dict[str, Opens], say: Callable[[str], object], size: int = WAITING):
        """`say`: prints warnings, on the thread that calls `record` and `close`."""
        self.say, self.sinks = say, [Sink(name, opens, size) for name, opens in trackers.items()]
        # Step of the newest record. Some trackers reject an earlier step, and a save's record comes after later steps.
        self.step = 0

    def record(self, record: dict[str, Any]) -> None:
        if self.sinks and "step" in record and record["kind"] != "run" and (values := figures(record)):
            self.step = max(self.step, record["step"])
            for sink in self.sinks:
                sink.put(self.step, values)
        self.say_warnings()

    def say_warnings(self) -> None:
        for sink in self.sinks:
            while not sink.warnings.empty():
                self.say(sink.warnings.get())

    def close(self) -> None:
        """Gives the trackers a few seconds to drain their queues."""
        until = time.monotonic() + LAST_SECONDS
        for sink in self.sinks:
            sink.ending.set()
        for sink in self.sinks:
            sink.end(until)
        self.say_warnings()


# The trackers themselves.


def trackers(log_to: str, folder: Path, identity: str, config: dict[str, Any], completed: int) -> dict[str, Opens]:
    """Functions that open the trackers of a run. A resumed one keeps its `identity` and continues after `completed`."""
    functions: dict[str, Opens] = {
        "wandb": partial(open_wandb, folder, identity, config),
        "tensorboard": partial(TensorBoard, folder, config, completed),
        "trackio": partial(open_trackio, folder, identity, config),
    }
    return {name: functions[name] for name in chosen(log_to)}


@dataclass(frozen=True)
class Remote:
    """A run in Weights & Biases, or in Trackio, which has the same methods."""

    run: Any

    def send(self, step: int, figures: dict[str, float]) -> None:
        self.run.log(figures, step=step)

    def finish(self) -> None:
        self.run.finish()


def open_wandb(folder: Path, identity: str, config: dict[str, Any]) -> Remote:
    """Opens Weights & Biases. Its own variables (WANDB_MODE, WANDB_PROJECT, ...) apply."""
    wandb = importlib.import_module("wandb")
    settings = wandb.Settings(silent=True, console="off", disable_git=True, init_timeout=15)
    names = {"project": os.environ.get("WANDB_PROJECT", "handgrad"), "name": folder.absolute().name, "id": identity}
    return Remote(wandb.init(**names, dir=str(folder), config=config, resume="allow", settings=settings))


def open_trackio(folder: Path, identity: str, config: dict[str, Any]) -> Remote:
    """Opens Trackio on this machine, or in the Space that TRACKIO_SPACE_ID names."""
    trackio = importlib.import_module("trackio")
    names = {"project": os.environ.get("TRACKIO_PROJECT", "handgrad"), "name": f"{folder.absolute().name}-{identity}"}
    return Remote(trackio.init(**names, config=config, resume="allow", embed=False))


class TensorBoard:
    """Event files in RUN/tensorboard."""

    def __init__(self, folder: Path, config: dict[str, Any], completed: int):
        writer = importlib.import_module("torch.utils.tensorboard").SummaryWriter
        self.writer = writer(str(folder / "tensorboard"), purge_step=completed + 1)
        self.writer.add_text("config", "\n".join(f"    {key} = {value}" for key, value in config.items()), completed)

    def send(self, step: int, figures: dict[str, float]) -> None:
        for name, value in figures.items():
            self.writer.add_scalar(name, value, step)

    def finish(self) -> None:
        self.writer.close()
