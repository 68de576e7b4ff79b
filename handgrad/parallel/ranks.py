"""The processes that train together and the collectives they use.

Collectives here only move bytes: what is added is added by us, in a fixed order, so no library's order can matter. Each is
named, and where the ranks check each other the names are compared before the bytes go out.
"""

import contextlib
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from handgrad.errors import HandgradError, LostRank, NumericsError, UsageError
from handgrad.parallel.heartbeat import Heartbeat

T = TypeVar("T")
# torch renames it: 2.11 has only the old name, 2.13 warns about it.
all_gather_tensor = dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor


@dataclass
class Ranks:
    """One process among those that train together; a single one talks to nobody."""

    rank: int = 0
    size: int = 1
    nodes: int = 1
    heartbeat: Heartbeat | None = None
    host_group: dist.ProcessGroup | None = None  # gloo, beside the devices' NCCL
    overlapped_group: dist.ProcessGroup | None = None  # takes few multiprocessors, for collectives beside kernels
    step: int = 0
    checking: bool = False  # compare the names of collectives before each
    count: int = 0  # collectives so far
    digest: int = 0  # of their names
    waited_seconds: float = 0.0  # for others, as far as the host did the waiting
    launched: deque[tuple[str, Any]] = field(default_factory=lambda: deque(maxlen=128))  # the last collectives

    @property
    def is_rank_0(self) -> bool:
        """Whether this is the rank that writes and speaks."""
        return self.rank == 0

    def begin_step(self, step: int, *, checking: bool) -> None:
        """From here on collectives belong to `step`."""
        self.step, self.checking = step, checking and self.size > 1
        self.digest = 0

    def set_status(self, operation: str) -> None:
        """Notes what this rank works at."""
        if self.heartbeat is not None:
            self.heartbeat.set_status(self.step, operation, waiting=False)

    @contextlib.contextmanager
    def waiting(self, operation: str) -> Iterator[None]:
        """Around a wait for the other ranks; a failure of what is waited for is one of theirs."""
        begun = time.perf_counter()
        if self.heartbeat is not None:
            self.heartbeat.set_status(self.step, operation)
        try:
            yield
        except RuntimeError as error:
            if self.size == 1:
                raise
            self._lost(error, operation)
        self.waited_seconds += time.perf_counter() - begun
        self.set_status(f"its own work after {operation}")

    # On the device, in the order of the current stream. `work.wait()` through `wait`.

    def all_to_all(self, received: Tensor, sent: Tensor, operation: str, *, overlapped: bool = False) -> dist.Work:
        """sent (W pieces) -> received (W pieces): every rank's piece for this one, in the order of ranks. `overlapped`:
        while kernels run that it must not disturb."""
        self._note(operation)
        return self._launch(dist.all_to_all_single, as_bytes(received), as_bytes(sent), operation, overlapped=overlapped)

    def all_gather(self, full: Tensor, part: Tensor, operation: str, *, overlapped: bool = False) -> dist.Work:
        """full (W parts) = the ranks' `part`s in their order; `part` may be this rank's place in `full`."""
        self._note(operation)
        return self._launch(all_gather_tensor, as_bytes(full), as_bytes(part), operation, overlapped=overlapped)

    def wait(self, work: dist.Work, operation: str) -> None:
        """Waits: the host on a CPU, the current stream on a GPU."""
        with self.waiting(operation):
            work.wait()

    def _launch(
        self, collective: Callable[..., Any], out: Tensor, given: Tensor, operation: str, *, overlapped: bool
    ) -> dist.Work:
        with self.waiting(operation):
            work = collective(out, given, group=self.overlapped_group if overlapped else None, async_op=True)
        self.launched.append((operation, work))
        return work

    # Between the hosts.

    def all_gather_numbers(self, values: Sequence[float], operation: str) -> list[list[float]]:
        """Every rank's numbers, in the order of ranks. All ranks tell equally many."""
        if self.size == 1:
            return [list(values)]
        mine = torch.tensor(values, dtype=torch.float64)
        everyone = torch.empty(self.size * len(values), dtype=torch.float64)
        with self.waiting(operation):
            all_gather_tensor(everyone, mine, group=self.host_group)
        return everyone.view(self.size, -1).tolist()

    def all_gather_objects(self, mine: T, operation: str) -> list[T]:
        """Every rank's object, in the order of ranks."""
        if self.size == 1:
            return [mine]
        everyone: list[Any] = [None] * self.size
        with self.waiting(operation):
            dist.all_gather_object(everyone, mine, group=self.host_group)
        return everyone

    def from_rank_0(self, make: Callable[[], T], operation: str) -> T:
        """What `make` returns on rank 0, which alone calls it. Its error for the user ends all ranks; rank 0 tells it."""
        if self.size == 1:
            return make()
        made: list[Any] = [None, None]
        if self.is_rank_0:
            try:
                made[0] = make()
            except HandgradError as error:
                made[1] = error
        told: list[Any] = [(made[0], None if made[1] is None else made[1].exit_code)]
        with self.waiting(operation):
            dist.broadcast_object_list(told, src=0, group=self.host_group)
        value, exit_code = told[0]
        if made[1] is not None:
            made[1].shared = True
            raise made[1]
        if exit_code is not None:
            raise SystemExit(exit_code)
        return value

    def barrier(self, operation: str) -> None:
        self.all_gather_numbers([], operation) if self.size == 1 else self.all_gather_numbers([0.0], operation)

    def pending(self) -> str:
        """The first collective that was launched and has not ended."""
        for operation, work in list(self.launched):
            if not work.is_completed():
                return operation
        return ""

    # Checks.

    def check_equal(self, what: str, told: dict[str, Any]) -> None:
        """Raises `UsageError` unless every rank has the same `told`, naming the first difference."""
        for rank, other in enumerate(self.all_gather_objects(told, what)):
            for key in {**told, **other}:
                if told.get(key) != other.get(key):
                    raise UsageError(
                        f"{what}: {key} is {told.get(key)!r} on rank {self.rank} and {other.get(key)!r} on rank {rank};"
                        " start all ranks with the same command, data and versions"
                    )

    def all_gather_checked(self, values: Sequence[float], operation: str) -> list[list[float]]:
        """`all_gather_numbers`, once the ranks have made sure that they stand at the same step and launched the same
        collectives."""
        if self.size == 1:
            return [list(values)]
        rows = self.all_gather_numbers([self.step, self.count, self.digest, *values], operation)
        if any(row[:3] != rows[0][:3] for row in rows):
            self._disagree(operation)
        return [row[3:] for row in rows]

    def compare_replicas(self, checksum: int) -> None:
        """Raises `NumericsError` unless all ranks have the same, naming those that have another than most."""
        sums = self.all_gather_objects(checksum, "checksums of the weights")
        usual = max(sums, key=sums.count)
        odd = [rank for rank, found in enumerate(sums) if found != usual]
        if odd:
            who = f"{named_ranks(odd)} other than the rest" if sums.count(usual) > len(odd) else "no majority is right"
            raise NumericsError(
                f"after step {self.step + 1} the ranks hold different weights ({who}): a bit was flipped in memory or on"
                " its way, so nothing was saved; start again from the last checkpoint, without that GPU if it recurs"
            )

    def _note(self, operation: str) -> None:
        """Notes a collective; where ranks check each other, makes sure that all of them are about to make the same one."""
        if self.checking:
            tag = zlib.crc32(operation.encode())
            rows = self.all_gather_numbers([self.step, self.count, tag], operation)
            if any(row != rows[0] for row in rows):
                self._disagree(operation)
        self.count += 1
        self.digest = zlib.crc32(operation.encode(), self.digest)

    def _disagree(self, operation: str) -> NoReturn:
        where = self.all_gather_objects((self.step, self.count, operation), "a difference between ranks")
        sides: dict[Any, list[int]] = {}
        for rank, place in enumerate(where):
            sides.setdefault(place, []).append(rank)
        told = "; ".join(
            f"{named_ranks(members)} at step {step}, collective {count}, {name}"
            for (step, count, name), members in sorted(sides.items(), key=lambda side: -len(side[1]))
        )
        error = NumericsError(
            f"the ranks are not at the same collective ({told}): one was skipped or came out of order, so sums of this"
            " step cannot be trusted; start again from the last checkpoint"
        )
        error.shared = True
        raise error

    def _lost(self, error: RuntimeError, operation: str) -> NoReturn:
        """A collective failed: another rank is gone. The heartbeat names it and ends this process; else this does."""
        if self.heartbeat is not None:
            self.heartbeat.await_verdict()
        reason = " ".join(str(error).split())
        raise LostRank(
            f"rank {self.rank} lost contact to another rank at step {self.step}, {operation} ({reason:.200});"
            " relaunch the same command to go on from the last checkpoint"
        )

    def close(self, error: BaseException | None = None) -> None:
        """Leaves the group; an `error` that the others do not have as well is told to them."""
        if self.size == 1:
            return
        if error is None:
            self.barrier("the end")
        words = "" if error is None or getattr(error, "shared", False) else " ".join(str(error).split())
        if self.heartbeat is not None:
            if words:
                self.heartbeat.leave(words)
            self.heartbeat.close()
        if error is None:
            dist.destroy_process_group()


def named_ranks(ranks: Sequence[int]) -> str:
    """'rank 3', 'ranks 0, 1'."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def as_bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)  # so that gloo moves bf16, too
