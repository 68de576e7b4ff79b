"""Forms a group of processes, and leaves it."""

import contextlib
import datetime
import hashlib
import json
import os
import socket
import sys
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist

from handgrad.errors import LostRank, UsageError, end_interrupted, is_first_to_print, print_message, user_error
from handgrad.joins.parallel.heartbeat import WORK_FACTOR, Heartbeat
from handgrad.joins.parallel.launchers import RankInfo
from handgrad.joins.parallel.order import Order
from handgrad.joins.parallel.ranks import Ranks, exit_code

FIRST_RETRY_SECONDS, RETRY_SECONDS = 0.02, 0.5
OVERLAPPED_CTAS = 4  # thread blocks of a collective that overlaps kernels


@dataclass(frozen=True)
class Timeouts:
    """The limits on waiting for other ranks, in seconds, and the folder for thread stacks of a rank that exceeds one."""

    join_seconds: float  # at the start
    silence_seconds: float  # without a heartbeat
    stall_seconds: float  # in one operation
    stacks: Path | None = None


def join(info: RankInfo, device: torch.device, timeouts: Timeouts) -> Ranks:
    """Forms the group of all processes. `LostRank`: some do not join in `join_seconds`; `UsageError`: the port is taken."""
    if info.size == 1:
        return Ranks()
    if info.nodes == 1 and sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # one machine needs no network, and its name may not resolve
    check_loopback(info)
    store = open_store(info, timeouts.join_seconds)
    start = wait_for_all(store, info, timeouts.join_seconds)
    store = dist.PrefixStore(start, store)
    heartbeat = Heartbeat(
        dist.PrefixStore(start, open_store(info, timeouts.silence_seconds, hosts_store=False)),
        info.rank,
        info.size,
        timeout_seconds=timeouts.silence_seconds,
        stall_seconds=timeouts.stall_seconds,
        stacks=timeouts.stacks,
    )
    cuda = device.type == "cuda"
    limit = datetime.timedelta(seconds=WORK_FACTOR * timeouts.stall_seconds + 60)  # longer than the heartbeat's
    try:
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if cuda else "gloo",
            store=dist.PrefixStore("collectives", store),
            rank=info.rank,
            world_size=info.size,
            timeout=limit,
            device_id=torch.device("cuda", info.local_rank) if cuda else None,
        )
        host_group = dist.new_group(backend="gloo", timeout=limit)
    except (dist.DistError, RuntimeError) as error:
        raise LostRank(
            f"rank {info.rank} cannot reach the other ranks ({' '.join(str(error).split()):.200}); check the network with"
            " `python -m benchmarks.network` in the repository, and GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME on"
            " machines with several interfaces"
        ) from None
    assert isinstance(host_group, dist.ProcessGroup)
    groups = heartbeat, host_group, new_overlapped_group(limit) if cuda else None
    ranks = Ranks(info.rank, info.size, info.nodes, *groups, order=Order(store, info.size))
    heartbeat.pending, heartbeat.recent = ranks.pending, ranks.order.recent
    heartbeat.start()
    return ranks


@contextlib.contextmanager
def joined(info: RankInfo, device: torch.device, timeouts: Timeouts) -> Iterator[Ranks]:
    """Calls `join`, and leaves the group at the end of a `with` block. An error in the block ends the process at once. If
    only this rank has it, the others are told; if all ranks have it, rank 0 prints it."""
    try:
        ranks = join(info, device, timeouts)
    except LostRank as error:
        # A thread of `open_store` may still connect. If it returned from C++ while Python shuts down, it would abort.
        exit_now(error, prints=True)
    try:
        yield ranks
    except BaseException as error:
        ranks.close(error)
        if ranks.size > 1:
            exit_now(error, prints=ranks.is_rank_0)
        raise
    ranks.close()


def exit_now(error: BaseException, *, prints: bool) -> NoReturn:
    """Prints the error as the entry point would, and ends the process without the libraries' cleanup, which would wait for
    collectives that another rank never joins."""
    if isinstance(error, KeyboardInterrupt):
        end_interrupted()
    message = user_error(error)
    if message is not None:
        if prints or not message.shared:
            print_message(message)
    elif not isinstance(error, SystemExit) and is_first_to_print(
        "".join(traceback.format_exception(error))
    ):  # a bug in all ranks
        traceback.print_exception(error)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(exit_code(error))


def new_overlapped_group(limit: datetime.timedelta, ctas: int = OVERLAPPED_CTAS) -> dist.ProcessGroup:
    """A communicator of all ranks for collectives that overlap kernels. For an exchange on four H200, NCCL itself chose 32
    thread blocks, and each occupies a multiprocessor while it waits for the slowest rank."""
    options = dist.ProcessGroupNCCL.Options()
    options.config.min_ctas, options.config.max_ctas = 1, ctas
    options.is_high_priority_stream = True  # else it would wait behind kernels that fill the GPU
    group = dist.new_group(backend="nccl", pg_options=options, timeout=limit)
    assert isinstance(group, dist.ProcessGroup)
    return group


