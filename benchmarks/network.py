"""Bandwidth between ranks: the collectives of a training step, and every pair of ranks by itself.

    torchrun --nproc-per-node=8 -m benchmarks.network      (on each node; or: srun python -m benchmarks.network)

It exits with 78 if a link is slower than `SLOW` times the median of its class. All ranks take the same measurements and
gather all results, so they reach the same verdict.
"""

import math
import os
import socket
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.record import run_main
from handgrad.commands.flags import add_timeout_arguments
from handgrad.commands.parser import Formatter, Parser
from handgrad.errors import ConfigError, UsageError
from handgrad.joins.parallel.launchers import RankInfo, find_rank_info
from handgrad.joins.parallel.ranks import Ranks
from handgrad.joins.parallel.rendezvous import Timeouts, joined
from handgrad.machine import devices

MIB = 1 << 20
SIZES = (1 << 10, MIB)  # bytes of a buffer, and the large one:
LARGE = {"cuda": 64 * MIB, "cpu": 16 * MIB}
PAIR = {"cuda": 64 * MIB, "cpu": 4 * MIB}  # bytes each way
ROUNDS = 5  # the best one counts
MOST_PAIRED = 64  # more ranks than this take too long to pair all with all
SLOW = 0.7  # of the median of its class
WHERE = {True: "inside a node", False: "between nodes"}
MODELS = {"124M": 124.4e6, "1558M": 1557.6e6}  # parameters


@dataclass(frozen=True)
class Link:
    """A pair of ranks, and the bytes per second that each received while both sent."""

    first: int
    second: int
    rate: float
    inside: bool  # both are on one host


def examine_network(info: RankInfo, device: torch.device, timeouts: Timeouts) -> Iterator[tuple[bool, str]]:
    """Yields (passed, line) for the network between the ranks of this launch, on every rank.

    Raises `UsageError` for a single process, and the errors of `join`.
    """
    if info.size == 1:
        raise UsageError(
            "expected several processes to measure between, found one; start them on each node:"
            " torchrun --nproc-per-node=2 -m benchmarks.network"
        )
    if device.type not in LARGE:
        device = torch.device("cpu")
    with joined(info, device, timeouts) as ranks:
        yield from measure(ranks, device)


def measure(ranks: Ranks, device: torch.device) -> Iterator[tuple[bool, str]]:
    """Yields the lines for collectives, for links, and for a training step over them."""
    hosts = ranks.all_gather_objects(socket.gethostname(), "names of the hosts")
    backend = "NCCL" if device.type == "cuda" else "gloo"
    yield True, f"{ranks.size} ranks on {len(set(hosts))} host(s), {device.type} buffers, {backend}"
    large = {}
    for operation in ("all_to_all", "all_gather"):
        for size in (*SIZES, LARGE[device.type]):
            seconds = time_collective(ranks, device, operation, size)
            large[operation] = sent_bytes(size, ranks.size) / seconds
            yield (
                True,
                f"{operation:<10} of {human(size):>6}: {seconds * 1e6:9.0f} us, {speed(large[operation])} out of each rank",
            )
    links = measure_links(ranks, device, hosts)
    yield from link_lines(links, hosts)
    for name, parameters in MODELS.items():
        yield True, step_cost(name, parameters, large, ranks.size)


def sent_bytes(size: float, ranks: int) -> float:
    """Bytes of a buffer of `size` that a rank sends: all but its own part."""
    return size * (ranks - 1) / ranks


