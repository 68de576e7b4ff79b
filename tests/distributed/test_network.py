"""benchmarks/network.py: what it measures, and that a slow link is named."""

import re
from itertools import combinations

import pytest

from benchmarks import network
from benchmarks.network import Link, link_lines, round_robin, sent_bytes
from handgrad.errors import UsageError
from handgrad.joins.parallel.rendezvous import Timeouts
from tests.distributed.runs import Launcher

pytestmark = pytest.mark.nightly  # of a measuring script: nothing that the package promises rests on it


def test_it_measures_the_network(launcher: Launcher) -> None:
    started = launcher.run(2, ["-m", "benchmarks.network"])
    told = [line.removeprefix("ok    ") for line in started.ranks[0].output.splitlines()]
    assert not started.ranks[1].output
    assert told[0] == "2 ranks on 1 host(s), cpu buffers, gloo"
    row = r"(all_to_all|all_gather) of +(\S+ .iB): +(\d+) us, (\d+\.\d+) GB/s out of each rank"
    found = [re.fullmatch(row, line) for line in told[1:7]]
    assert all(found), told
    for match in found:
        size = int(match[2].split()[0]) << (10 if "KiB" in match[2] else 20)
        assert float(match[4]) == pytest.approx(size / 2 / float(match[3]) / 1e3, rel=0.1, abs=0.001)
    assert re.fullmatch(r"1 link\(s\) inside a node, each alone: slowest (\S+ GB/s), median \1, fastest \1, .*", told[7])
    cost = (
        r"a step of (\S+) would spend \d+ ms in collectives, computed from .* gradients (\S+) GB \d+ ms, weights (\S+) GB"
    )
    costs = [re.match(cost, line) for line in told[8:]]
    assert [match.groups() for match in costs if match] == [("124M", "0.25", "0.12"), ("1558M", "3.12", "1.56")]


def test_it_names_a_slow_link(launcher: Launcher) -> None:
    started = launcher.start(3, ["-m", "benchmarks.network"], "slow-link:1:2")
    assert started.wait() == [78] * 3, started.errors
    assert started.fired == [False, True, False]
    link = r"FAIL  rank 1 \(host (\S+)\) <-> rank 2 \(host \1\): \S+ GB/s, the median inside a node is \S+ GB/s"
    assert re.search(link, started.ranks[0].output), started.ranks[0].output
    assert not started.ranks[1].output and not started.ranks[2].output


def test_a_single_process_is_told_how_to_start() -> None:
    with pytest.raises(UsageError, match=r"^expected several .* torchrun --nproc-per-node=2 -m benchmarks\.network$"):
        network.main([])


def test_ranks_wait_as_long_as_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Timeouts] = []
    monkeypatch.setattr(network, "examine_network", lambda info, device, timeouts: asked.append(timeouts) or iter([]))
    assert network.main([]) == network.main(["--join-seconds", "7", "--stall-seconds", "900"]) == 0
    assert asked == [Timeouts(300, 30, 600), Timeouts(7, 30, 900)]


@pytest.mark.parametrize("size", [2, 3, 4, 7, 16, 64])
def test_every_pair_meets_once(size: int) -> None:
    rounds = round_robin(size)
    for pairs in rounds:
        ranks = [rank for pair in pairs for rank in pair]
        assert len(ranks) == len(set(ranks)), "pairs of a round run at the same time"
    assert sorted(pair for pairs in rounds for pair in pairs) == list(combinations(range(size), 2))
    assert len(rounds) == size - 1 + size % 2


@pytest.mark.parametrize("size", [65, 96, 1024])
def test_many_ranks_meet_their_neighbours(size: int) -> None:
    rounds = round_robin(size)
    assert len(rounds) == (size - 1).bit_length()
    for bit, pairs in enumerate(rounds):
        assert all(b - a == 1 << bit and b < size for a, b in pairs)
        assert len({rank for pair in pairs for rank in pair}) == 2 * len(pairs)
    assert {rank for pairs in rounds for pair in pairs for rank in pair} == set(range(size))


def test_links_are_held_against_their_own_class() -> None:
    hosts = ["a", "a", "b", "b"]
    rates = {(0, 1): 100e9, (2, 3): 98e9, (0, 2): 11e9, (0, 3): 11.2e9, (1, 2): 1.2e9, (1, 3): 7.8e9}
    links = [Link(*pair, rate, hosts[pair[0]] == hosts[pair[1]]) for pair, rate in rates.items()]
    assert list(link_lines(links, hosts)) == [
        (
            True,
            "2 link(s) inside a node, each alone: slowest 98.0 GB/s, median 99.0 GB/s, fastest 100.0 GB/s,"
            " both ways at once",
        ),
        (
            True,
            "4 link(s) between nodes, each alone: slowest 1.2 GB/s, median 9.4 GB/s, fastest 11.2 GB/s, both ways at once",
        ),
        (False, "rank 1 (host a) <-> rank 2 (host b): 1.2 GB/s, the median between nodes is 9.4 GB/s"),
    ]


def test_a_rank_keeps_its_own_part() -> None:
    assert [sent_bytes(64, ranks) for ranks in (2, 4, 64)] == [32, 48, 63]
