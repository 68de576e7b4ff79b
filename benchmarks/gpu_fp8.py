"""fp8 piece by piece: each kernel that makes fp8 numbers, each GEMM beside bf16 with its errors, the bytes of a block.

Times are means of launches back to back for tens of milliseconds, too short to meet a GPU's power limit as a training step
does. CUDA graphs launch the kernels without gaps from the host. Tensors smaller than the L2 cache stay in it; `cold` are
medians of single launches after a gigabyte of other data. Every result is checked, and the row of a failure says so.

    python -m benchmarks.gpu_fp8 --out FILE        (or: handgrad bench fp8 --out FILE)
"""

import argparse
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import fp8_bytes, fp8_kernels, fp8_products
from benchmarks.fp8_kernels import Making, Size, Step
from benchmarks.gpu_kernels import FLUSH_BYTES, copy_bandwidth, milliseconds
from benchmarks.measuring import launch_milliseconds
from benchmarks.record import rounded, write_record
from handgrad.joins.fp8.cuda import linear
from handgrad.joins.fp8.formats import COUNTING
from handgrad.machine import devices
from handgrad.machine.backend import choose_backend
from handgrad.ops import cuda as kernels
from handgrad.settings.config import ModelShape
from handgrad.tools.kernel_checks.checking import relative_error

SIZES = (
    Size("124M", ModelShape(50257, 1024, 12, 12, 768), batch=64),
    Size("1558M", ModelShape(50257, 1024, 48, 25, 1600), batch=16),
)
RECORDED = 20  # launches in a graph
WARM_MILLISECONDS, MEASURED_MILLISECONDS = 20.0, 50.0  # of a timed step

# How far fp8 numbers may lie from the 16-bit ones: e5m2 rounds by 0.05 in the mean of squares, e4m3 by half of that.
LARGEST_ROUNDING = 0.08

Row = dict[str, Any]


