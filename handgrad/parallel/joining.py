"""How the processes of a run find each other at its beginning, and part at its end."""

import contextlib
import datetime
import os
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist

from handgrad.config import RunConfig
from handgrad.errors import HandgradError, LostRank, UsageError
from handgrad.parallel.launchers import Place
from handgrad.parallel.ranks import Ranks
from handgrad.parallel.watch import WORK_FACTOR, Watch

RETRY_SECONDS = 0.5
CTAS_ASIDE = 4  # thread blocks of a collective that runs beside kernels


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
