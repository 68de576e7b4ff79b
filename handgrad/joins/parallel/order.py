"""Checks that all ranks run the same sequence of collectives. Otherwise sums would be silently wrong.

A collective's tag is its name, dtype and sizes. Steps repeat the same pairs of consecutive tags, and each rank remembers
the pairs it has seen. On a new pair, a rank sends no bytes until every rank has reached the same tag: each increments a
counter in the rendezvous store. So a rank that skips a collective, or passes another size, stops before it corrupts a sum;
the others wait for it, and the heartbeat compares the last collectives of all. A step that repeats known pairs exchanges
nothing.
"""

import time
import zlib
from collections import deque
from collections.abc import Mapping, Sequence

import torch.distributed as dist

RECENT = 256  # collectives in a rank's history: more than a step has
POLL_SECONDS, LONGEST_POLL_SECONDS = 0.001, 0.05

Entry = tuple[int, int, str]  # (number, step, tag) of a collective


class Order:
    """One rank's sequence of collectives."""

    def __init__(self, store: dist.Store | None = None, size: int = 1):
        """`store`: the store for agreeing; None: the ranks do not agree."""
        self.store, self.size = store, size
        self.count = 0
        self.digest = 0  # of the tags since `begin_step`
        self.last = 0  # the hash of the last tag
        self.known: set[tuple[int, int]] = set()  # hashes of consecutive tags
        self.recent: deque[Entry] = deque(maxlen=RECENT)

    def begin_step(self) -> None:
        self.digest = 0

    def enter(self, step: int, tag: str) -> bool:
        """Numbers the next collective. True if the pair is new, so that the ranks must agree before it begins."""
        checksum = zlib.crc32(tag.encode())
        self.recent.append((self.count, step, tag))
        self.count += 1
        self.digest = zlib.crc32(tag.encode(), self.digest)
        succession, self.last = (self.last, checksum), checksum
        new = succession not in self.known
        self.known.add(succession)
        return new and self.store is not None

    def agree(self) -> None:
        """Waits until every rank has reached the collective entered last."""
        assert self.store is not None
        key = f"collective/{self.count}"
        if self.store.add(f"{key}/{self.last}", 1) == self.size:
            self.store.set(key, "agreed")
        pause = POLL_SECONDS
        while not self.store.check([key]):
            time.sleep(pause)
            pause = min(1.5 * pause, LONGEST_POLL_SECONDS)


def first_difference(sequences: Mapping[int, Sequence[Entry]]) -> dict[tuple[int, int, str], list[int]]:
    """Finds the first number at which two ranks' entries differ; returns entry -> ranks there, or {} if none differ."""
    numbered = {rank: {number: (step, tag) for number, step, tag in recent} for rank, recent in sequences.items()}
    for number in sorted({number for entries in numbered.values() for number in entries}):
        sides: dict[tuple[int, int, str], list[int]] = {}
        for rank, entries in sorted(numbered.items()):
            if number in entries:
                step, tag = entries[number]
                sides.setdefault((step, number, tag), []).append(rank)
        if len(sides) > 1:
            return sides
    return {}


def difference_text(sides: Mapping[tuple[int, int, str], Sequence[int]]) -> str:
    """The message about ranks at different collectives."""
    stands = "; ".join(
        f"{named_ranks(members)} at step {step}, collective {number}, {tag}"
        for (step, number, tag), members in sorted(sides.items(), key=lambda side: -len(side[1]))
    )
    return (
        f"the ranks are not at the same collective ({stands}): one was skipped, came out of order or has another size,"
        " so sums of this step cannot be trusted; start again from the last checkpoint"
    )


def named_ranks(ranks: Sequence[int]) -> str:
    """'rank 3', 'ranks 0, 1'."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
