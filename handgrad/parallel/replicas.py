"""The ranks' copies of the weights, compared in the steps that use them.

A wrong bit in one rank's copy makes a wrong gradient for all ranks. ZeRO 1 and 2 then overwrite the copy with its owners'
weights, and nothing shows what happened. So a step takes the checksums after its backward and before its update.

Master weights and moments have no second copy where ranks share them: a checkpoint's judge looks at those.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch

from handgrad.errors import NumericsError
from handgrad.parallel.order import named_ranks
from handgrad.parallel.ranks import Ranks
from handgrad.training.state import TrainingState
from handgrad.training.step import Program

CHECKSUMS = "checksums of the weights"


class Replicas:
    """The checksums of a step's weights, one for every rank, in each `every`-th step (0: never)."""

    def __init__(self, state: TrainingState, ranks: Ranks, every: int):
        self.ops, self.ranks, self.every = state.design.ops, ranks, every
        self.weights, self.sums = state.parameters, state.views["checksums"]
        self.mine = self.sums[ranks.rank : ranks.rank + 1]
        self.checks = False

    def due(self, step: int) -> bool:
        return bool(self.every) and (step + 1) % self.every == 0

    def begin(self, step: int) -> None:
        self.checks = self.due(step)

    def exchange(self) -> None:
        """Before the update: the checksums of all ranks on every rank."""
        if self.checks:
            self.take()
            self.ranks.wait(self.ranks.all_gather(self.sums, self.mine, CHECKSUMS), CHECKSUMS)

    def take(self) -> None:
        if self.weights.device.type == "cpu":  # a sum takes far less than the hash, and no single flipped bit escapes it
            torch.sum(self.weights.view(torch.int64), 0, keepdim=True, out=self.mine)
        else:
            self.ops.checksum(self.mine, self.weights)

    def compare(self, step: int, sums: Sequence[int]) -> None:
        """Raises `NumericsError` unless all ranks have used the same weights; names those that differ from most."""
        if not self.due(step) or len(set(sums)) == 1:
            return
        usual = max(sums, key=sums.count)
        odd = [rank for rank, found in enumerate(sums) if found != usual]
        alone = sums.count(usual) > len(odd)
        everyone = named_ranks(range(len(sums)))
        who = f"{named_ranks(odd)} other than the rest" if alone else f"{everyone}, no majority is right"
        raise NumericsError(
            f"in step {step + 1} the ranks used different weights ({who}): a bit was flipped in memory or on its way, so"
            " nothing was saved; start again from the last checkpoint, without that GPU if it recurs"
        )


def with_replicas(program: Program, replicas: Replicas) -> Program:
    """The program with the comparison; its checksums are the last of the reports."""
    return replace(
        program,
        before_step=[*program.before_step, replicas.begin],
        before_update=[*program.before_update, replicas.exchange],
        compiled=[*program.compiled, replicas.take],
        reports=[*program.reports, replicas.sums],
    )
