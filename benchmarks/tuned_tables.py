"""The training step with the tuned algorithms of its GEMMs beside the same step with the library's first choices, in turns.

    python -m benchmarks.tuned_tables --models d12,d48 --out h200-tuned-tables.json
    python -m benchmarks.tuned_tables --models d24,d36 --out h200-tuned-tables.json      goes on in it

Both steps work on one state, so that they share its memory and read the same numbers; each has its own CUDA graphs. They
alternate in turns of some seconds, at the clock that their power allows. The algorithms are those of this GPU's table, or
of `--table`, a file that `benchmarks.tune --table FILE` wrote. The GEMMs of an fp8 step that stay in bf16 are the same.
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.contenders import Settings, Steps, Tokens, tokens_of
from benchmarks.record import continued, free_memory, keep_commit, rounded, run_main, write_record
from benchmarks.turns import note, timed_turn
from handgrad.errors import HandgradError, UsageError
from handgrad.machine import devices
from handgrad.machine.backend import choose_backend
from handgrad.run.assemble import assemble, bind
from handgrad.run.resolve import resolve, with_tuned_gemms
from handgrad.settings.config import RunConfig
from handgrad.training.step import TrainStep

MICRO_BATCHES = {"d12": 64, "d24": 32, "d36": 32, "d48": 16}  # the shapes that `benchmarks.tune` was given
MICRO_STEPS = 4  # to an update
WARM_UP_SECONDS = 2.0
TABLE, HEURISTIC = "table", "heuristic"

Rows = dict[str, list[str]]  # words of the algorithms by product


def use_rows(rows: Rows) -> None:
    """The products planned from now on take these algorithms, and the heuristic's first elsewhere."""
    from handgrad.ops.cuda import cublaslt

    cublaslt.PLANS.clear()
    cublaslt.frozen_algorithms = lambda: rows  # type: ignore[assignment]  # of this process, which measures and ends


def planned() -> tuple[int, int]:
    """(products planned, those of them that the table has)."""
    from handgrad.ops.cuda import cublaslt

    rows = cublaslt.frozen_algorithms()
    return len(cublaslt.PLANS), sum(product.name() in rows for product in cublaslt.PLANS)


def rows_of(path: str) -> Rows:
    """Of a table, or of this GPU's. Raises `UsageError` where there is none."""
    from handgrad.ops.cuda import cublaslt

    rows = cublaslt.read_table(Path(path), "algorithms") if path else cublaslt.frozen_algorithms()
    if not rows:
        wanted = path or cublaslt.table_name()
        raise UsageError(
            f"there is no table {wanted}; `python -m benchmarks.tune MODEL` writes one, of which --table names the file"
        )
    return rows


class Turns:
    """Steps of two kinds on one state, numbered through."""

    def __init__(self, steps: dict[str, TrainStep], device: torch.device, clock: Callable[[], float]):
        self.steps, self.device, self.clock, self.number = {n: Steps(s) for n, s in steps.items()}, device, clock, 0

    def turn(self, name: str, seconds: float) -> dict[str, Any]:
        """Whole steps for about `seconds`, each launched before the result of the last is read."""
        run = self.steps[name]
        run.completed = self.number
        made = timed_turn(run, seconds, self.device, self.clock)
        self.number = run.completed
        return {"milliseconds": 1e3 * made["seconds"] / made["steps"], "power": made["power"]}

    def alternate(self, turns: int, seconds: float) -> dict[str, list[dict[str, Any]]]:
        """Turns of each by name, after a warm-up that does not count."""
        found: dict[str, list[dict[str, Any]]] = {name: [] for name in self.steps}
        for number in range(turns + 1):
            for name in self.steps:
                turn = self.turn(name, seconds if number else min(seconds, WARM_UP_SECONDS))
                if number:
                    found[name].append(turn)
        return found


def measure(config: RunConfig, tokens: Tokens, rows: Rows, turns: int, seconds: float) -> dict[str, Any]:
    """The figures of a model in a precision."""
    device = devices.resolve_device(config.device)
    config = with_tuned_gemms(config, device)
    begun = time.perf_counter()
    use_rows(rows)
    first = assemble(resolve(config, tokens.vocab_size, device=device), tokens.source)
    first.stepper.step(0)  # eager; the next one is captured
    first.stepper.step(1)
    products, found = planned()
    use_rows({})
    second = bind(first.state, first.scaling, tokens.source)
    second.stepper.step(2)
    second.stepper.step(3)
    both = Turns({TABLE: first.stepper, HEURISTIC: second.stepper}, device, time.perf_counter)
    both.number = 4
    ready = time.perf_counter() - begun
    by_name = both.alternate(turns, seconds)
    means = {name: sum(turn["milliseconds"] for turn in made) / len(made) for name, made in by_name.items()}
    return {
        "micro_batch": config.micro_batch,
        "products": products,
        "products_in_the_table": found,
        "ready_seconds": ready,
        **{f"{name}_milliseconds_per_step": mean for name, mean in means.items()},
        **{f"{name}_by_turn": made for name, made in by_name.items()},
        "speed_lost_without_the_table": 1 - means[TABLE] / means[HEURISTIC],
    }


def settings_of(model: str, precision: str, device: str, micro_batch: int = 0) -> Settings:
    size = micro_batch or MICRO_BATCHES[model]
    return Settings(model=model, precision=precision, micro_batch=size, micro_steps=MICRO_STEPS, device=device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MICRO_BATCHES))
    parser.add_argument("--precisions", default="bf16,fp8")
    parser.add_argument("--turns", type=int, default=4, help="of each of the two")
    parser.add_argument("--seconds", type=float, default=3.0, help="of a turn")
    parser.add_argument("--table", default="", metavar="FILE", help="in the place of this GPU's table")
    parser.add_argument("--out", required=True)
    parsed = parser.parse_args()
    keep_commit()
    device = devices.resolve_device("cuda")
    choose_backend("kernels", device)
    rows = rows_of(parsed.table)
    begun = {"turns": parsed.turns, "seconds": parsed.seconds, "micro_steps": MICRO_STEPS, "rows": len(rows)}
    figures = continued(parsed.out, device, begun) or {}
    for model in parsed.models.split(","):
        for precision in parsed.precisions.split(","):
            settings = settings_of(model, precision, "cuda")
            try:
                made = measure(settings.config(), tokens_of(settings), rows, parsed.turns, parsed.seconds)
            except (HandgradError, torch.OutOfMemoryError) as failure:
                made = {"failed": " ".join(str(failure).split())[:200]}
            figures[f"{model}-{precision}"] = rounded(made)
            note(f"{model} {precision}: {made.get('failed') or made['speed_lost_without_the_table']}")
            write_record(parsed.out, device, **begun, figures=figures)
            free_memory(device)


if __name__ == "__main__":
    run_main(main)
