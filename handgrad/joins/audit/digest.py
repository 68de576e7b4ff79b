"""Digests of a training's state: of the weights, and of each flat buffer of the optimizer.

Each rank hashes every number that it owns together with its offset in the whole buffer, and sums the hashes. Integer
addition joins the ranks' sums, so the digest does not depend on the number of ranks.
"""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from handgrad.joins.parallel.ranks import Ranks
from handgrad.machine.graphs import Replayed
from handgrad.memory.layout import update_parts
from handgrad.ops import CONTROL_STEP, DIGEST_SUMS
from handgrad.training.state import SavedBuffer, TrainingState
from handgrad.training.step import Program

REPORT = "digest"
BITS32 = 0xFFFFFFFF


class StateDigest:
    """This rank's sums over the state after each `every`-th step. The step's reports carry them to the host."""

    def __init__(self, state: TrainingState, ranks: Ranks, every: int, *, graphs: bool):
        self.state, self.ranks, self.every = state, ranks, every
        self.names = ("weights", *state.optimizer)
        self.sums = torch.zeros(len(state.saved), DIGEST_SUMS, dtype=torch.int64, device=state.design.device)
        self.additions: list[Callable[[], object]] = [self.sums.zero_]
        for sums, saved in zip(self.sums, state.saved, strict=True):
            for piece, first in owned_pieces(state, saved):
                self.additions.append(partial(state.design.ops.digest, sums, piece, state.controls, first=first))
        self.add = Replayed(self.additions) if graphs else self.add_now
        self.step = 0

    def launches(self, program: Program) -> Program:
        """Adds the digest of the state after each step to the program."""
        return program.adding(
            before_step=[self.begin],
            after_update=[self.after_update],
            compiled_ahead=[self.add_now],
            reports={REPORT: self.sums},
        )

    def add_now(self) -> None:
        for launch in self.additions:
            launch()

    def begin(self, step: int) -> None:
        self.step = step

    def after_update(self) -> None:
        if (self.step + 1) % self.every == 0:
            self.add()

    def current(self, step: int) -> dict[str, str]:
        """The digests of the current state, after `step` steps."""
        self.state.controls[CONTROL_STEP] = step
        self.add_now()
        return self.joined(self.sums.cpu())

    def joined(self, sums: Tensor) -> dict[str, str]:
        """Joins the ranks' sums into digests of the whole state, 32 hexadecimal digits by buffer name, on all ranks."""
        everyone = self.ranks.all_gather_numbers(sums.view(torch.int32).flatten().tolist(), "digests of the state")
        if self.state.design.sharding.shards == 1:
            everyone = everyone[:1]  # each rank has the whole state
        halves = [[int(half) & BITS32 for half in row] for row in everyone]
        totals = [
            sum(row[index] + (row[index + 1] << 32) for row in halves) % 2**64 for index in range(0, len(halves[0]), 2)
        ]
        texts = [f"{total:016x}" for total in totals]
        return {name: "".join(texts[DIGEST_SUMS * i : DIGEST_SUMS * (i + 1)]) for i, name in enumerate(self.names)}


def owned_pieces(state: TrainingState, saved: SavedBuffer) -> Iterator[tuple[Tensor, int]]:
    """(piece, its offset in the whole buffer) of the numbers that this rank digests. State smaller than its parameter uses
    the parameter's first offsets. Zeros add nothing, so the digest equals the zero-padded state's, Muon's old format."""
    design, sharding, flat = state.design, state.design.sharding, saved.values
    if saved.layout.buckets != design.buckets:
        layouts, shard = (saved.layout, state.saved[0].layout), (sharding.shard, sharding.shards, design.optimizer.kind)
        for part, parameters in zip(*(update_parts(each.rows, each.buckets, *shard) for each in layouts), strict=True):
            yield flat[part.local], parameters.flat.start
        return
    if sharding.shards == 1:
        yield flat, 0
        return
    for bucket in design.buckets:
        owned = bucket.owned(sharding.shard, sharding.shards)
        piece = flat[owned if flat is state.parameters else bucket.local(sharding.shard, sharding.shards)]
        if piece.numel():
            yield piece, owned.start
