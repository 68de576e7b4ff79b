"""Background saves: checks each state and copies it to host memory; a thread writes it while training continues.

Every rank writes its share of the tensors. The exchange at the end of a step tells the ranks when all have written; then
rank 0's thread commits the checkpoint and removes old ones, and a later exchange tells the others. At most one save is in
flight. Without memory for the copy, or with `async_save` off, training waits while rank 0 writes.
"""

import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from handgrad.errors import NumericsError, StorageError, storage_errors
from handgrad.joins.parallel.ranks import Ranks
from handgrad.joins.parallel.replicas import checksum, who_differs
from handgrad.run.assemble import Assembly
from handgrad.run.checkpointing import HostCopy, save_state, stored_tensors
from handgrad.run.folder import RunFolder
from handgrad.run.log import RunLog
from handgrad.settings.config import RunConfig
from handgrad.storage import checkpoint
from handgrad.training.state import TrainingState

BUSY, DONE, FAILED = 0.0, 1.0, 2.0  # a rank's part of the save in flight
SHORT_SECONDS = 1.0  # a shorter wait for the previous save is not worth a line
GROWTH = 1000.0  # most growth of a tensor's norm between checkpoints; numbers of a zero tensor may reach this size
NAMED = 4  # most tensors named in a message
DEFAULT_SECONDS = 30.0  # torchrun's, Kubernetes' (terminationGracePeriodSeconds) and SLURM's (KillWait)
VARIABLE = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"


class SaveCheck:
    """Checks a state before it becomes a checkpoint, so that corrupt numbers never replace good ones.

    A non-finite norm reveals non-finite numbers. A norm that has grown a thousandfold since the last checkpoint, to large
    numbers, reveals a flipped bit: the highest exponent bit multiplies a weight by 2 ** 128. Copies on several ranks must
    be bitwise equal."""

    def __init__(self, state: TrainingState, ranks: Ranks):
        self.ranks, self.norms = ranks, tensor_norms(state, ranks)
        rows = (row for saved in state.saved for row in saved.layout.rows)
        self.elements = {row.name: math.prod(row.stored_shape) for row in rows}

    def compare(self, state: TrainingState, step: int, last_saved: int) -> None:
        """Compares the state with the last checkpoint, or with the run's initial state. Raises `NumericsError` on all
        ranks if the state after `step` must not become a checkpoint."""
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
        """Compares buffers that every rank holds whole, because any rank may write its copy."""
        if self.ranks.size == 1:
            return
        copies = [saved.values for saved in state.saved if saved.is_whole]
        sums = torch.zeros(len(copies), dtype=torch.int64, device=state.parameters.device)
        for number, flat in enumerate(copies):
            checksum(sums[number : number + 1], flat, state.design.ops)
        everyone = self.ranks.all_gather_objects(sums.tolist(), "copies of a checkpoint's tensors")
        if any(checksums != everyone[0] for checksums in everyone):
            raise NumericsError(
                f"step {step} is not saved: the ranks hold different weights or moments ({who_differs(everyone)}): a bit"
                " was flipped in memory; start again from the last checkpoint, without that GPU if it recurs"
            )


def tensor_norms(state: TrainingState, ranks: Ranks) -> dict[str, float]:
    """The Euclidean norm of each tensor in a checkpoint. Each rank reduces its share; all ranks get the result."""
    names, sharded, squares = list[str](), list[bool](), list[float]()
    for saved in state.saved:
        pieces = list[tuple[int, Tensor]]()
        for row in saved.layout.rows:
            shares = [row.stored(saved.values)] if saved.is_whole else [piece for piece, _ in saved.pieces(row)]
            pieces += [(len(names), piece) for piece in shares]
            names.append(row.name)
            sharded.append(not saved.is_whole)
            squares.append(0.0)
        # One transfer per buffer: with offload, some are on the host.
        norms = torch.stack([norm_of(piece) for _, piece in pieces]).tolist() if pieces else []
        for (index, _), norm in zip(pieces, norms, strict=True):
            squares[index] += norm * norm
    columns = zip(*ranks.all_gather_numbers(squares, "norms of a checkpoint"), strict=True)
    totals = [sum(column) if cut else worst(column) for column, cut in zip(columns, sharded, strict=True)]
    return {name: math.sqrt(total) for name, total in zip(names, totals, strict=True)}


def norm_of(piece: Tensor) -> Tensor:
    return torch.linalg.vector_norm(piece, dtype=torch.float32 if piece.itemsize == 2 else None)


def worst(squares: tuple[float, ...]) -> float:
    """The largest value of the ranks' copies; NaN if one is NaN."""
    return math.nan if any(math.isnan(square) for square in squares) else max(squares)


def unsound(before: dict[str, float], now: dict[str, float], elements: dict[str, int]) -> list[str]:
    """Names of tensors whose norm is not finite or has jumped. `elements`: per tensor."""
    limits = {name: GROWTH * max(before[name], math.sqrt(elements[name])) for name in now}
    return [name for name, norm in now.items() if not (math.isfinite(norm) and norm <= limits[name])]


