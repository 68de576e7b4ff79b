"""The group of training processes, and its collectives.

Collectives only move bytes: handgrad does all additions itself, in a fixed order, independent of the library's. Each
collective has a tag of name, dtype and sizes; `parallel.order` checks that all ranks run the same sequence.
"""

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from handgrad.errors import HandgradError, LostRank, NumericsError, UsageError, user_error
from handgrad.joins.parallel.heartbeat import Heartbeat
from handgrad.joins.parallel.order import Order, difference_text, first_difference

T = TypeVar("T")
# torch renamed it: 2.11 has only the old name, 2.13 warns about it.
all_gather_tensor = dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor
NETWORK = ("gloo", "NCCL")  # words in the text of a collective's error
LOCAL = (  # words in the text of an NCCL error that this rank caused
    "unhandled cuda error",
    "invalid usage",
    "invalid argument",
    "out of memory",
)


@dataclass
class Ranks:
    """One process of a training group. A single process does not communicate."""

    rank: int = 0
    size: int = 1
    nodes: int = 1
    heartbeat: Heartbeat | None = None
    host_group: dist.ProcessGroup | None = None  # gloo, in addition to NCCL for devices
    overlapped_group: dist.ProcessGroup | None = None  # uses few multiprocessors, for collectives that overlap kernels
    step: int = 0
    order: Order = field(default_factory=Order)  # of the collectives
    waited_seconds: float = 0.0  # that the host waited for other ranks
    clock: Callable[[], float] = time.perf_counter  # seconds
    launched: deque[tuple[str, Any]] = field(default_factory=lambda: deque(maxlen=128))  # the last collectives

    @property
    def is_rank_0(self) -> bool:
        """True on the rank that writes files and logs."""
        return self.rank == 0

    def begin_step(self, step: int) -> None:
        """Assigns the following collectives to `step`."""
        self.step = step
        self.order.begin_step()

    def set_status(self, operation: str) -> None:
        """Records this rank's current operation for the heartbeat."""
        if self.heartbeat is not None:
            self.heartbeat.set_status(self.step, operation, waiting=False)

    @contextlib.contextmanager
    def waiting(self, operation: str) -> Iterator[None]:
        """Encloses a wait for other ranks. Raises `LostRank` for a network error; any other error is this rank's own."""
        begun = self.clock()
        if self.heartbeat is not None:
            self.heartbeat.set_status(self.step, operation)
        try:
            yield
        except RuntimeError as error:
            if self.size == 1 or not is_network_error(error):
                raise
            self._lost(error, operation)
        self.waited_seconds += self.clock() - begun
        self.set_status(f"its own work after {operation}")

    # On the device, ordered with the current stream. Call `wait` before reading the result.

    def all_to_all(
        self, received: Tensor, sent: Tensor, operation: str, shares: Sequence[int] = (), *, overlapped: bool = False
    ) -> dist.Work:
        """sent (W pieces) -> received (W pieces): each rank's piece for this rank, in rank order. `shares`: elements of
        each sent piece, if they differ. `overlapped`: kernels run meanwhile and must not be slowed down."""
        return self._launch(all_to_all, received, sent, operation, shares, overlapped=overlapped)

    def all_gather(
        self, full: Tensor, part: Tensor, operation: str, shares: Sequence[int] = (), *, overlapped: bool = False
    ) -> dist.Work:
        """full (W parts) = the `part` of each rank, in rank order. `part` may be this rank's slice of `full`. `shares`:
        elements of each part, if they differ."""
        return self._launch(all_gather, full, part, operation, shares, overlapped=overlapped)

    def wait(self, work: dist.Work, operation: str) -> None:
        """Makes the host (on a CPU) or the current stream (on a GPU) wait for the collective."""
        with self.waiting(operation):
            work.wait()

    def _launch(
        self,
        collective: Callable[..., Any],
        received: Tensor,
        sent: Tensor,
        operation: str,
        shares: Sequence[int],
        *,
        overlapped: bool,
    ) -> dist.Work:
        shares = shares if len(set(shares)) > 1 else ()
        sizes = f"{size_text(sent)} -> {size_text(received)}"
        if shares:  # ranks send and receive different sizes
            sizes = f"{list(shares)} elements of {dtype_text(sent)}"
        self._enter(operation, f"{operation} ({sizes})")
        group = self.overlapped_group if overlapped else None
        with self.waiting(operation):
            pieces = [share * sent.itemsize for share in shares]
            work = collective(as_bytes(received), as_bytes(sent), pieces, group)
        self.launched.append((operation, work))
        return work

    def _enter(self, operation: str, tag: str) -> None:
        """Enters a collective into the sequence. If it is new there, waits until all ranks have reached it."""
        if self.order.enter(self.step, tag):
            with self.waiting(operation):
                self.order.agree()

    # Between the hosts.

    def all_gather_numbers(self, values: Sequence[float], operation: str) -> list[list[float]]:
        """Every rank's numbers, in rank order. All ranks must pass equally many."""
        if self.size == 1:
            return [list(values)]
        self._enter(operation, f"{operation} ({len(values)} numbers)")
        own = torch.tensor(values, dtype=torch.float64)
        everyone = torch.empty(self.size * len(values), dtype=torch.float64)
        with self.waiting(operation):
            all_gather_tensor(everyone, own, group=self.host_group)
        return everyone.view(self.size, -1).tolist()

    def all_gather_objects(self, value: T, operation: str) -> list[T]:
        """Every rank's object, in rank order."""
        if self.size == 1:
            return [value]
        self._enter(operation, operation)
        return self._gather(value, operation)

    def _gather(self, value: T, operation: str) -> list[T]:
        everyone: list[Any] = [None] * self.size
        with self.waiting(operation):
            dist.all_gather_object(everyone, value, group=self.host_group)
        return everyone

    def from_rank_0(self, make: Callable[[], T], operation: str) -> T:
        """Calls `make` on rank 0; returns its result on all ranks. A `HandgradError` of it ends all; rank 0 prints it."""
        if self.size == 1:
            return make()
        outcome: list[Any] = [None, None]
        if self.is_rank_0:
            try:
                outcome[0] = make()
            except HandgradError as error:
                outcome[1] = error
        self._enter(operation, operation)
        sent: list[Any] = [(outcome[0], None if outcome[1] is None else outcome[1].exit_code)]
        with self.waiting(operation):
            dist.broadcast_object_list(sent, src=0, group=self.host_group)
        value, exit_code = sent[0]
        if exit_code is None:
            return value
        error: Any = outcome[1] or SystemExit(exit_code)
        error.shared = True
        raise error

    def barrier(self, operation: str) -> None:
        if self.size > 1:
            self.all_gather_numbers([0.0], operation)

    def pending(self) -> str:
        """The first launched collective that has not completed."""
        for operation, work in list(self.launched):
            if not work.is_completed():
                return operation
        return ""

    # Checks.

    def check_equal(self, what: str, values: dict[str, Any]) -> None:
        """Raises `UsageError` unless every rank has the same `values`; names the first difference."""
        for rank, other in enumerate(self.all_gather_objects(values, what)):
            for key in {**values, **other}:
                if values.get(key) != other.get(key):
                    raise UsageError(
                        f"{what}: {key} is {values.get(key)!r} on rank {self.rank} and {other.get(key)!r} on rank {rank};"
                        " start all ranks with the same command, data and versions"
                    )

    def all_gather_checked(self, values: Sequence[float], operation: str) -> list[list[float]]:
        """Calls `all_gather_numbers`, and checks that all ranks are at the same step and launched the same collectives."""
        if self.size == 1:
            return [list(values)]
        rows = self.all_gather_numbers([self.step, self.order.count, self.order.digest, *values], operation)
        if any(row[:3] != rows[0][:3] for row in rows):
            recent = self._gather(list(self.order.recent), "a difference between ranks")
            raise NumericsError(difference_text(first_difference(dict(enumerate(recent)))))
        return [row[3:] for row in rows]

    def _lost(self, error: RuntimeError, operation: str) -> NoReturn:
        """Raises `LostRank` for a failed collective, unless the heartbeat first names the rank and ends the process."""
        if self.heartbeat is not None:
            self.heartbeat.await_verdict()
        reason = " ".join(str(error).split())
        raise LostRank(
            f"rank {self.rank} lost contact to another rank at step {self.step}, {operation} ({reason:.200});"
            " relaunch the same command to resume from the last checkpoint"
        )

    def close(self, error: BaseException | None = None) -> None:
        """Leaves the group. Sends the other ranks an `error` that only this rank has."""
        if self.size == 1:
            return
        if error is None:
            self.barrier("the end")
        if self.heartbeat is not None:
            if error is None or getattr(error, "shared", False):
                self.heartbeat.leave("")
            else:
                self.heartbeat.leave(error_text(error), exit_code(error))
        if error is None:
            dist.destroy_process_group()


