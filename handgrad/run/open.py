"""Opens a run: device, ranks, data, folder, initial weights. Refuses an impossible run before it writes anything."""

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from handgrad.data.shards import Dataset
from handgrad.data.tokenizer import tokenizer_record
from handgrad.errors import INTERRUPTED, DataError, HandgradError, StorageError, UsageError
from handgrad.evaluation.load import CONTEXT, Weights
from handgrad.evaluation.rewards import Reward
from handgrad.interop.adapters import base_of, located
from handgrad.interop.sources import SHAPE, open_weights
from handgrad.joins.parallel.launchers import find_rank_info
from handgrad.joins.parallel.ranks import Ranks, error_text, exit_code
from handgrad.joins.parallel.rendezvous import Timeouts, joined
from handgrad.machine import devices
from handgrad.run import sinks
from handgrad.run.checkpointing import origin_of
from handgrad.run.checks import (
    check_disk,
    check_fits,
    check_names,
    check_offload,
    check_shared_gradients,
    check_tokenizer,
    other_tokenizer,
    tokenizer_flag,
)
from handgrad.run.console import ConsoleMode
from handgrad.run.evaluating import make_task_evaluation
from handgrad.run.folder import RunFolder, inherited_settings, model_of, resolve_lanes
from handgrad.run.loop import Run
from handgrad.run.packing import data_of, resolve_objective, resolve_packing, whole_samples, with_answers
from handgrad.run.resolve import resolve, with_precision, with_tuned_gemms
from handgrad.settings.config import RunConfig, check, check_packing, to_dict
from handgrad.settings.objective import check_objective

Opened = TypeVar("Opened", Weights, Weights | None)


@contextlib.contextmanager
def open_run(
    asked: RunConfig,
    *,
    allow_changes: bool = False,
    strict: bool = False,
    console: ConsoleMode = "live",
    reward: Reward | None = None,
) -> Iterator[Run]:
    """Opens the run in `asked.out`, ready for steps. This process owns the folder until the `with` block ends.
    `strict`: resume from the newest checkpoint or refuse; the same for the weights of `init_from`. `reward`: see `Run`.
    Raises the errors of an input or a folder that does not fit."""
    check_names(asked)
    info = find_rank_info(os.environ)
    device = devices.resolve_device(asked.device, info.local_rank)
    seconds = asked.join_seconds, asked.silence_seconds, asked.stall_seconds
    with joined(info, device, Timeouts(*seconds, Path(asked.out) / "stacks")) as ranks:
        config, dataset = complete(asked, device, ranks)
        check_shared_gradients(config, ranks.size)
        check_offload(config, device, ranks.size)
        ranks.from_rank_0(lambda: sinks.chosen(config.log_to), "log_to")  # refuses a tracker that is not installed
        ranks.from_rank_0(lambda: check_tokenizer(config, dataset, allow_changes=allow_changes), "the tokenizer")
        design = resolve(config, dataset.tokenizer.vocab_size, rank=ranks.rank, ranks=ranks.size, device=device)
        tasks = make_task_evaluation(config, design, dataset.tokenizer, ranks)
        check_fits(config, design, dataset, ranks.size, more_bytes=0 if tasks is None else tasks.plan.total_bytes)
        if ranks.is_rank_0:
            check_disk(config, design)
        teacher = open_rank_0_first(lambda: open_teacher(config, dataset), ranks) if config.teacher else None
        with contextlib.closing(RunFolder(config, ranks, allow_changes=allow_changes, strict=strict)) as folder:
            weights = None
            if config.init_from and not folder.resumed:
                weights = open_rank_0_first(lambda: open_initial_weights(config, dataset, strict=strict), ranks)
            elif config.lora and folder.resumed:
                resumed = folder.resumed
                weights = open_rank_0_first(lambda: base_of(resumed, open_weights, config.init_from), ranks)
            elif config.reward and folder.resumed:
                begun = origin_of(folder.resumed)
                weights = open_rank_0_first(lambda: open_start(config, dataset, begun), ranks)
                if weights is None:
                    folder.passed_over.append("no KL      is recorded: the weights that this run began with are gone")
            how: dict[str, Any] = {"allow_changes": allow_changes, "console": console, "reward": reward}
            run = Run(config, design, dataset, folder, ranks, weights, teacher, tasks, **how)
            with contextlib.closing(run.log), contextlib.closing(run.saves), contextlib.closing(run), record_stop(run):
                yield run


