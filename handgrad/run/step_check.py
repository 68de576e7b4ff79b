"""Repeats a suspicious step before deciding on its update.

Micro-batches reproduce their bits. If the repeat matches, the data or the model is at fault, and the guards act. If not,
the hardware is at fault: a third attempt decides which of the two was right, and the run continues with that one.
"""

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from handgrad.errors import HardwareError
from handgrad.joins.parallel.order import named_ranks
from handgrad.joins.parallel.ranks import Ranks
from handgrad.joins.parallel.step import ParallelStep
from handgrad.ops import SMALLEST_LOSS_SCALE
from handgrad.run.assemble import Assembly
from handgrad.training.step import NOTHING_TRAINED, StepResult

OPERATION = "a step that is made again"


@dataclass(frozen=True)
class Attempt:
    """One attempt at a step's gradients."""

    loss: float
    norm: float
    of_all: tuple[float, ...]  # each rank's checksum of all losses and the gradient's sums of squares
    of_own: tuple[float, ...]  # each rank's checksum of its own micro-batches' results
    gradients: tuple[float, ...] | None  # each rank's checksum of its gradients; None once the next step has begun

    def equals(self, other: "Attempt") -> bool:
        both = self.gradients is not None and other.gradients is not None
        return self.of_all == other.of_all and (not both or self.gradients == other.gradients)

    def text(self) -> str:
        return f"loss {self.loss:.6g} and norm {self.norm:.6g}"


def is_overflow(result: StepResult) -> bool:
    """True for an overflow by which dynamic loss scaling finds its limit; at the smallest scale it is a fault."""
    return math.isfinite(result.loss) and not math.isfinite(result.norm) and result.loss_scale > SMALLEST_LOSS_SCALE


def checked_result(training: Assembly, ranks: Ranks, step: int, result: StepResult) -> tuple[StepResult, str]:
    """(the valid result of 0-based `step`, a line about failed hardware or "").

    Accepts a step that made an update, one without trained tokens, and a normal overflow as they are. Raises
    `HardwareError` if three attempts give three results. All ranks make the same attempts, because they decide by exchanged
    numbers."""
    if result.skipped in (None, NOTHING_TRAINED) or is_overflow(result):
        return result, ""
    stepper, last_begun = training.stepper, training.stepper.last_begun
    attempts = [attempt_of(training, ranks, step, stepper.slot(step).losses, complete=last_begun == step)]
    for _ in range(2):
        stepper.relaunch(step)
        stepper.launch_norm(step)
        attempts.append(attempt_of(training, ranks, step, training.state.losses_of_step, complete=True))
        if any(attempts[-1].equals(other) for other in attempts[:-1]):
            break
    else:
        raise HardwareError(
            f"step {step + 1} was made three times and gave three results ({'; '.join(a.text() for a in attempts)}), in the"
            f" gradients of {who_differs(attempts, ranks)}: memory or a processor is faulty, nothing of this step was kept;"
            " start again on another machine, from the last checkpoint"
        )
    line = ""
    if len(attempts) == 3:
        wrong = 0 if attempts[1].equals(attempts[2]) else 1
        line = (
            f"step {step + 1}: {attempts[0].text()}, made again {attempts[1].text()}, and again {attempts[2].text()}: the"
            f" {('first', 'second')[wrong]} was a fault of the hardware in the gradients of {who_differs(attempts, ranks)};"
            " the run continues with the numbers that came twice"
        )
    stepper.launch_update(step)
    result = stepper.result(step)
    if last_begun > step:
        stepper.begin(last_begun)  # the repeats overwrote its gradients
    return result, line


def attempt_of(training: Assembly, ranks: Ranks, step: int, lane_losses: Tensor, *, complete: bool) -> Attempt:
    """Checksums the last attempt at `step`. `lane_losses`: its losses; `complete`: memory still has its gradients."""
    state, stepper, batch = training.state, training.stepper, training.design.batch
    losses, squares = lane_losses.cpu(), state.norm_partials.cpu()
    own = [losses]
    if isinstance(stepper, ParallelStep) and stepper.sync.own_norms is not None:
        own = [losses.view(ranks.size, -1)[ranks.rank], stepper.sync.own_norms[step % 2].cpu()]
    gradients = checksums(training) if complete else torch.zeros(0)
    numbers = [float(crc_of(*tensors)) for tensors in ((losses, squares), own, (gradients,))]
    of_all, of_own, of_gradients = zip(*ranks.all_gather_numbers(numbers, OPERATION), strict=True)
    tokens = stepper.slot(step).trained_tokens
    loss = math.fsum(losses.tolist()) / tokens
    norm = math.sqrt(squares.double().sum().item()) / (state.loss_scale[1].item() * (tokens / batch.gradient_tokens))
    return Attempt(loss, norm, of_all, of_own, of_gradients if complete else None)


def crc_of(*tensors: Tensor) -> int:
    """A 32-bit checksum, exact as a number that ranks exchange."""
    crc = 0
    for tensor in tensors:
        crc = zlib.crc32(tensor.contiguous().numpy().tobytes(), crc)
    return crc


def checksums(training: Assembly) -> Tensor:
    """Checksums of all gradient bits in this process."""
    state, sums = training.state, list[int]()
    views = state.views["gradients"].view(-1, state.views["gradients"].shape[-1])[0], state.views.get("gradient_shard")
    for view in (view for view in views if view is not None):
        out = torch.zeros(1, dtype=torch.int64, device=view.device)
        state.design.ops.checksum(out, view)
        sums.append(int(out.item()))
    return torch.tensor(sums)


def who_differs(attempts: Sequence[Attempt], ranks: Ranks) -> str:
    """The ranks whose own micro-batches gave different results in the attempts."""
    columns = zip(*(attempt.of_own for attempt in attempts), strict=True)
    differing = [rank for rank, column in enumerate(columns) if len(set(column)) > 1]
    if ranks.size == 1:
        differing = [0]
    return named_ranks(differing) if differing else "no rank alone, but in their sum or on its way"
