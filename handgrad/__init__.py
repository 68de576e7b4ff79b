"""handgrad trains GPT-2 from raw text, with every gradient written by hand.

Data goes one way, and so do the packages:

    config, presets           what a run is
    errors, files             what a user may be told; files that survive
    world                     the device
    data                      text -> tokenizer -> shards -> batches
    ops                       operations, forward and backward, on given buffers
    arena                     named buffers with lifetimes -> one allocation per kind
    model                     parameters and activations as tables; block and transformer as equations
    checkpoint                named tensors under a verified manifest
    evaluation                held-out loss, generated text
    interop                   weights and tokenizers to Hugging Face's transformers and back
    training                  state, step, schedule, outliers, run folder, metrics, the loop
    report, plan, doctor      what a run was, what it will take, what this machine can do
    commands, cli             one module per command, and the entry point
    api                       what the commands do, for notebooks: the names below
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from handgrad.api.actions import evaluate, export, prepare
    from handgrad.api.model import Model, load
    from handgrad.api.records import metrics
    from handgrad.api.training import Training, preset, train
    from handgrad.config import RunConfig
    from handgrad.errors import HandgradError

__version__ = "0.1.0"

# Where the public names are. They are looked up when they are first used: `import handgrad` loads nothing, no torch above
# all, and so the commands that do not need it answer at once.
HOMES = {
    "HandgradError": "handgrad.errors",
    "Model": "handgrad.api.model",
    "RunConfig": "handgrad.config",
    "Training": "handgrad.api.training",
    "evaluate": "handgrad.api.actions",
    "export": "handgrad.api.actions",
    "load": "handgrad.api.model",
    "metrics": "handgrad.api.records",
    "prepare": "handgrad.api.actions",
    "preset": "handgrad.api.training",
    "train": "handgrad.api.training",
}
__all__ = [
    "HandgradError",
    "Model",
    "RunConfig",
    "Training",
    "evaluate",
    "export",
    "load",
    "metrics",
    "prepare",
    "preset",
    "train",
]


def __getattr__(name: str) -> Any:
    if name not in HOMES:
        raise AttributeError(f"module 'handgrad' has no attribute {name!r}")
    return getattr(import_module(HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *HOMES})
