"""The processes that train together and the collectives they use.

Collectives here only move bytes: what is added is added by us, in a fixed order, so no library's order can matter. Each is
named, and where the ranks check each other the names are compared before the bytes go out.
"""

import contextlib
import datetime
import os
import sys
import threading
import time
import traceback
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from handgrad.config import RunConfig
from handgrad.distributed.launchers import Place
from handgrad.distributed.watch import WORK_FACTOR, Watch
from handgrad.errors import HandgradError, LostRank, NumericsError, UsageError

T = TypeVar("T")
RETRY_SECONDS = 0.5
CTAS_ASIDE = 4  # thread blocks of a collective that runs beside kernels
# torch renames it: 2.11 has only the old name, 2.13 warns about it.
all_gather = dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor


@dataclass
class Ranks:
    """One process among those that train together; a single one talks to nobody."""

    rank: int = 0
    size: int = 1
    nodes: int = 1
    watch: Watch | None = None
    host: dist.ProcessGroup | None = None  # gloo: what the hosts tell each other, beside the devices' NCCL
    aside: dist.ProcessGroup | None = None  # for collectives that run beside kernels: takes few processors of a GPU
    step: int = 0
    checking: bool = False  # compare the names of collectives before each
    count: int = 0  # collectives so far
    digest: int = 0  # of their names
    waited_seconds: float = 0.0  # for others, as far as the host did the waiting
    launched: deque[tuple[str, Any]] = field(default_factory=lambda: deque(maxlen=128))  # the last collectives

    @property
    def leads(self) -> bool:
        """Whether this is the rank that writes and speaks."""
        return self.rank == 0

    def begin(self, step: int, *, checking: bool) -> None:
        """From here on collectives belong to `step`."""
        self.step, self.checking = step, checking and self.size > 1
        self.digest = 0

    def at(self, operation: str) -> None:
        """Tells the watch what this rank works at."""
        if self.watch is not None:
            self.watch.at(self.step, operation, waiting=False)

    @contextlib.contextmanager
    def waiting(self, operation: str) -> Iterator[None]:
        """Around a wait for the other ranks; a failure of what is waited for is one of theirs."""
        begun = time.perf_counter()
        if self.watch is not None:
            self.watch.at(self.step, operation)
        try:
            yield
        except RuntimeError as error:
            if self.size == 1:
                raise
            self._lost(error, operation)
        self.waited_seconds += time.perf_counter() - begun
        self.at(f"its own work after {operation}")

    # On the device, in the order of the current stream. `work.wait()` through `finish`.

    def exchange(self, received: Tensor, sent: Tensor, operation: str, *, beside: bool = False) -> dist.Work:
        """sent (W pieces) -> received (W pieces): every rank's piece for this one, in the order of ranks. `beside`: while
        kernels run that it should not disturb."""
        self._enter(operation)
        return self._started(dist.all_to_all_single, as_bytes(received), as_bytes(sent), operation, beside=beside)

    def collect(self, full: Tensor, part: Tensor, operation: str, *, beside: bool = False) -> dist.Work:
        """full (W parts) = the ranks' `part`s in their order; `part` may be this rank's place in `full`."""
        self._enter(operation)
        return self._started(all_gather, as_bytes(full), as_bytes(part), operation, beside=beside)

    def finish(self, work: dist.Work, operation: str) -> None:
        """Waits: the host on a CPU, the current stream on a GPU."""
        with self.waiting(operation):
            work.wait()

    def _started(
        self, collective: Callable[..., Any], out: Tensor, given: Tensor, operation: str, *, beside: bool
    ) -> dist.Work:
        with self.waiting(operation):
            work = collective(out, given, group=self.aside if beside else None, async_op=True)
        self.launched.append((operation, work))
        return work

    # Between the hosts.

    def tell(self, values: Sequence[float], operation: str) -> list[list[float]]:
        """Every rank's numbers, in the order of ranks. All ranks tell equally many."""
        if self.size == 1:
            return [list(values)]
        mine = torch.tensor(values, dtype=torch.float64)
        everyone = torch.empty(self.size * len(values), dtype=torch.float64)
        with self.waiting(operation):
            all_gather(everyone, mine, group=self.host)
        return everyone.view(self.size, -1).tolist()

    def objects(self, mine: T, operation: str) -> list[T]:
        """Every rank's object, in the order of ranks."""
        if self.size == 1:
            return [mine]
        everyone: list[Any] = [None] * self.size
        with self.waiting(operation):
            dist.all_gather_object(everyone, mine, group=self.host)
        return everyone

    def from_first(self, make: Callable[[], T], operation: str) -> T:
        """What `make` returns on rank 0, which alone calls it. Its error for the user ends all ranks; rank 0 tells it."""
        if self.size == 1:
            return make()
        made: list[Any] = [None, None]
        if self.leads:
            try:
                made[0] = make()
            except HandgradError as error:
                made[1] = error
        told: list[Any] = [(made[0], None if made[1] is None else made[1].exit_code)]
        with self.waiting(operation):
            dist.broadcast_object_list(told, src=0, group=self.host)
        value, exit_code = told[0]
        if made[1] is not None:
            made[1].shared = True
            raise made[1]
        if exit_code is not None:
            raise SystemExit(exit_code)
        return value

    def barrier(self, operation: str) -> None:
        self.tell([], operation) if self.size == 1 else self.tell([0.0], operation)

    def pending(self) -> str:
        """The first collective that was launched and has not ended."""
        for operation, work in list(self.launched):
            if not work.is_completed():
                return operation
        return ""

    # Checks.

    def agree(self, what: str, told: dict[str, Any]) -> None:
        """Raises `UsageError` unless every rank has the same `told`, naming the first difference."""
        for rank, other in enumerate(self.objects(told, what)):
            for key in {**told, **other}:
                if told.get(key) != other.get(key):
                    raise UsageError(
                        f"{what}: {key} is {told.get(key)!r} on rank {self.rank} and {other.get(key)!r} on rank {rank};"
                        " start all ranks with the same command, data and versions"
                    )

    def roll_call(self, values: Sequence[float], operation: str) -> list[list[float]]:
        """`tell`, after the ranks made sure that they stand at the same step and have launched the same collectives."""
        if self.size == 1:
            return [list(values)]
        rows = self.tell([self.step, self.count, self.digest, *values], operation)
        if any(row[:3] != rows[0][:3] for row in rows):
            self._disagree(operation)
        return [row[3:] for row in rows]

    def compare_replicas(self, checksum: int) -> None:
        """Raises `NumericsError` unless all ranks have the same, naming those that have another than most."""
        sums = self.objects(checksum, "checksums of the weights")
        usual = max(sums, key=sums.count)
        odd = [rank for rank, found in enumerate(sums) if found != usual]
        if odd:
            who = f"{named_ranks(odd)} other than the rest" if sums.count(usual) > len(odd) else "no majority is right"
            raise NumericsError(
                f"after step {self.step + 1} the ranks hold different weights ({who}): a bit was flipped in memory or on"
                " its way, so nothing was saved; start again from the last checkpoint, without that GPU if it recurs"
            )

    def _enter(self, operation: str) -> None:
        """Notes a collective; where ranks check each other, makes sure that all of them are about to make the same one."""
        if self.checking:
            tag = zlib.crc32(operation.encode())
            rows = self.tell([self.step, self.count, tag], operation)
            if any(row != rows[0] for row in rows):
                self._disagree(operation)
        self.count += 1
        self.digest = zlib.crc32(operation.encode(), self.digest)

    def _disagree(self, operation: str) -> NoReturn:
        where = self.objects((self.step, self.count, operation), "a difference between ranks")
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
        """A collective failed: another rank is gone. The watch finds out which, and ends this process; else this does."""
        if self.watch is not None:
            self.watch.suspect()
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
        if self.watch is not None:
            if words:
                self.watch.leave(words)
            self.watch.close()
        if error is None:
            dist.destroy_process_group()


