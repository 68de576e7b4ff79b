"""Milliseconds of a few rows of generated text times the weights of GPT-2 124M on a CPU, by MKL and by oneDNN in turns.

    python -m benchmarks.few_rows OUT.json

The weights lie in more memory than the caches hold, as those of a model do.
"""

import sys
import time
from collections.abc import Callable
from statistics import median

import torch
from torch import Tensor

from benchmarks.record import keep_commit, write_record
from handgrad.machine import threads

ROWS, SHAPES = (1, 2, 4, 8, 16, 32), ((2304, 768), (3072, 768), (768, 3072))  # (N, K) of the weights
COPIES, TURNS = 12, 15


def milliseconds(call: Callable[[Tensor, Tensor], Tensor], rows: Tensor, weights: list[Tensor]) -> float:
    """Of a call, the mean over the weights."""
    started = time.perf_counter()
    for weight in weights:
        call(rows, weight)
    return (time.perf_counter() - started) / len(weights) * 1e3


def main(out: str) -> None:
    keep_commit()
    threads.choose()
    libraries: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
        "MKL": torch.nn.functional.linear,
        "oneDNN": lambda rows, weight: torch.ops.mkldnn._linear_pointwise(rows, weight, None, "none", [], ""),
    }
    found = []
    for count in ROWS:
        for columns, inner in SHAPES:
            rows = torch.randn(count, inner)
            weights = [torch.randn(columns, inner) for _ in range(COPIES)]
            times = {name: [] for name in libraries}
            for _ in range(TURNS):
                for name, call in libraries.items():
                    times[name].append(milliseconds(call, rows, weights))
            row = {"rows": count, "columns": columns, "inner": inner}
            row |= {name: round(median(each), 4) for name, each in times.items()}
            found.append(row | {"times_mkl": round(row["MKL"] / row["oneDNN"], 2)})
            print(found[-1])
    write_record(out, torch.device("cpu"), rows=found)


if __name__ == "__main__":
    main(sys.argv[1])