def open_store(info: RankInfo, limit_seconds: float, *, hosts_store: bool = True) -> dist.Store:
    """Connects to the ranks' store; calls take at most `limit_seconds`. Rank 0 hosts it, unless torchrun's agent does."""
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    hosts, limit = hosts_store and info.rank == 0 and not agent, datetime.timedelta(seconds=limit_seconds)
    stores: list[dist.Store | Exception] = []

    def make() -> None:
        try:
            stores.append(dist.TCPStore(info.address, info.port, info.size, hosts, limit, wait_for_workers=False))
        except (dist.DistError, RuntimeError) as error:
            stores.append(error)

    connecting = threading.Thread(target=make, daemon=True)  # another program may accept the connection and never answer
    connecting.start()
    connecting.join(limit_seconds + 5)  # torch may exceed its limit a little
    store = stores[0] if stores else None
    if not isinstance(store, dist.Store):
        reason = " ".join(str(store).split())
        where = f"{info.address}:{info.port}"
        if "EADDRINUSE" in reason or "address already in use" in reason.lower():
            raise UsageError(
                f"port {where} is in use by another program; set MASTER_PORT (torchrun: --master-port, or --standalone)"
            )
        raise LostRank(
            f"rank {info.rank} found no rank 0 at {where} within {limit_seconds:g} s; check that it was started, that"
            " MASTER_ADDR names its machine and that no firewall stands between"
        )
    return dist.PrefixStore("handgrad", store)


def wait_for_all(
    store: dist.Store, info: RankInfo, join_seconds: float, clock: Callable[[], float] = time.monotonic
) -> str:
    """Waits until every rank of this start has joined; returns a name for the start, the same on all ranks. Raises
    `LostRank` naming the missing ranks.

    torchrun's store survives a restart, with all that the last start's ranks wrote, and with c10d its agents do not agree
    on the restart count. So each rank writes a random word. Rank 0 publishes the list of words that it finds, and a rank
    confirms a list that contains its own word. If all ranks confirm, all words belong to this start."""
    deadline, own, pause = clock() + join_seconds, uuid.uuid4().hex, min(FIRST_RETRY_SECONDS, RETRY_SECONDS)
    store.set(f"joined/{info.rank}", own)
    while True:
        try:
            start, missing = look_for_all(store, info, own)
        except (dist.DistError, RuntimeError):
            raise LostRank(
                f"rank {info.rank} lost contact to rank 0 at {info.address}:{info.port} while waiting for others;"
                " read rank 0's error, and start all ranks again"
            ) from None
        if not missing:
            return start
        if clock() > deadline:
            shown = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
            raise LostRank(
                f"expected {info.size} ranks at {info.address}:{info.port} within {join_seconds:g} s, not there:"
                f" {shown}; start them, or start the others with a smaller number of processes"
            )
        time.sleep(pause)
        pause = min(1.5 * pause, RETRY_SECONDS)


def look_for_all(store: dist.Store, info: RankInfo, own: str) -> tuple[str, list[int]]:
    """(name of the start, ranks that have not joined it yet)."""
    joined = [f"joined/{rank}" for rank in range(info.size)]
    if missing := absent(store, joined):
        return "", missing
    if info.rank == 0:
        store.set("words", json.dumps([word.decode() for word in store.multi_get(joined)]))
    words = json.loads(store.get("words")) if store.check(["words"]) else []
    if own not in words:
        return "", [0]
    start = hashlib.sha256(" ".join(words).encode()).hexdigest()[:16]
    store.set(f"{start}/consents/{info.rank}", "")
    return start, absent(store, [f"{start}/consents/{rank}" for rank in range(info.size)])


def absent(store: dist.Store, keys: list[str]) -> list[int]:
    """The ranks whose key is missing; keys are in rank order."""
    return [] if store.check(keys) else [rank for rank, key in enumerate(keys) if not store.check([key])]


def check_loopback(info: RankInfo) -> None:
    """Raises `UsageError` if processes of one machine cannot reach each other, which takes its loopback interface."""
    if info.local_size == 1:
        return
    for family, address in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")):
        with contextlib.suppress(OSError), socket.create_server((address, 0), family=family) as server:
            socket.create_connection(server.getsockname()[:2], timeout=5).close()
            return
    raise UsageError(
        f"the {info.local_size} ranks of this machine cannot reach each other: its loopback interface is down or missing;"
        " bring it up with `ip link set lo up`"
    )