@dataclass
class Save:
    """A save in flight."""

    final: Path  # folder of the finished checkpoint
    step: int
    manifest: dict[str, Any]
    begun: float  # by `time.perf_counter`
    step_seconds: float
    pause_seconds: float = 0.0  # that training waited
    committing: bool = False  # all ranks have written


class Saves:
    """Saves the states of one run, and tracks which checkpoints are complete."""

    def __init__(
        self,
        config: RunConfig,
        folder: RunFolder,
        ranks: Ranks,
        log: RunLog,
        check: SaveCheck,
        copy: HostCopy | None,
        extra_files: dict[str, bytes],
        seal: Callable[[Path, dict[str, Any]], None],
    ):
        """`copy`: None makes training wait. `extra_files`: the tokenizer's. `seal(folder, manifest)`: by checkpoint."""
        self.config, self.folder, self.ranks, self.log, self.check = config, folder, ranks, log, check
        self.copy, self.extra_files, self.seal = copy, extra_files, seal
        self.last_saved = -1 if folder.resumed is None else folder.resumed.step  # newest complete checkpoint
        best = partial(checkpoint.best_validated, folder.path)
        self.best: tuple[int, float] | None = ranks.from_rank_0(best, "the best checkpoint")  # (step, validation loss)
        self.poisoned = False  # the last step's loss or gradient was not finite: do not save its state
        self.pending: Save | None = None
        self.work: Future[Any] = Future()  # this rank's part of the pending save
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="save")

    def save(self, training: Assembly, step: int, step_seconds: float, manifest: dict[str, Any]) -> None:
        """Saves the state after `step`, or starts to, until `wait`. `manifest`: its content except the tensors."""
        if step == self.last_saved or (self.pending and step == self.pending.step):
            return
        if self.poisoned:
            self.log.event(step, f"step {step}: not saved, because the step's numbers were not finite")
            return
        final = checkpoint.folder_of(self.folder.checkpoints, step)
        waited = self.await_earlier(step)
        save = Save(final, step, manifest, time.perf_counter(), step_seconds)
        training.await_weights()
        self.poisoned = True  # until the check has passed
        self.check.compare(training.state, step, self.last_saved)
        self.poisoned = False
        if self.copy is None:
            self.log.sync()  # no checkpoint is ahead of its record
            save_state(self.folder.checkpoints, step, training.state, self.ranks, manifest, self.extra_files)
            seconds = time.perf_counter() - save.begun
            warnings = self.ranks.from_rank_0(lambda: self.remove_old(step), "old checkpoints")
            save.pause_seconds = time.perf_counter() - save.begun
            self.log_saved(save, seconds, warnings)
            return
        self.copy.copy_state(list(stored_tensors(training.state, self.ranks)))
        self.ranks.from_rank_0(lambda: begin(final), "a checkpoint's folder")
        self.pending = save
        write = self.write if self.ranks.size > 1 else lambda save: self.commit(save, self.write(save))
        self.work = self.thread.submit(write, save)
        save.pause_seconds = waited + time.perf_counter() - save.begun

    def await_earlier(self, step: int) -> float:
        """Waits until the previous save has left the copy; returns the seconds."""
        if self.pending is None:
            return 0.0
        earlier, begun = self.pending, time.perf_counter()
        self.wait()
        waited, took = time.perf_counter() - begun, time.perf_counter() - earlier.begun
        due = self.config.save_every and step % self.config.save_every == 0  # else a stop or a best validation requested it
        if due and waited >= SHORT_SECONDS:
            line = f"step {step}: its save waited {waited:.1f} s for step {earlier.step}'s, which took {took:.1f} s"
            self.log.event_once(step, f"{line}; a larger --save-every leaves the disk more time", "a save that waited")
        return waited

    # On the save thread.

    def write(self, save: Save) -> dict[str, Any]:
        """Writes this rank's files; returns their entries in the manifest."""
        assert self.copy is not None
        with storage_errors(f"saving {save.final}"):
            return checkpoint.write_tensors(save.final, self.copy.files)

    def commit(self, save: Save, files: dict[str, Any]) -> tuple[float, list[str]]:
        """Commits all ranks' files, then removes old checkpoints. Returns (seconds since the save began, warnings)."""
        self.log.sync()  # no checkpoint is ahead of its record
        with storage_errors(f"saving {save.final}"):
            checkpoint.commit(save.final, save.step, files, save.manifest, self.extra_files)
        return time.perf_counter() - save.begun, self.remove_old(save.step)

    def remove_old(self, newest_step: int) -> list[str]:
        """Removes checkpoints beyond the ones to keep; returns a line for each that it cannot remove."""
        best, warnings = self.best[0] if self.best and self.config.keep_best else None, list[str]()
        keep = self.config.keep_checkpoints, best, self.config.keep_every, warnings.append
        checkpoint.prune(self.folder.checkpoints, newest_step, *keep)
        return warnings

    # Between the ranks.

    def progress(self) -> float:
        """This rank's progress in the pending save, for the exchange at the end of a step."""
        if self.pending is None or not self.work.done():
            return BUSY
        return FAILED if self.work.exception() else DONE

    def advance_if_all_ready(self, everyone: Sequence[float]) -> None:
        """Advances the pending save once the `progress` of all ranks says that they are done."""
        if self.pending is not None and (FAILED in everyone or BUSY not in everyone):
            self.advance()

    def wait(self) -> None:
        """Waits, on all ranks, until no save is in flight. Raises `StorageError` if it failed on any rank."""
        while self.pending is not None:
            self.advance()

    def advance(self) -> None:
        """Waits, on all ranks, for the running phase of the pending save, then starts the next phase."""
        save, error = self.pending, self.work.exception()
        assert save is not None
        if error is not None and not isinstance(error, StorageError):  # a bug, on this rank only
            self.pending = None
            raise error
        if error is not None and self.ranks.is_rank_0:
            error = self.log.misplaced() or error
        own: tuple[Any, str] = (None, str(error)) if error else (self.work.result(), "")
        outcomes = self.ranks.all_gather_objects(own, "the writing of a checkpoint")
        if failed := [text for _, text in outcomes if text]:
            self.pending = None
            if self.ranks.is_rank_0:
                checkpoint.discard_partial(save.final)
            failure = StorageError(failed[0])
            failure.shared = True
            raise failure
        if self.ranks.size > 1 and not save.committing:
            save.committing = True
            files = {name: entry for entries, _ in outcomes for name, entry in entries.items()}
            self.work = self.thread.submit(self.commit, save, files) if self.ranks.is_rank_0 else finished()
            return
        self.pending = None
        self.log_saved(save, *outcomes[0][0])

    def log_saved(self, save: Save, seconds: float, warnings: list[str]) -> None:
        """Logs a checkpoint that is on disk under its final name."""
        self.last_saved = save.step
        self.seal(save.final, save.manifest)
        self.log.record("save", step=save.step, seconds=round(seconds, 3), pause_seconds=round(save.pause_seconds, 3))
        under_way = 0.0 if self.copy is None else seconds  # the longest that a stop may have to wait for
        if line := too_slow(seconds, save.step_seconds, os.environ, under_way):
            self.log.event_once(save.step, line, "a stop that takes too long")
        for warning in warnings:
            self.log.event_once(save.step, warning)
        self.log.line(f"step {save.step}: saved {save.final}")

    def prune(self) -> None:
        """Removes checkpoints beyond the ones to keep. No save may be in flight."""
        assert self.pending is None, "its folder would go as an interrupted save's"
        for warning in self.ranks.from_rank_0(lambda: self.remove_old(self.last_saved), "old checkpoints"):
            self.log.event_once(self.last_saved, warning)

    def close(self) -> None:
        """Ends the thread. After an error a save may still be in flight. It completes if that needs no other rank; else it
        stays incomplete, and its threads end with their processes."""
        if self.pending is not None and self.ranks.size == 1:
            with suppress(StorageError):  # the run already ends with another error
                if not self.work.done():
                    self.log.line(f"step {self.pending.step}: its save is still being written; the run ends after it")
                self.advance()
        elif self.pending is not None and self.pending.committing:
            wait([self.work])
        self.thread.shutdown(wait=self.pending is None)


