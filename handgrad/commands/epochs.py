"""The answer to --epochs, which other trainers have: the number of steps, where the data are known."""

import contextlib
import math
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from handgrad.errors import HandgradError
from handgrad.names import STEPS_OF_AN_EPOCH, is_epochs
from handgrad.settings import presets
from handgrad.settings.config import RunConfig


def epochs_in_steps(config_of: Callable[[Namespace], RunConfig], namespace: Namespace, arguments: Sequence[str]) -> str:
    """'3 epochs of shards/mine are --steps 120', for a run with the other `arguments`; the rule where no data are
    prepared. `config_of`: the configuration that parsed arguments describe."""
    asked = value_of(arguments)
    if namespace.preset not in presets.PRESETS:
        namespace.preset = None  # it took the number, as nothing else does
    found = None
    with contextlib.suppress(HandgradError):  # other arguments are wrong as well; this one is answered first
        found = steps_of_an_epoch(config_of(namespace))
    if found is None:
        return STEPS_OF_AN_EPOCH
    folder, steps = found
    count = f"{asked:g} epochs of {folder} are" if asked not in (0, 1) else f"an epoch of {folder} is"
    return f"{count} --steps {math.ceil((asked or 1) * steps)}"


def value_of(arguments: Sequence[str]) -> float:
    """The number of epochs that is asked for; 0 if it is none."""
    for word, after in zip(arguments, [*arguments[1:], ""], strict=True):
        name, _, value = word.partition("=")
        if name.startswith("-") and is_epochs(name):
            with contextlib.suppress(ValueError):
                return min(max(0.0, float(value or after)), 1e6)
    return 0.0


def steps_of_an_epoch(config: RunConfig) -> tuple[str, float] | None:
    """(the data of a run, the steps that take all of it once); None without data, or if the steps grow. Raises
    `HandgradError` for data that cannot be read."""
    from handgrad.data.shards import MANIFEST_FILE, open_dataset  # imports numpy, which `--help` spares

    if config.batch_schedule or not (Path(config.data) / MANIFEST_FILE).is_file():
        return None
    from handgrad.run.packing import resolve_packing, training_batches  # imports torch

    dataset = open_dataset(config.data)
    batches = training_batches(replace(config, packing=resolve_packing(config.packing, dataset)), dataset)
    return config.data, batches.samples_per_epoch * config.sequence_length / config.tokens_per_step
