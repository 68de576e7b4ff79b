"""From a configuration to a run: device, ranks, data, run folder, and what is refused before anything is written."""

import contextlib
import os
from collections.abc import Iterator
from dataclasses import replace

import torch

from handgrad import devices
from handgrad.backend import choose_backend, settle_products
from handgrad.config import RunConfig, check, to_dict
from handgrad.data.shards import open_dataset
from handgrad.parallel.joining import joined
from handgrad.parallel.launchers import find_place
from handgrad.parallel.ranks import Ranks
from handgrad.run.console import Shows
from handgrad.run.folder import RunFolder, settled_lanes
from handgrad.run.header import check_disk, check_fits, check_shared_gradients
from handgrad.run.initial_weights import open_start
from handgrad.run.loop import Run
from handgrad.run.tasks import task_watch


def train(config: RunConfig, *, allow_changes: bool = False) -> float | None:
    """Trains (or goes on training) the run in `config.out`; returns the last validation loss in nats, if there is one.

    Raises `Preempted` after saving when the process is told to stop, `NumericsError` when updates keep being skipped, and
    the errors of whatever input or folder does not fit.
    """
    with open_run(config, allow_changes=allow_changes) as run:
        return run.train()


@contextlib.contextmanager
def open_run(config: RunConfig, *, allow_changes: bool = False, shows: Shows = "live") -> Iterator[Run]:
    """The run in `config.out`, ready to make steps; the folder is this process's own until the end of the `with` block.
    Raises the errors of whatever input or folder does not fit."""
    check(config)
    place = find_place(os.environ)
    device = devices.resolve_device(config.device, place.local_rank)
    with joined(place, device, config) as ranks:
        yield from open_with(config, device, ranks, allow_changes=allow_changes, shows=shows)


def open_with(config: RunConfig, device: torch.device, ranks: Ranks, *, allow_changes: bool, shows: Shows) -> Iterator[Run]:
    """`open_run` as one of `ranks`."""
    dtype = devices.use_precision(device, config.precision)
    ops = choose_backend(config.backend, device, config.precision)
    config = settle_products(config, ops)
    ranks.agree("configuration", to_dict(config))
    config = check(replace(config, lanes=ranks.from_first(lambda: settled_lanes(config, ranks.size), "lanes")))
    check_shared_gradients(config, ranks.size)
    dataset = open_dataset(config.data)
    tasks = task_watch(config, dataset.tokenizer, dtype, device, ops, ranks)
    more_bytes = 0 if tasks is None else tasks.plan.total_bytes
    check_fits(config, dataset, device, dtype, ops, ranks.size, more_bytes=more_bytes)
    if ranks.leads:
        check_disk(config, dataset.tokenizer.vocab_size)
    folder = RunFolder(config, ranks, allow_changes=allow_changes)
    try:
        weights = None if folder.resumed else open_start(config, dataset, ranks)
        settings = {"allow_changes": allow_changes, "shows": shows}
        run = Run(config, dataset, folder, device, dtype, ops, ranks, weights, tasks, **settings)
        try:
            yield run
        finally:
            run.voice.close()
    finally:
        folder.close()
