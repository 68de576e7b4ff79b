"""Every Triton kernel that training, evaluation and generation launch, compiled for cards that are not there.

    TRITON_INTERPRET=0 python -m benchmarks.compiled_kernels --out benchmarks/results/compiled-kernels.json
    TRITON_INTERPRET=0 python -m benchmarks.compiled_kernels --cards sm_89,sm_120,sm_121 --out ...

Registers, shared memory within the card's limit, and the bytes that spill. Nothing runs. Kernels, constants and launch
options come from the tables in tests/kernels.
"""

import argparse
import json
from collections.abc import Callable, Iterator
from importlib.metadata import version
from itertools import product
from typing import Any

import torch

from benchmarks.record import keep_commit, write_record
from handgrad.networks.fp8 import WIDEST_HEAD_OF_FP8
from tests.kernels import (
    attention_kernel_table as attention,
    decode_kernel_table as decode,
    fp8_kernel_table as fp8,
    gelu_fp8_kernel_table as gelu_fp8,
    llama_fp8_kernel_table as llama_fp8,
    memory_kernel_table as memory,
    modern_fp8_kernel_table as modern_fp8,
    modern_kernel_table as modern,
    muon_kernel_table as muon,
)
from tests.kernels.compiling import SHARED_LIMIT, compile_all

PRECISIONS = {75: ("fp16",), 80: ("bf16", "fp16"), 86: ("bf16", "fp16")}
PRECISIONS |= {89: ("bf16", "fp8"), 120: ("bf16", "fp8"), 121: ("bf16", "fp8")}

# Enough to see a card's path break: products without tensor cores, the largest tiles, launches that may not overlap and, on
# sm_12x, those that do; fp8.
SAMPLE = {
    ("dq", 64, "plain", "fp16", 75, False),
    ("attention of new tokens, heads of 128, 1 to a key", "fp16", 75),
    ("adamw_update", 768, "fp16", 75),
    ("value_embedding_decode of 12 heads of 64", "bf16", 80),
    ("dq", 256, "plain", "fp16", 86, False),
    ("X X^T", 86),
    ("dq", 128, "fp8e4nv", "bf16", 89, False),
    ("backward", "bf16", "fp8e4nv", True, 89),
    ("forward", 64, "plain", "bf16", 120, False),
    ("dq", 256, "plain", "bf16", 120, False),
    ("attention of new tokens, heads of 128, 1 to a key", "bf16", 120),
    ("X X^T", 120),
    ("quantize", 768, "bf16", "fp8e4nv", 120),
    ("layernorm_backward", 1600, "bf16", 121),
}
Row = dict[str, Any]
Job = tuple[Callable[[Any], Row], Any]


def jobs(arch: int, dtype: str) -> Iterator[Job]:
    """The compilations for a card, in one dtype of weights and activations; "fp8": of the kernels that only fp8 adds."""
    if dtype == "fp8":
        yield from fp8_jobs(arch)
        return
    yield from ((memory.compile_one, job) for job in memory.jobs((arch,), (dtype,)))
    yield from ((modern.compile_one, (name, dtype, arch)) for name in modern.launches(2))
    yield from ((decode.compile_one, (name, dtype, arch)) for name in decode.launches())
    yield from ((attention.compile_one, case) for case in attention.cases_of(arch, (dtype,)))
    if dtype == "bf16":  # in which Muon computes polar factors; a GPU without it is refused
        yield from ((muon.compile_one, (name, arch)) for name in muon.launches())


def fp8_jobs(arch: int) -> Iterator[Job]:
    forms = fp8.TYPES
    for name, (_, constants, _) in fp8.launches(768, "fp8e4nv").items():
        channels = fp8.CHANNELS if "C" in constants else fp8.CHANNELS[:1]
        yield from ((fp8.compile_one, (name, C, "bf16", form, arch)) for C, form in product(channels, forms))
    for name, form in product(("forward", "backward", "sums"), forms):
        yield gelu_fp8.compile_one, (name, "bf16", form, True, arch)
    for table in (modern_fp8, llama_fp8):
        yield from ((table.compile_one, (name, "bf16", form, arch)) for form in forms for name in table.launches(form))
    kinds = [f"{form}{more}" for form in forms for more in ("", attention.DOCUMENTS)]
    keys = [key for key in attention.ATTENTION_TILES if key[1] <= WIDEST_HEAD_OF_FP8]
    for key, kind, tail in product(keys, kinds, (False, True)):
        yield attention.compile_one, (*key, kind, "bf16", arch, tail)


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


def table(cards: list[str], *, sample: bool = False) -> dict[str, dict[str, dict[str, Any]]]:
    """Card: precision: figures."""
    figures: dict[str, dict[str, dict[str, Any]]] = {}
    for arch, precisions in PRECISIONS.items():
        for precision in precisions if f"sm_{arch}" in cards else ():
            chosen = [job for job in jobs(arch, precision) if not sample or job[1] in SAMPLE]
            if chosen:
                made = summary(compile_all(compiled, chosen), SHARED_LIMIT[arch])
                figures.setdefault(f"sm_{arch}", {})[precision] = made
    return figures


def lines(figures: dict[str, dict[str, dict[str, Any]]]) -> list[str]:
    """The rows of the table in docs/compatibility.md: precisions and cards with the same figures share one."""
    by_card: dict[tuple[str, ...], list[str]] = {}
    for card, precisions in figures.items():
        by_limits: dict[tuple[str, ...], dict[str, str]] = {}
        for precision, row in precisions.items():
            spilled = row["spilled_bytes"]
            shared = f"{row['largest_shared_bytes'] / 1024:.1f} of {row['shared_limit_bytes'] >> 10}"
            limits = shared, str(row["most_registers"]), f"{len(spilled)} ({max(spilled.values(), default=0)})"
            by_limits.setdefault(limits, {})[precision] = str(row["kernels"])
        for limits, kernels in by_limits.items():
            by_card.setdefault((", ".join(kernels), ", ".join(kernels.values()), *limits), []).append(card)
    return [f"| {' | '.join((', '.join(cards), *cells))} |" for cells, cards in by_card.items()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sample", action="store_true", help="a few kernels of each card alone")
    parser.add_argument("--cards", default=",".join(f"sm_{arch}" for arch in PRECISIONS), help="with commas (default: all)")
    parser.add_argument("--out", default="")
    parsed = parser.parse_args()
    keep_commit()
    figures = table(parsed.cards.split(","), sample=parsed.sample)
    print(json.dumps(figures, indent=1))
    if parsed.out:
        method = "compiled by Triton and ptxas on a machine without such a card; nothing of it has run there"
        write_record(parsed.out, torch.device("cpu"), triton=version("triton"), method=method, figures=figures)


if __name__ == "__main__":
    main()
