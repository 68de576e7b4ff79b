"""Milliseconds of attention's Triton kernels with other tiles than the shipped ones, on a data-centre GPU in bf16.

A tile is (queries, keys, warps, stages, registers). Each measurement changes one kernel. FLOPs count the visible pairs of
queries and keys: the forward takes two products, dq three, dk and dv four. `--fp8`: the kernels that also quantise, of
GPT-2's heads.

    python -m benchmarks.attention_choices --out benchmarks/results/h200-attention-choices.json       (needs a GPU)
"""

import argparse
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.attention_context import NONE, ONE, SHORT, Case, Inputs
from benchmarks.gpu_step import libraries
from benchmarks.measuring import launch_milliseconds
from benchmarks.record import keep_commit, write_record
from handgrad.joins.fp8 import formats
from handgrad.joins.fp8.cuda import attention as fp8
from handgrad.joins.fp8.formats import Quantized
from handgrad.machine import devices
from handgrad.ops.cuda import attention_triton as kernels
from handgrad.ops.cuda.launch import collecting
from handgrad.ops.reference.attention import Mask
from handgrad.ops.sizes import AttentionTile, attention_tile

TOKENS, LAUNCHES, PRODUCTS = 32768, 12, {"forward": 2, "dq": 3, "dkdv": 4}
CASES = {  # (length, heads, heads of keys and values, documents)
    64: [(1024, 32, 8, SHORT), (2048, 32, 8, SHORT), (1024, 12, 12, SHORT), (2048, 32, 8, ONE), (1024, 12, 12, NONE)],
    128: [(2048, 16, 8, SHORT), (1024, 32, 32, SHORT), (2048, 16, 8, ONE), (1024, 12, 2, NONE), (2048, 32, 8, NONE)],
    256: [(2048, 4, 1, SHORT), (2048, 8, 4, NONE), (2048, 4, 1, NONE)],
}
FP8_CASES = {64: [(1024, 12, 12, NONE), (1024, 25, 25, NONE), (1024, 12, 12, SHORT)]}
CHOICES = {
    (64, "forward"): "64/64/4/3 64/64/4/2/128 64/64/4/4/128 64/32/4/3/128 64/32/4/3 64/32/4/3/96 128/32/4/3 64/128/4/2"
    " 64/32/4/4/96 64/32/4/3/112",
    (64, "dq"): "64/64/4/2 64/64/4/3/128 64/64/4/3 64/32/4/3 64/32/4/3/128 64/32/4/2/128 128/32/8/3/128"
    " 64/32/4/4 64/32/4/3/96",
    (64, "dkdv"): "64/64/4/2 64/64/4/2/168 32/64/4/3 32/64/4/2 32/64/4/3/128 32/64/4/3/168 64/128/8/2 32/128/8/2 64/64/8/2"
    " 64/64/4/2/152 64/64/4/2/184 32/64/4/4/128 32/64/4/3/144",
    (128, "forward"): "64/64/4/3/168 64/32/4/3 64/32/4/2 128/32/8/3 128/64/8/3",
    (128, "dq"): "128/64/8/3 64/32/4/3 64/32/4/2 64/64/4/3",
    (128, "dkdv"): "64/64/8/3 64/64/8/2 64/64/4/2 32/64/4/2 32/64/4/3 16/64/4/2 16/64/4/3 32/128/8/2",
    (256, "forward"): "64/64/4/2 64/64/8/2 64/32/4/2 64/32/4/3 128/32/8/2 128/64/8/1",
    (256, "dq"): "64/32/4/2 64/32/8/2 64/64/8/2 64/64/4/2 128/64/8/1 64/32/4/1",
    (256, "dkdv"): "32/32/8/2 32/64/8/2 64/64/8/2 64/64/8/1 32/64/8/1 16/64/8/2 32/64/4/1 64/32/8/2",
}


def tiles_of(case: Case, kernel: str, made: Callable) -> list[AttentionTile]:
    """The shipped tile first."""
    grouped, documents = case.kv_heads < case.heads, case.documents != NONE
    shipped = attention_tile(kernel, case.width, narrow=True, newer=True, grouped=grouped, documents=documents)
    if made is fp8_launches:
        shipped = fp8.TILES.get((kernel, case.width), shipped)
    others = (AttentionTile(*map(int, choice.split("/"))) for choice in CHOICES[case.width, kernel].split())
    return [shipped, *(tile for tile in others if tile != shipped)]


@contextmanager
def chosen(tile: AttentionTile) -> Iterator[None]:
    """A kernel that is launched takes this tile."""
    with patch.object(kernels, "choose_config", lambda *_: tile), patch.object(fp8, "TILES", {}):
        yield


def quantized(rows: int, columns: int, inputs: Inputs) -> Quantized:
    """Both forms in e4m3 at a scale of 1, and parts of the statistics for tiles of 16 rows."""
    device = inputs.qkv.device
    forms = [torch.empty(shape, dtype=formats.E4M3, device=device) for shape in ((rows, columns), (columns, rows))]
    scaling, parts = torch.zeros(formats.SCALING_PLACES, device=device), inputs.case.heads * rows // 8
    scaling[formats.SCALE] = scaling[formats.INVERSE] = 1
    return Quantized(*forms, scaling, torch.zeros(formats.STATISTICS_PLACES, parts, device=device))