def begin(final: Path) -> None:
    with storage_errors(f"saving {final}"):
        checkpoint.begin_partial(final)


def finished() -> Future[None]:
    """A phase with nothing to do."""
    work: Future[None] = Future()
    work.set_result(None)
    return work


def grace_seconds(environment: Mapping[str, str]) -> float:
    """Seconds between a launcher's stop signal and SIGKILL."""
    try:
        return float(environment.get(VARIABLE, DEFAULT_SECONDS))
    except ValueError:
        return DEFAULT_SECONDS


def too_slow(
    save_seconds: float, step_seconds: float, environment: Mapping[str, str], under_way_seconds: float = 0.0
) -> str:
    """A warning if a stop would outlast the grace period: the current step, a save in flight, its own save; else ""."""
    grace, needed = grace_seconds(environment), save_seconds + step_seconds + under_way_seconds
    if needed <= grace:
        return ""
    earlier = f" and {under_way_seconds:.1f} s of a save under way" if under_way_seconds else ""
    return (
        f"a stop takes {needed:.1f} s ({save_seconds:.1f} s to save after a step of {step_seconds:.1f} s{earlier}), longer"
        f" than the {grace:g} s between a launcher's stop signal and SIGKILL; give it more: {VARIABLE}={2 * needed:.0f},"
        f" #SBATCH --signal=TERM@{2 * needed:.0f}, terminationGracePeriodSeconds"
    )
