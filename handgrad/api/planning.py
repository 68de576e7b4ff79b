"""plan: a run's memory, speed and cost on GPUs that this machine need not have."""

import os
from typing import Unpack

from handgrad.api.settings import Settings, with_settings
from handgrad.api.training import configuration
from handgrad.errors import UsageError
from handgrad.settings.config import RunConfig
from handgrad.tools.forecast import Forecast, bytes_of, forecast
from handgrad.tools.plan import as_it_runs


@with_settings
def plan(
    preset: str | RunConfig = "",
    *,
    gpu: str,
    gpus: int = 1,
    price: float | None = None,
    fit: str = "",
    vocab_size: int = 0,
    config: str = "",
    model: str = "",
    **settings: Unpack[Settings],
) -> Forecast:
    """`handgrad plan --gpu`: the run of these settings on `gpus` GPUs, a process on each. `price`: dollars per GPU and
    hour; `fit`: memory of each that it may take, like `24GB`, instead of all; `vocab_size`: by default the data's, or
    GPT-2's where there is none.

    Raises `UsageError`: an unknown GPU, a precision that it lacks, a run that does not fit; and the errors of `preset`.
    """
    if gpus < 1 or vocab_size < 0 or (price is not None and not 0 <= price < float("inf")):
        raise UsageError(f"gpus must be at least 1, price and vocab_size 0 or more; found {gpus}, {price}, {vocab_size}")
    named = configuration(preset, settings, os.fspath(config), model)
    resolved, words, _ = as_it_runs(named, vocab_size, given="data" in settings)
    return forecast(resolved, words, gpu, ranks=gpus, price=price, fit=bytes_of(fit) if fit else 0)