def is_network_error(error: RuntimeError) -> bool:
    """True if a collective failed because of another rank. Other subclasses of `RuntimeError` than torch.distributed's (out
    of memory, a CUDA error) are this rank's own."""
    text = str(error)
    if isinstance(error, dist.DistError):
        return not any(cause in text for cause in LOCAL)
    return type(error) is RuntimeError and any(library in text for library in NETWORK)


def error_text(error: BaseException) -> str:
    """The error as one line: its message if meant for users, else type and text. Never "", which means an orderly end."""
    if (message := user_error(error)) is not None and (text := " ".join(str(message).split())):
        return text
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def exit_code(error: BaseException) -> int:
    if (message := user_error(error)) is not None:
        return message.exit_code
    return error.code if isinstance(error, SystemExit) and isinstance(error.code, int) else 1


def size_text(tensor: Tensor) -> str:
    return f"{tensor.nbytes} bytes of {dtype_text(tensor)}"


def dtype_text(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def all_to_all(received: Tensor, sent: Tensor, pieces: list[int], group: dist.ProcessGroup | None) -> Any:
    """`pieces`: bytes for each rank, if they differ."""
    equal_shares = [received.nbytes // len(pieces)] * len(pieces) if pieces else None
    return dist.all_to_all_single(received, sent, equal_shares, pieces or None, group=group, async_op=True)


def all_gather(full: Tensor, part: Tensor, pieces: list[int], group: dist.ProcessGroup | None) -> Any:
    """`pieces`: bytes of each rank's part, if they differ."""
    if not pieces:
        return all_gather_tensor(full, part, group=group, async_op=True)
    parts, rank = full.split(pieces), dist.get_rank()
    if parts[rank].data_ptr() != part.data_ptr():
        parts[rank].copy_(part)
    broadcasts = [(owner, piece) for owner, piece in enumerate(parts) if piece.nbytes]  # gloo gathers only equal parts
    return Works([dist.broadcast(piece, owner, group=group, async_op=True) for owner, piece in broadcasts])


class Works:
    """Several collectives, waited for as one."""

    def __init__(self, works: list[Any]):
        self.works = works

    def wait(self) -> None:
        for work in self.works:
            work.wait()

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self.works)


def as_bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)  # gloo does not support bf16