def named_ranks(ranks: Sequence[int]) -> str:
    """'rank 3', 'ranks 0, 1'."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def as_bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)  # so that gloo moves bf16, too


def join(place: Place, device: torch.device, config: RunConfig) -> Ranks:
    """The group of all processes that were started together.

    Raises `LostRank` when not all of them come within `config.join_seconds`, `UsageError` when the port is taken.
    """
    if place.size == 1:
        return Ranks()
    if place.nodes == 1 and sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # one machine needs no network, and its name no address
    store = open_store(place, config.join_seconds)
    await_everyone(store, place, config.join_seconds)
    watch = Watch(
        open_store(place, config.silence_seconds, keeps=False),
        place.rank,
        place.size,
        silence_seconds=config.silence_seconds,
        stall_seconds=config.stall_seconds,
        stacks=Path(config.out) / "stacks",
    )
    cuda = device.type == "cuda"
    limit = datetime.timedelta(seconds=WORK_FACTOR * config.stall_seconds + 60)  # after our own watch
    try:
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if cuda else "gloo",
            store=dist.PrefixStore("collectives", store),
            rank=place.rank,
            world_size=place.size,
            timeout=limit,
            device_id=torch.device("cuda", place.local_rank) if cuda else None,
        )
        host = dist.new_group(backend="gloo", timeout=limit)
    except (dist.DistError, RuntimeError) as error:
        raise LostRank(
            f"rank {place.rank} cannot reach the other ranks ({' '.join(str(error).split()):.200}); check the network with"
            " `handgrad doctor --net`, and GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME on machines with several"
        ) from None
    assert isinstance(host, dist.ProcessGroup)
    ranks = Ranks(place.rank, place.size, place.nodes, watch, host, group_aside(limit) if cuda else None)
    watch.pending = ranks.pending
    watch.start()
    return ranks


@contextlib.contextmanager
def joined(place: Place, device: torch.device, config: RunConfig) -> Iterator[Ranks]:
    """`join`, until the end of a `with` block. An error in it that the other ranks do not have is told to them; of one that
    all have rank 0 tells. Either ends the process at once."""
    ranks = join(place, device, config)
    try:
        yield ranks
    except BaseException as error:
        ranks.close(error)
        if ranks.size > 1:
            end_at_once(error, speaks=ranks.leads)
        raise
    ranks.close()


def end_at_once(error: BaseException, *, speaks: bool) -> NoReturn:
    """Says what the entry point would say, and ends the process without the libraries' tidying up: that waits for
    collectives which another rank will never join."""
    code = 1
    if isinstance(error, HandgradError):
        code = error.exit_code
        if speaks or not error.shared:
            print(f"handgrad: {error}", file=sys.stderr)
    elif isinstance(error, SystemExit) and isinstance(error.code, int):
        code = error.code
    else:
        traceback.print_exception(error)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def group_aside(limit: datetime.timedelta, ctas: int = CTAS_ASIDE) -> dist.ProcessGroup:
    """A communicator of all ranks for what goes on beside kernels. NCCL's own choice for an exchange on four H200 was 32
    thread blocks, each of which keeps a processor for as long as it waits for the slowest rank."""
    options = dist.ProcessGroupNCCL.Options()
    options.config.min_ctas, options.config.max_ctas = 1, ctas
    options.is_high_priority_stream = True  # or it would wait for kernels that fill the GPU
    group = dist.new_group(backend="nccl", pg_options=options, timeout=limit)
    assert isinstance(group, dist.ProcessGroup)
    return group


def open_store(place: Place, limit_seconds: float, *, keeps: bool = True) -> dist.Store:
    """A connection to the table that all ranks write to, whose calls take at most `limit_seconds`; rank 0 keeps the table,
    or torchrun's agent."""
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    made: list[dist.Store | Exception] = []

    def make() -> None:
        try:
            made.append(
                dist.TCPStore(
                    place.address,
                    place.port,
                    place.size,
                    is_master=keeps and place.rank == 0 and not agent,
                    timeout=datetime.timedelta(seconds=limit_seconds),
                    wait_for_workers=False,
                )
            )
        except (dist.DistError, RuntimeError) as error:
            made.append(error)

    connecting = threading.Thread(target=make, daemon=True)  # for a program that takes the call and never answers
    connecting.start()
    connecting.join(limit_seconds + 5)  # torch may try a little longer than it is told
    store = made[0] if made else None
    if not isinstance(store, dist.Store):
        told = " ".join(str(store).split())
        where = f"{place.address}:{place.port}"
        if "EADDRINUSE" in told or "address already in use" in told.lower():
            raise UsageError(
                f"port {where} is in use by another program; set MASTER_PORT (torchrun: --master-port, or --standalone)"
            )
        raise LostRank(
            f"rank {place.rank} found no rank 0 at {where} within {limit_seconds:g} s; check that it was started, that"
            " MASTER_ADDR names its machine and that no firewall stands between"
        )
    return dist.PrefixStore(f"handgrad/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def await_everyone(store: dist.Store, place: Place, join_seconds: float) -> None:
    """Waits until every rank has shown up; raises `LostRank` naming those that have not."""
    deadline = time.monotonic() + join_seconds
    store.set(f"joined/{place.rank}", "here")
    missing = list(range(place.size))
    while True:
        try:
            missing = [rank for rank in missing if not store.check([f"joined/{rank}"])]
        except (dist.DistError, RuntimeError):
            raise LostRank(
                f"rank {place.rank} lost contact to rank 0 at {place.address}:{place.port} while waiting for others;"
                " see what rank 0 said, and start all ranks again"
            ) from None
        if not missing:
            return
        if time.monotonic() > deadline:
            shown = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
            raise LostRank(
                f"expected {place.size} ranks at {place.address}:{place.port} within {join_seconds:g} s, not there:"
                f" {shown}; start them, or start the others with a smaller number of processes"
            )
        time.sleep(RETRY_SECONDS)