def fp8_launches(inputs: Inputs) -> dict[str, Callable[[], object]]:
    """By kernel; each reads what those before it wrote. The backward leaves out the 16-bit gradient, as training does."""
    case, qkv, dout, mask = inputs.case, inputs.qkv, inputs.dout, Mask(inputs.starts)
    out, dqkv = quantized(*dout.shape, inputs), quantized(*qkv.shape, inputs)
    plain = torch.empty_like(dout)
    lse = torch.empty(inputs.batch, case.heads, case.length, device=qkv.device)
    sums = torch.empty(2 * lse.numel(), device=qkv.device)
    tensors = {
        "forward": (fp8.forward_kernel, (plain, lse, qkv), mask, out),
        "dq": (fp8.dq_kernel, (None, sums, dout, plain, lse, qkv), mask, dqkv),
        "dkdv": (fp8.dkdv_kernel, (None, sums, dout, qkv), mask, dqkv),
    }
    return {name: partial(fp8.launch_blocks, name, *those, 0, lse, case.width) for name, those in tensors.items()}


def launches(inputs: Inputs) -> dict[str, Callable[[], object]]:
    """By kernel; each reads what those before it wrote."""
    case, qkv, dout, mask = inputs.case, inputs.qkv, inputs.dout, Mask(inputs.starts)
    out, dqkv = torch.empty_like(dout), torch.empty_like(qkv)
    lse = torch.empty(inputs.batch, case.heads, case.length, device=qkv.device)
    sums = torch.empty(2 * lse.numel(), device=qkv.device)
    dkdv = kernels.dkdv_kernel if case.heads == case.kv_heads else kernels.grouped_dkdv_kernel
    backward = partial(kernels.launch_blocks, mask=mask, width=case.width)
    return {
        "forward": lambda: kernels.attention_forward(out, lse, qkv, mask=mask),
        "dq": lambda: backward("dq", kernels.dq_kernel, lse, dqkv, sums, dout, out, lse, qkv),
        "dkdv": lambda: backward("dkdv", dkdv, lse, dqkv, sums, dout, qkv),
    }


def compile_kernels(cases: list[Case], device: torch.device, made: Callable[[Inputs], dict[str, Callable]]) -> None:
    """All choices at once: a choice that needs too much shared memory fails where it is measured."""
    jobs: dict[Any, Callable[[], object]] = {}
    for case in cases:
        for kernel, launch in made(Inputs(case, case.length, device, torch.bfloat16)).items():
            for tile in tiles_of(case, kernel, made):
                with chosen(tile), collecting() as noted:
                    launch()
                [(function, [(grid, tensors, options)])] = noted.items()
                key = case.width, case.heads // case.kv_heads, case.documents == NONE, kernel, tile
                jobs[key] = partial(function.run, *tensors, grid=grid, warmup=True, **options)
    with ThreadPoolExecutor(os.cpu_count(), initializer=torch.cuda.set_device, initargs=(0,)) as threads:
        for job in [threads.submit(job) for job in jobs.values()]:
            job.exception()


def measure(case: Case, device: torch.device, made: Callable[[Inputs], dict[str, Callable]]) -> Iterator[dict[str, Any]]:
    """A row for each choice; its reason for one that does not run."""
    inputs = Inputs(case, TOKENS, device, torch.bfloat16)
    every = made(inputs)
    for launch in every.values():
        launch()
    for kernel, launch in every.items():
        shipped, *others = tiles_of(case, kernel, made)
        for tile in (shipped, *others):
            row = {**asdict(case), "kernel": kernel, "tile": list(tile), "shipped": tile == shipped}
            try:
                with chosen(tile):
                    launch()
                    milliseconds = launch_milliseconds(launch, LAUNCHES)
            except RuntimeError as error:  # Triton's: more shared memory than there is
                yield row | {"failed": str(error)[:160]}
                continue
            rate = inputs.flops(PRODUCTS[kernel]) / milliseconds / 1e9
            yield row | {"milliseconds": round(milliseconds, 4), "tflop_per_second": round(rate, 1)}
        launch()  # the next kernel reads the shipped tile's results


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Milliseconds of attention's Triton kernels by their tiles.")
    parser.add_argument("--widths", default="64,128,256", help="of a head; without --fp8")
    parser.add_argument("--fp8", action="store_true", help="the kernels that also quantise")
    parser.add_argument("--out", default="", help="the results file")
    options = parser.parse_args(given)
    keep_commit()
    device, rows = devices.resolve_device("cuda"), list[dict[str, Any]]()
    devices.set_arithmetic(device, "bf16")
    print(devices.describe(device))
    table = FP8_CASES if options.fp8 else {width: CASES[width] for width in map(int, options.widths.split(","))}
    cases = [Case(*case[:3], width, case[3]) for width, those in table.items() for case in those]
    made = fp8_launches if options.fp8 else launches
    compile_kernels(cases, device, made)
    for case in cases:
        for row in measure(case, device, made):
            rows.append(row)
            figures = row.get("failed") or f"{row['milliseconds']:>8.3f} ms{row['tflop_per_second']:>7.1f} TFLOP/s"
            name = f"{case.length:>6} {case.heads}/{case.kv_heads:<3}{case.width:>4} {case.documents:<6}{row['kernel']:<8}"
            print(f"{name}{row['tile']!s:<26}{figures}{'  shipped' * row['shipped']}", flush=True)
    if options.out:
        write_record(options.out, device, libraries=libraries(), tokens=TOKENS, rows=rows)


if __name__ == "__main__":
    main()
