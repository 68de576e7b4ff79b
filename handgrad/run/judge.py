"""Judges the numbers of a checkpoint before it is written: broken numbers must not replace clean ones.

A norm that is not finite shows numbers that are not. One that has grown a thousandfold since the checkpoint before, to
large numbers, shows a flipped bit: the highest one of the exponent multiplies a weight by 2 ** 128. Copies that several
ranks hold must be equal, bit by bit.
"""

import math

import torch
from torch import Tensor

from handgrad.errors import NumericsError
from handgrad.parallel.ranks import Ranks
from handgrad.parallel.replicas import checksum, who_differs
from handgrad.training.state import TrainingState

GROWTH = 1000.0  # of a tensor's norm from one checkpoint to the next; of zeros, to numbers of this size
NAMED = 4  # tensors in a message


class Judge:
    """Knows the norms of the last checkpoint, or of the state that the run starts from."""

    def __init__(self, state: TrainingState, ranks: Ranks):
        self.ranks, self.norms = ranks, tensor_norms(state, ranks)
        rows = (row for saved in state.saved for row in saved.layout.rows)
        self.elements = {row.name: math.prod(row.stored_shape) for row in rows}

    def check(self, state: TrainingState, step: int, last_saved: int) -> None:
        """Raises `NumericsError`, on all ranks, unless the state after `step` may become a checkpoint."""
        now = tensor_norms(state, self.ranks)
        names = unsound(self.norms, now, self.elements)
        if not names:
            self.compare_copies(state, step)
            self.norms = now
            return
        first, more = names[0], ", ".join(names[1:NAMED]) + (", ..." if len(names) > NAMED else "")
        others = f"; the same of {len(names) - 1} more: {more}" if more else ""
        older = f"resumes from the checkpoint of step {last_saved}" if last_saved >= 0 else "starts over: no checkpoint yet"
        raise NumericsError(
            f"step {step} is not saved: the norm of {first} is {now[first]:.3g}, {self.norms[first]:.3g} when it was last"
            f" judged{others}; a bit was flipped in memory, or the run diverged. The same command {older}; if it ends here"
            " again, lower --learning-rate"
        )

    def compare_copies(self, state: TrainingState, step: int) -> None:
        """Compares the buffers that every rank holds whole: any rank may write its own copy."""
        if self.ranks.size == 1:
            return
        copies = [saved.values for saved in state.saved if saved.is_whole]
        sums = torch.zeros(len(copies), dtype=torch.int64, device=state.parameters.device)
        for number, flat in enumerate(copies):
            checksum(sums[number : number + 1], flat, state.design.ops)
        everyone = self.ranks.all_gather_objects(sums.tolist(), "copies of a checkpoint's tensors")
        if any(found != everyone[0] for found in everyone):
            raise NumericsError(
                f"step {step} is not saved: the ranks hold different weights or moments ({who_differs(everyone)}): a bit"
                " was flipped in memory; start again from the last checkpoint, without that GPU if it recurs"
            )


def tensor_norms(state: TrainingState, ranks: Ranks) -> dict[str, float]:
    """The Euclidean norm of each tensor that a checkpoint holds, as all ranks know it. Each reduces its share."""
    names, sharded, squares = list[str](), list[bool](), list[float]()
    for saved in state.saved:
        pieces = list[tuple[int, Tensor]]()
        for row in saved.layout.rows:
            shares = [row.stored(saved.values)] if saved.is_whole else [piece for piece, _ in saved.pieces(row)]
            pieces += [(len(names), piece) for piece in shares]
            names.append(row.name)
            sharded.append(not saved.is_whole)
            squares.append(0.0)
        # A transfer for each buffer: with offload some lie on the host.
        norms = torch.stack([norm_of(piece) for _, piece in pieces]).tolist() if pieces else []
        for (index, _), norm in zip(pieces, norms, strict=True):
            squares[index] += norm * norm
    columns = zip(*ranks.all_gather_numbers(squares, "norms of a checkpoint"), strict=True)
    totals = [sum(column) if cut else worst(column) for column, cut in zip(columns, sharded, strict=True)]
    return {name: math.sqrt(total) for name, total in zip(names, totals, strict=True)}


def norm_of(piece: Tensor) -> Tensor:
    return torch.linalg.vector_norm(piece, dtype=torch.float32 if piece.itemsize == 2 else None)


def worst(squares: tuple[float, ...]) -> float:
    """The largest of the ranks' copies; NaN if one is NaN."""
    return math.nan if any(math.isnan(square) for square in squares) else max(squares)


def unsound(before: dict[str, float], now: dict[str, float], elements: dict[str, int]) -> list[str]:
    """The names of the tensors whose norm is not finite or has jumped. `elements`: of each tensor."""
    limits = {name: GROWTH * max(before[name], math.sqrt(elements[name])) for name in now}
    return [name for name, norm in now.items() if not (math.isfinite(norm) and norm <= limits[name])]
