"""handgrad trains GPT-2 from raw text, with every gradient written by hand.

    handgrad.prepare("my_text.txt", "shards/mine")           # text -> tokens
    handgrad.train(data="shards/mine", out="runs/mine")      # a model that suits the text and this machine
    model = handgrad.load("runs/mine")
    print(model.generate("Once upon a time"))

`Training` makes a run step by step, `metrics` reads its records, `plan`, `evaluate` and `export` are the commands of that
name: docs/python.md. On the command line: `handgrad --help`.

A reader of the code starts here, in this order (docs/architecture.md draws the rest):

    cli, commands             the entry point, a module per command
    run                       the life of a run: resolve, assemble, loop, save, log
    training                  the design, its memory, the step
    models, optimizers        a network per file: tensors, forward, backward, generation; the update
    ops                       operations, forward and backward, on given buffers: reference, cpu and cuda
    memory                    parameters and activations as rows -> one allocation per kind
    joins                     fp8, dropout, adapters, ranks: beside the plain path, bound in at set-up
    settings, networks        what a run is asked to do; a network's sizes and names, without torch
    data                      text -> tokenizer -> shards -> batches
    storage, interop          weights at rest, here and in other programs' formats
    evaluation, generation    held-out loss, tasks, text
    machine                   devices, threads, limits, power
    reports, tools, api       pages about runs; plan, doctor, profile; the commands as functions
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from handgrad.api.actions import evaluate, export, plan, prepare
    from handgrad.api.model import Model, load
    from handgrad.api.records import metrics
    from handgrad.api.reports import compare, plot, report
    from handgrad.api.training import Training, preset, train
    from handgrad.errors import HandgradError
    from handgrad.settings.config import RunConfig

__version__ = "0.2.0"

# The modules of the public names, imported at first use: commands that need no torch answer at once.
HOMES = {
    "HandgradError": "handgrad.errors",
    "Model": "handgrad.api.model",
    "RunConfig": "handgrad.settings.config",
    "Training": "handgrad.api.training",
    "compare": "handgrad.api.reports",
    "evaluate": "handgrad.api.actions",
    "export": "handgrad.api.actions",
    "load": "handgrad.api.model",
    "metrics": "handgrad.api.records",
    "plan": "handgrad.api.actions",
    "plot": "handgrad.api.reports",
    "prepare": "handgrad.api.actions",
    "preset": "handgrad.api.training",
    "report": "handgrad.api.reports",
    "train": "handgrad.api.training",
}
# Spelt out, not computed from HOMES: type checkers read the public names here.
__all__ = [
    "HandgradError",
    "Model",
    "RunConfig",
    "Training",
    "compare",
    "evaluate",
    "export",
    "load",
    "metrics",
    "plan",
    "plot",
    "prepare",
    "preset",
    "report",
    "train",
]

if not TYPE_CHECKING:  # a type checker that saw this function would accept misspelt names

    def __getattr__(name: str) -> Any:
        if name not in HOMES:
            raise AttributeError(f"module 'handgrad' has no attribute {name!r}")
        import_module("handgrad.machine.threads").choose()  # before the first of them loads torch
        return getattr(import_module(HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*HOMES, *(name for name in globals() if name.startswith("__"))])