def time_collective(ranks: Ranks, device: torch.device, operation: str, size: int) -> float:
    """Seconds of the slowest rank for `operation` over buffers of `size` bytes, rounded up to equal parts."""
    part = -(-size // ranks.size)
    full = torch.zeros(part * ranks.size, dtype=torch.uint8, device=device)
    gathers = operation == "all_gather"
    given = torch.zeros(part if gathers else len(full), dtype=torch.uint8, device=device)
    name = f"{operation} of {human(size)}"

    def call() -> None:
        ranks.wait((ranks.all_gather if gathers else ranks.all_to_all)(full, given, name), name)

    call()  # makes the connections
    calls = max(2, min(20, 32 * MIB // size))
    best = math.inf
    for _ in range(ROUNDS):
        devices.synchronize(device)
        ranks.barrier(name)
        begun = time.perf_counter()
        for _ in range(calls):
            call()
        with ranks.waiting(name):
            devices.synchronize(device)
        took = (time.perf_counter() - begun) / calls
        best = min(best, max(row[0] for row in ranks.all_gather_numbers([took], name)))
    return best


def measure_links(ranks: Ranks, device: torch.device, hosts: list[str]) -> list[Link]:
    """Measures every pair of `round_robin`; the pairs of a round run at the same time."""
    size = PAIR[device.type]
    sent, received = (torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(2))
    links = []
    for pairs in round_robin(ranks.size):
        peers = {a: b for pair in pairs for a, b in (pair, pair[::-1])}
        peer = peers.get(ranks.rank)
        took = 0.0 if peer is None else time_pair(ranks, sent, received, peer)
        rows = ranks.all_gather_numbers([took], "times of pairs")
        links += [Link(a, b, size / max(rows[a][0], rows[b][0]), hosts[a] == hosts[b]) for a, b in pairs]
    return links


def round_robin(size: int) -> list[list[tuple[int, int]]]:
    """Rounds of pairs (a < b), no rank twice in a round: all pairs, or, of many ranks, pairs that differ in one bit."""
    if size > MOST_PAIRED:
        steps = [1 << bit for bit in range((size - 1).bit_length())]
        return [[(a, a ^ step) for a in range(size) if a < a ^ step < size] for step in steps]
    seats = list(range(size + size % 2))  # with an odd number, the partner of the last seat sits out
    rounds = []
    for _ in range(len(seats) - 1):
        pairs = zip(seats[: len(seats) // 2], reversed(seats), strict=False)
        rounds.append(sorted((min(pair), max(pair)) for pair in pairs if max(pair) < size))
        seats = [seats[0], seats[-1], *seats[1:-1]]  # all but the first move on
    return rounds


def time_pair(ranks: Ranks, sent: Tensor, received: Tensor, peer: int) -> float:
    """Seconds until this rank and `peer` have exchanged their buffers, both ways at once."""
    best = math.inf
    for attempt in range(ROUNDS + 1):
        swap(ranks, sent[:1], received[:1], peer)  # a barrier of the two
        begun = time.perf_counter()
        swap(ranks, sent, received, peer)
        if attempt:  # the first one makes the connection
            best = min(best, time.perf_counter() - begun)
    return best


def swap(ranks: Ranks, sent: Tensor, received: Tensor, peer: int) -> None:
    """sent -> `peer`'s received and the other way round; raises `LostRank` if the peer is gone."""
    both = [dist.P2POp(dist.isend, sent, peer), dist.P2POp(dist.irecv, received, peer)]
    with ranks.waiting(f"rank {ranks.rank} with rank {peer}"):
        for work in dist.batch_isend_irecv(both):
            work.wait()
        devices.synchronize(sent.device)


def link_lines(links: list[Link], hosts: list[str]) -> Iterator[tuple[bool, str]]:
    """Yields a line for each class of links, and one for each link below `SLOW` times its class's median."""
    classes: dict[bool, list[Link]] = defaultdict(list)
    for link in links:
        classes[link.inside].append(link)
    for inside, alike in sorted(classes.items(), reverse=True):
        rates = [link.rate for link in alike]
        usual = statistics.median(rates)
        yield (
            True,
            f"{len(alike)} link(s) {WHERE[inside]}, each alone: slowest {speed(min(rates))}, median {speed(usual)},"
            f" fastest {speed(max(rates))}, both ways at once",
        )
        for link in sorted(alike, key=lambda link: link.rate):
            if link.rate < SLOW * usual:
                ends = " <-> ".join(f"rank {rank} (host {hosts[rank]})" for rank in (link.first, link.second))
                yield False, f"{ends}: {speed(link.rate)}, the median {WHERE[inside]} is {speed(usual)}"


def step_cost(name: str, parameters: float, rates: dict[str, float], ranks: int) -> str:
    """The predicted time of a step's collectives: float32 gradients to their owners, bf16 weights back to all."""
    gradients, weights = sent_bytes(4 * parameters, ranks), sent_bytes(2 * parameters, ranks)
    there, back = gradients / rates["all_to_all"], weights / rates["all_gather"]
    return (
        f"a step of {name} would spend {(there + back) * 1e3:.0f} ms in collectives, computed from the rates of the largest"
        f" buffers: gradients {gradients / 1e9:.2f} GB {there * 1e3:.0f} ms, weights {weights / 1e9:.2f} GB"
        f" {back * 1e3:.0f} ms; training overlaps some of it"
    )


def human(size: int) -> str:
    """'64 MiB'."""
    return f"{size // MIB} MiB" if size >= MIB else f"{size >> 10} KiB"


def speed(rate: float) -> str:
    """Bytes per second as '11.0 GB/s'; three digits where it is less."""
    return f"{rate / 1e9:.1f} GB/s" if rate >= 1e9 else f"{rate / 1e9:.3f} GB/s"


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the lines on rank 0; returns the exit code, the same on all ranks."""
    parser = Parser("python -m benchmarks.network", formatter_class=Formatter)
    add_timeout_arguments(parser)
    parsed = parser.parse(sys.argv[1:] if arguments is None else arguments)
    info = find_rank_info(os.environ)
    timeouts = Timeouts(parsed.join_seconds, parsed.silence_seconds, parsed.stall_seconds)
    healthy = True
    for ok, line in examine_network(info, devices.resolve_device("auto", info.local_rank), timeouts):
        healthy = healthy and ok
        if info.rank == 0:
            print(f"{'ok  ' if ok else 'FAIL'}  {line}", flush=True)
    return 0 if healthy else ConfigError.exit_code


if __name__ == "__main__":
    run_main(main)
