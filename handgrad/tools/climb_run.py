"""The climb's run: the stories' model, trained by the reader's operations where they are written, beside the package's."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from torch import Tensor

from handgrad.data.prepare import PrepareOptions, prepare
from handgrad.models import gpt2
from handgrad.ops import compose, reference
from handgrad.run import resolve
from handgrad.run.open import train
from handgrad.run.settings import run_config
from handgrad.tools.climb import STEPS, is_unwritten, read_function, table_of

# Two lanes of half the demo's micro-batch, so that a step adds two gradients by the reader's tree.
SETTINGS = {"lanes": 2, "micro_batch": 2, "backend": "reference", "device": "cpu", "warmup_steps": 10, "save_every": 0}
Operations = dict[str, Callable[..., None]]


def written(folder: Path) -> dict[str, Operations]:
    """The operations of each written step that takes part in a training, by step."""
    tables = {step: table_of(step) for step in STEPS if not is_unwritten(folder / f"{step}.py")}
    return {s: t.operations(read_function(folder, s)) for s, t in tables.items() if hasattr(t, "operations")}


def train_both(folder: Path, yours: dict[str, Operations], number: int) -> list[Path]:
    """Trains with the reference, once, and with the reader's operations for a number of steps; returns both run folders."""
    data, runs = folder / "shards", [folder / "runs" / name for name in (f"reference-{number}", "mine")]
    if not data.exists():
        prepare(PrepareOptions("stories", data, tokenizer="bpe:1024", documents=3000, validation_fraction=0.01))
    shutil.rmtree(runs[1], ignore_errors=True)
    for out, replaced in zip(runs, ({}, {name: f for each in yours.values() for name, f in each.items()}), strict=True):
        with training_by(replaced):
            train(run_config("demo", "", "", SETTINGS | {"data": str(data), "out": str(out), "steps": number}))
    return runs


@contextmanager
def training_by(replaced: Operations) -> Iterator[None]:
    """Runs of this block take `replaced` instead of the reference's operations, or the model's `block_backward`."""
    plain, block = resolve.plain_backend, gpt2.block_backward
    resolve.plain_backend = lambda name, device, precision: Replaced(replaced)
    gpt2.block_backward = replaced.get("block_backward", block)
    try:
        yield
    finally:
        resolve.plain_backend, gpt2.block_backward = plain, block


class Replaced(compose.Overlay):
    """The reference with some operations replaced, also inside the composed ones."""

    def __init__(self, replaced: Operations):
        super().__init__(reference)
        vars(self).update(replaced)
        gelu = compose.with_gelu(self.linear_forward, self.linear_backward, self.gelu_forward, self.gelu_backward)
        self.linear_gelu_forward, self.gelu_linear_backward = gelu
        self.layernorm_linear_forward = compose.after_layernorm(self.layernorm_forward, self.linear_forward)
        self.layernorm_linear_gelu_forward = compose.after_layernorm(self.layernorm_forward, self.linear_gelu_forward)

    def linear_residual_forward(self, out: Tensor, residual: Tensor, *gemm: Tensor, scratch: Tensor | None = None) -> None:
        self.linear_forward(out, *gemm)
        out.add_(residual)
