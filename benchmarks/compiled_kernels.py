"""Every Triton kernel that training, evaluation and generation launch, compiled for cards that are not there.

    TRITON_INTERPRET=0 python -m benchmarks.compiled_kernels --out benchmarks/results/compiled-kernels.json

Turing (sm_75), Ampere's A100 (sm_80) and Ampere's other cards (sm_86): registers, shared memory within the card's
limit, and the bytes that spill. Nothing runs. Kernels, constants and launch options come from the tables in tests/kernels.
"""

import argparse
import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from typing import Any

import torch

from benchmarks.record import keep_commit, write_record
from tests.kernels import (
    attention_kernel_table as attention,
    decode_kernel_table as decode,
    memory_kernel_table as memory,
    modern_kernel_table as modern,
    muon_kernel_table as muon,
)
from tests.kernels.compiling import SHARED_LIMIT

DTYPES = {75: ("fp16",), 80: ("bf16", "fp16"), 86: ("bf16", "fp16")}

# Enough to see a card's path break: products without tensor cores, the largest tiles, launches that may not overlap.
SAMPLE = {
    ("dq", 64, "plain", "fp16", 75, False),
    ("attention of new tokens, heads of 128, 1 to a key", "fp16", 75),
    ("adamw_update", 768, "fp16", 75),
    ("value_embedding_decode of 12 heads of 64", "bf16", 80),
    ("dq", 256, "plain", "fp16", 86, False),
    ("X X^T", 86),
}
CARDS = {"sm_75": "Turing: T4, RTX 20", "sm_80": "Ampere: A100", "sm_86": "Ampere: A10, A6000, RTX 30"}

Row = dict[str, Any]
Job = tuple[Callable[[Any], Row], Any]


def jobs(arch: int, dtype: str) -> Iterator[Job]:
    """The compilations for a card, in one dtype of weights and activations."""
    yield from ((memory.compile_one, job) for job in memory.jobs((arch,), (dtype,)))
    yield from ((modern.compile_one, (name, dtype, arch)) for name in modern.launches(2))
    yield from ((decode.compile_one, (name, dtype, arch)) for name in decode.launches())
    yield from ((attention.compile_one, case) for case in attention.cases_of(arch, (dtype,)))
    if dtype == "bf16":  # in which Muon computes polar factors; a GPU without it is refused
        yield from ((muon.compile_one, (name, arch)) for name in muon.launches())


def compiled(job: Job) -> Row:
    """A kernel's row; one that does not compile says why."""
    compile_one, arguments = job
    try:
        return compile_one(arguments)
    except RuntimeError as failure:  # the compiler's own errors
        return {"kernel": str(arguments), "failed": str(failure).strip().splitlines()[0]}


def summary(rows: list[Row], limit: int) -> dict[str, Any]:
    """The figures of a card and dtype."""
    found = [row for row in rows if "failed" not in row]
    largest = max(found, key=lambda row: row["shared"])
    return {
        "kernels": len(rows),
        "failed": {row["kernel"]: row["failed"] for row in rows if "failed" in row},
        "over_the_limit": {row["kernel"]: row["shared"] for row in found if row["shared"] > limit},
        "spilled_bytes": {row["kernel"]: row["stack"] for row in found if row["stack"]},
        "largest_shared_bytes": largest["shared"],
        "largest_shared_kernel": largest["kernel"],
        "shared_limit_bytes": limit,
        "most_registers": max(row["registers"] for row in found),
        "attention_on_tensor_cores": all(row["tensor_cores"] for row in found if "tensor_cores" in row),
    }


def table(*, sample: bool = False) -> dict[str, dict[str, dict[str, Any]]]:
    """Card: dtype: figures."""
    figures: dict[str, dict[str, dict[str, Any]]] = {}
    with ThreadPoolExecutor(2) as pool:
        for arch, dtypes in DTYPES.items():
            for dtype in dtypes:
                chosen = [job for job in jobs(arch, dtype) if not sample or job[1] in SAMPLE]
                if chosen:
                    made = summary(list(pool.map(compiled, chosen)), SHARED_LIMIT[arch])
                    figures.setdefault(f"sm_{arch}", {})[dtype] = made
    return figures


def lines(figures: dict[str, dict[str, dict[str, Any]]]) -> list[str]:
    """The rows of the table in docs/compatibility.md."""
    found = []
    for card, dtypes in figures.items():
        for dtype, row in dtypes.items():
            spilled = row["spilled_bytes"]
            spills = f"{len(spilled)}, of at most {max(spilled.values())} bytes" if spilled else "none"
            shared = f"{row['largest_shared_bytes'] / 1024:.1f} of {row['shared_limit_bytes'] >> 10}"
            units = "tensor cores" if row["attention_on_tensor_cores"] else "plain units"
            cells = (
                CARDS[card],
                card,
                dtype,
                row["kernels"],
                len(row["failed"]),
                shared,
                row["most_registers"],
                spills,
                units,
            )
            found.append(f"| {' | '.join(map(str, cells))} |")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sample", action="store_true", help="a few kernels of each card alone")
    parser.add_argument("--out", default="")
    parsed = parser.parse_args()
    keep_commit()
    figures = table(sample=parsed.sample)
    print(json.dumps(figures, indent=1))
    if parsed.out:
        method = "compiled by Triton and ptxas on a machine without such a card; nothing of it has run there"
        write_record(parsed.out, torch.device("cpu"), triton=version("triton"), method=method, figures=figures)


if __name__ == "__main__":
    main()