def complete(asked: RunConfig, device: torch.device, ranks: Ranks) -> tuple[RunConfig, Dataset]:
    """(complete configuration, data). Settings that `asked` leaves open come from the run that has begun in
    `asked.out`, then from the device, the ranks and the data. Raises `UsageError` for an invalid setting or
    combination, and the errors of data and ranks."""
    inherited = ranks.from_rank_0(lambda: inherited_settings(asked), "the run so far")
    tuned = with_tuned_gemms(with_precision(replace(asked, **inherited), device), device)
    ranks.check_equal("configuration", to_dict(tuned))
    config = check(replace(tuned, lanes=ranks.from_rank_0(lambda: resolve_lanes(tuned, ranks.size), "lanes")))
    devices.dtype_of(device, config.precision)  # refuses a precision that the device lacks, before reading data
    data = data_of(config, model_of(asked))
    suited = {"packing": resolve_packing(config.packing, data), "objective": resolve_objective(config, data)}
    config = whole_samples(check_objective(check_packing(replace(config, **suited))), data)
    return with_answers(config, data), data


@contextlib.contextmanager
def record_stop(run: Run) -> Iterator[None]:
    """Records why a run ends before its last step. `run.listing` reads it."""
    reason, code = "closed by its program", 0
    try:
        yield
    except BaseException as error:
        reason, code = error_text(error), INTERRUPTED if isinstance(error, KeyboardInterrupt) else exit_code(error)
        raise
    finally:
        if code or run.completed < run.config.steps:
            signs: dict[str, Any] = {"signal": signal.Signals(run.stop_signal).name} if run.stop_signal else {}
            signs |= {"not_finite": True} if run.saves.poisoned else {}
            with contextlib.suppress(StorageError):  # it may itself be the reason
                run.log.record("stop", step=run.completed, code=code, reason=reason, **signs)


def open_rank_0_first(open_them: Callable[[], Opened], ranks: Ranks) -> Opened:
    """Opens weights on rank 0 before the other ranks, so that a model from the Hub is downloaded once."""
    opened: list[Opened] = []
    ranks.from_rank_0(lambda: opened.append(open_them()), "the weights")
    return opened[0] if opened else open_them()


def open_initial_weights(config: RunConfig, dataset: Dataset, *, strict: bool) -> Weights:
    """Opens the weights of `init_from`. Raises `UsageError` if the run has other sizes, `DataError` if it has another
    tokenizer, and the errors of `open_weights`."""
    weights = open_weights(config.init_from, strict=strict)
    if weights.tokenizer.sha256 != dataset.tokenizer.sha256:
        record = tokenizer_record(weights.tokenizer)
        raise DataError(other_tokenizer(config.init_from, record, tokenizer_flag(record, config.init_from), dataset))
    shape = config.shape(weights.shape.vocab_size)
    for name in SHAPE:
        wanted, stored = getattr(shape, name), getattr(weights.shape, name)
        if name == "sequence_length" and wanted > stored:
            raise UsageError(
                f"expected a sequence_length of at most the {stored} positions of {config.init_from}, found {wanted};"
                f" try --sequence-length {stored}"
            )
        if name != "sequence_length" and wanted != stored:
            raise UsageError(
                f"{name} is {stored} in {config.init_from} and {wanted} in this run; give no preset, --model or sizes to"
                " take the weights' own"
            )
    if shape.network.any_context and shape.sequence_length < weights.shape.sequence_length:
        weights = replace(weights, origin=weights.origin | {CONTEXT: weights.shape.sequence_length})
    return located(weights) if config.lora else weights


def open_start(config: RunConfig, dataset: Dataset, origin: dict[str, Any] | None) -> Weights | None:
    """The weights of `origin`, with which a resumed run on rewards began; None if they are no longer there."""
    try:
        weights = open_initial_weights(config, dataset, strict=False)
    except HandgradError:
        return None
    return weights if origin and weights.origin["sha256"] == origin.get("sha256") else None


def open_teacher(config: RunConfig, dataset: Dataset) -> Weights:
    """Opens the weights of `teacher`. Raises `DataError` if it has another tokenizer, `UsageError` if its context is
    shorter than a row, and the errors of `open_weights`."""
    weights = open_weights(config.teacher)
    if weights.tokenizer.sha256 != dataset.tokenizer.sha256:
        record = tokenizer_record(weights.tokenizer)
        raise DataError(other_tokenizer(config.teacher, record, tokenizer_flag(record, config.teacher), dataset))
    if config.sequence_length > weights.shape.sequence_length:
        raise UsageError(
            f"expected a sequence_length of at most the {weights.shape.sequence_length} positions of the teacher"
            f" {config.teacher}, found {config.sequence_length}; try --sequence-length {weights.shape.sequence_length}"
        )
    return weights


def train(config: RunConfig, *, allow_changes: bool = False) -> float | None:
    """Trains or resumes the run in `config.out`; returns the last validation loss in nats, if any. Raises `Preempted`
    if a signal stops the process, after saving; `NumericsError` after too many skipped updates in a row; and the errors
    of `open_run`."""
    with open_run(config, allow_changes=allow_changes) as run:
        run.begin()
        run.advance(config.steps)
        return run.evaluations.loss
