"""Compares the ranks' copies of the weights, in the steps that use them.

A wrong bit in one rank's copy makes the gradient wrong for all ranks. ZeRO 1 and 2 then overwrite the copy with its owner's
weights and so hide the error. Therefore a step takes the checksums after its backward and before its update.

Sharded master weights and moments have no second copy; the check before each save covers them.
"""

from collections.abc import Sequence
from types import ModuleType

import torch
from torch import Tensor

from handgrad.errors import NumericsError
from handgrad.joins.parallel.order import named_ranks
from handgrad.joins.parallel.ranks import Ranks
from handgrad.training.state import FROZEN, TrainingState
from handgrad.training.step import Program

REPORT = "checksums"


class Replicas:
    """The checksums of a step's weights, one per rank, gathered in every `every`-th step (0: never)."""

    def __init__(self, state: TrainingState, ranks: Ranks, every: int):
        self.ops, self.ranks, self.every = state.design.ops, ranks, every
        self.weights, self.checksums = state.parameters, state.views["weight_checksums"]
        self.own_checksum = self.checksums[ranks.rank : ranks.rank + 1]
        names = [FROZEN, *(f"{name}.rows" for name in sorted(state.design.fp8_only))] if state.design.frozen else []
        self.frozen = [state.views[name].view(-1).view(torch.int32) for name in names]  # weights that no update overwrites
        self.frozen_sum = torch.zeros_like(self.own_checksum)
        self.checks = False

    def launches(self, program: Program) -> Program:
        """Adds the comparison to the program, before the ranks' sums."""
        return program.adding(
            before_step=[self.begin],
            before_update=[self.gather_if_due],
            compiled_ahead=[self.update_checksum],
            reports={REPORT: self.checksums},
        )

    def due(self, step: int) -> bool:
        return bool(self.every) and (step + 1) % self.every == 0

    def begin(self, step: int) -> None:
        self.checks = self.due(step)

    def gather_if_due(self) -> None:
        """Gathers the checksums before the update, which replaces the weights that the step used."""
        if self.checks:
            self.update_checksum()
            operation = "checksums of the weights"
            self.ranks.wait(self.ranks.all_gather(self.checksums, self.own_checksum, operation), operation)

    def update_checksum(self) -> None:
        checksum(self.own_checksum, self.weights, self.ops)
        for flat in self.frozen:
            checksum(self.frozen_sum, flat, self.ops)
            self.own_checksum.add_(self.frozen_sum)

    def compare(self, step: int, checksums: Tensor) -> None:
        """Raises `NumericsError` unless all ranks used the same weights; names the ranks that differ from the majority.
        `checksums`: (ranks) of the step, on the host."""
        sums = checksums.tolist()
        if not self.due(step) or len(set(sums)) == 1:
            return
        raise NumericsError(
            f"in step {step + 1} the ranks used different weights ({who_differs(sums)}): a bit was flipped in memory or on"
            " its way, so nothing was saved; start again from the last checkpoint, without that GPU if it recurs"
        )


def checksum(out: Tensor, flat: Tensor, ops: ModuleType) -> None:
    """out (1) int64 = a checksum of all bits of `flat`."""
    if flat.device.type == "cpu":  # a sum is far cheaper than the hash and detects any single flipped bit
        torch.sum(flat.view(torch.int64), 0, keepdim=True, out=out)
    else:
        ops.checksum(out, flat)


def who_differs(sums: Sequence[object]) -> str:
    """The ranks whose checksum differs from the majority's."""
    usual = max(sums, key=sums.count)
    odd = [rank for rank, sum_of_rank in enumerate(sums) if sum_of_rank != usual]
    if sums.count(usual) > len(odd):
        return f"{named_ranks(odd)} other than the rest"
    return f"{named_ranks(range(len(sums)))}, no majority is right"