class Clock:
    """Times steps on the GPU, beside its copy bandwidth in bytes per second."""

    def __init__(self) -> None:
        self.flush = torch.zeros(FLUSH_BYTES // 4, device="cuda")
        self.bandwidth = copy_bandwidth(self.flush)

    def back_to_back(self, step: Step, *, recorded: bool) -> float:
        """Microseconds of a launch among many; `recorded` in a graph if the host cannot keep up."""
        step()  # compiles
        torch.cuda.synchronize()
        launch = self.recorded(step) if recorded else lambda: [step() for _ in range(RECORDED)]
        once = max(launch_milliseconds(launch, 1), 1e-3)
        launch_milliseconds(launch, math.ceil(WARM_MILLISECONDS / once))
        return launch_milliseconds(launch, math.ceil(MEASURED_MILLISECONDS / once)) / RECORDED * 1e3

    def recorded(self, step: Step) -> Callable[[], None]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(RECORDED):
                step()
        return graph.replay

    def cold(self, step: Step) -> float:
        """Microseconds of a single launch with a cold L2 cache."""
        return milliseconds(step, self.flush) * 1e3


def attempt(row: Row, measure: Callable[[], Row]) -> Row:
    """The row with its measurements, or with the reason for none; `failed` are all errors."""
    try:
        found = measure()
    # The compiler, cuBLASLt and the driver have no exception in common. Nothing is hidden: the record and the last lines of
    # the output name each failure, and the rows after it still run.
    except Exception as failure:  # recorded by name
        reason = " ".join(f"{type(failure).__name__}: {failure}".split())
        found = {"failed": [f"{reason:.300}"]}
    return row | found | {"failed": row.get("failed", []) + found.get("failed", [])}


def kernel_row(name: str, making: Making, clock: Clock) -> Row:
    make, operations = fp8_kernels.CASES[name]
    case = make(making)
    fp8_kernels.check_units(case, operations, making.size)
    case.fp8()
    if case.plain is not None:
        case.plain()
    rounding = [relative_error(fp8_kernels.numbers(found), right) for found, right in case.pairs]
    failed = [f"off by {error:.1e} from 16 bits" for error in rounding if not error <= LARGEST_ROUNDING]
    row: Row = {"size_bytes": case.size_bytes, "off": max(rounding), "failed": failed}
    row["microseconds"] = taken = clock.back_to_back(case.fp8, recorded=True)
    row["share_of_copy"] = case.size_bytes / taken * 1e6 / clock.bandwidth
    row["cold_microseconds"] = clock.cold(case.fp8)
    if case.counts is not None:
        case.counts.scaling[COUNTING] = 1.0
        row["counting_microseconds"] = clock.back_to_back(case.fp8, recorded=True)
    if case.plain is not None:
        row["bf16_microseconds"] = clock.back_to_back(case.plain, recorded=True)
    return row


def product_rows(layer: str, direction: str, making: Making, clock: Clock) -> list[Row]:
    """One for each format of the output gradient."""
    product = fp8_products.make(making, layer, direction)
    (M, N, K), fast = product.sizes, linear.has_fast_sums(product.out, product.sizes[2])
    right = fp8_products.exact(product)
    bf16 = clock.back_to_back(product.plain, recorded=False) / 1e3

    def milliseconds_with(variant: fp8_products.Variant) -> Row:
        found = clock.back_to_back(variant.step, recorded=False) / 1e3
        return {"fp8_milliseconds": found, "fp8_teraflops": 2e-9 * M * N * K / found}

    def with_other_sums(variant: fp8_products.Variant) -> Row:
        step = lambda: product.with_sums(variant, not fast)  # noqa: E731
        return {"fp8_other_sums_milliseconds": clock.back_to_back(step, recorded=False) / 1e3}

    rows = []
    for variant in product.variants:
        row: Row = {"m_n_k": [M, N, K], "gradients": variant.gradients, "fast_sums": fast, "bf16_milliseconds": bf16}
        row = attempt(row, lambda v=variant: fp8_products.errors(product, v, right))
        row = attempt(row, lambda v=variant: milliseconds_with(v))
        rows.append(attempt(row, lambda v=variant: with_other_sums(v)))
    return rows


def joined_row(name: str, making: Making, clock: Clock) -> Row:
    bf16, fp8 = (clock.back_to_back(step, recorded=False) / 1e3 for step in fp8_products.JOINED[name](making))
    return {"bf16_milliseconds": bf16, "fp8_milliseconds": fp8}


def number(row: Row, key: str, form: str, width: int) -> str:
    return f"{format(row[key], form) if key in row else '-':>{width}}"


def failures(row: Row) -> str:
    return "  " + "; ".join(row["failed"]) if row["failed"] else ""


def measure_kernels(making: Making, clock: Clock) -> list[Row]:
    heads = {"MB": 9, "us": 9, "of copy": 9, "cold": 9, "counting": 10, "bf16 us": 9, "fp8 off": 10}
    print(f"\n{making.size.name + ': kernels':<34}" + "".join(f"{name:>{width}}" for name, width in heads.items()))
    rows = []
    for name in fp8_kernels.CASES:
        key = {"size": making.size.name, "kernel": name}
        row = attempt(key, lambda name=name: kernel_row(name, making, clock))
        rows.append(row)
        megabytes = {"megabytes": row["size_bytes"] / 1e6} if "size_bytes" in row else {}
        times = number(row, "microseconds", ".1f", 9) + number(row, "share_of_copy", ".1%", 9)
        times += number(row, "cold_microseconds", ".1f", 9) + number(row, "counting_microseconds", ".1f", 10)
        times += number(row, "bf16_microseconds", ".1f", 9) + number(row, "off", ".4f", 10)
        print(f"{name:<34}" + number(megabytes, "megabytes", ".1f", 9) + times + failures(row), flush=True)
    return rows


def measure_products(making: Making, clock: Clock) -> list[Row]:
    heads = {"bf16 ms": 9, "fp8 ms": 9, "x": 7, "TFLOP/s": 9, "sums": 6, "sums off": 10}
    heads |= {"others ms": 11, "others off": 12, "fp8 off": 10, "bf16 off": 10}
    print(f"\n{making.size.name + ': GEMMs':<34}" + "".join(f"{name:>{width}}" for name, width in heads.items()))
    rows = []

    def show(name: str, row: Row) -> None:
        rows.append(row)
        gain = {"x": row["bf16_milliseconds"] / row["fp8_milliseconds"]} if "fp8_milliseconds" in row else {}
        sums = ("fast" if row["fast_sums"] else "full") if "fast_sums" in row else "-"
        line = number(row, "bf16_milliseconds", ".4f", 9) + number(row, "fp8_milliseconds", ".4f", 9)
        line += number(gain, "x", ".2f", 7) + number(row, "fp8_teraflops", ".0f", 9) + f"{sums:>6}"
        line += number(row, "sums_error", ".2e", 10) + number(row, "fp8_other_sums_milliseconds", ".4f", 11)
        line += number(row, "other_sums_error", ".2e", 12) + number(row, "error", ".2e", 10)
        print(f"{name:<34}" + line + number(row, "bf16_error", ".2e", 10) + failures(row), flush=True)

    for layer, (_, _, _, directions) in fp8_products.LAYERS.items():
        for direction in directions:
            key: Row = {"size": making.size.name, "product": layer, "direction": direction}
            found = attempt(key, lambda p=layer, d=direction: {"variants": product_rows(p, d, making, clock)})
            for variant in found.get("variants", [{"failed": found["failed"]}]):
                show(f"{layer} {direction} {variant.get('gradients', '')}", key | variant)
    for name in fp8_products.JOINED:
        key = {"size": making.size.name, "product": name}
        show(name, attempt(key, lambda name=name: joined_row(name, making, clock)))
    return rows


def compare(out: str, sizes: Sequence[Size] = SIZES) -> None:
    """Measures everything and prints the tables; writes them to `out` if that is not empty."""
    started = time.monotonic()
    torch.manual_seed(0)
    device = torch.device(sizes[0].device)
    clock = Clock()
    versions = kernels.versions()
    print(f"{devices.describe(device)}, device copy {clock.bandwidth / 1e12:.2f} TB/s, torch {torch.__version__}")
    print(f"{versions['products']}\n")
    for size in sizes:
        fp8_bytes.check(size.shape, size.batch)
    print("\n".join(fp8_bytes.table()), flush=True)
    compiled = attempt({"kernel": "all, compiled at once"}, lambda: fp8_kernels.compile_all(sizes))
    found_kernels: list[Row] = []
    found_products: list[Row] = []
    made = []
    for size in sizes:
        made.append(attempt({"size": size.name}, lambda size=size: {"making": Making(size)}))
        if making := made[-1].pop("making", None):
            found_kernels += measure_kernels(making, clock)
            found_products += measure_products(making, clock)
    every = [compiled, *made, *found_kernels, *found_products]
    failed = [row for row in every if row["failed"]]
    print(f"\n{len(failed)} of {len(every)} rows failed, {time.monotonic() - started:.0f} s")
    for row in failed:
        name = " ".join(row[key] for key in ("size", "kernel", "product", "direction", "gradients") if row.get(key))
        print(f"  {name}:{failures(row)}")
    if out:
        write_record(
            out,
            device,
            libraries=versions,
            copy_terabytes_per_second=clock.bandwidth / 1e12,
            kernels=rounded(found_kernels, 4),
            products=rounded(found_products, 4),
            bytes_per_token_and_block=fp8_bytes.record(),
            failed=rounded(failed, 4),
        )


def main() -> None:
    parser = argparse.ArgumentParser(description="fp8 piece by piece, on this machine's GPU.")
    parser.add_argument("--out", default="", metavar="FILE", help="also write the figures as JSON")
    out = parser.parse_args().out
    if not Path(out).absolute().parent.is_dir():
        parser.error(f"--out {out}: there is no such folder")
    device = devices.resolve_device("cuda")
    devices.dtype_of(device, "fp8")  # refuses a GPU without fp8
    devices.set_arithmetic(device, "fp8")
    choose_backend("kernels", device, "fp8")  # says what is missing
    compare(out)


if __name__ == "__main__":
    main()
