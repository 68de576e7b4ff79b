"""Chooses the algorithm of every GEMM of a run by its time under sustained load, and writes the table that freezes them.

    python -m benchmarks.tune d12 --precision fp8      (the arguments of `handgrad train`; --table FILE: another table)

The table goes where runs on this machine look for it, and its rows come before the shipped ones. In fp8 it also names the
parts of a block whose GEMMs stay in bf16, since a whole step is faster so.

A GPU at its power limit runs at other clocks than in a burst, so the candidates are timed on a GPU that has been kept
busy, in turns. https://docs.nvidia.com/cuda/cublas/#cublasltmatmulalgogetheuristic
"""

import json
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.measuring import launch_milliseconds
from benchmarks.record import run_main
from handgrad.commands.arguments import run_config
from handgrad.commands.flags import add_run_arguments
from handgrad.commands.parser import Formatter, Parser
from handgrad.errors import UsageError
from handgrad.files import check_replaceable, write_durably
from handgrad.joins.fp8.cuda.linear import keep_bf16_key
from handgrad.machine import devices
from handgrad.machine.backend import choose_backend
from handgrad.ops.cuda import cublaslt
from handgrad.ops.cuda.cublaslt import DGELU, GELU_AUX_BIAS, PLAIN, Plan, Product
from handgrad.ops.sizes import WORKSPACE_BYTES
from handgrad.run.assemble import allocate, bind
from handgrad.run.resolve import with_precision
from handgrad.settings.config import AT_LEAST_1, RunConfig
from handgrad.tools.plan import as_it_runs
from handgrad.tools.profile import set_up
from handgrad.tools.speeds import gemm_flops, seconds_of
from handgrad.training.step import TrainStep

HEURISTICS = 16  # algorithms asked for, in all and of each family
TURNS = 12  # single launches of every candidate, one after the other, so that all see the same clock
FINALISTS = 3  # fastest of these, and the one in use, ...
SUSTAINED_SECONDS = 0.6  # ... run so long each, and count in the second half, at the clock that their power allows
WARM_SECONDS = 3.0  # of GEMMs before the first timing
STEP_SECONDS = 8.0  # of micro-steps, of which the second half is measured
NOISE = 0.005  # relative difference of two equal measurements


def operands(product: Product) -> dict[str, Any]:
    """Random numbers for a GEMM: zeros would draw less power and run faster."""
    m, n, k = product.m, product.n, product.k
    fp8 = product.a_dtype.itemsize == 1
    narrow = product.out_dtype if fp8 else product.a_dtype

    def random(rows: int, columns: int, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
        return (torch.randn(rows, columns, device="cuda") * scale).to(dtype)

    d = random(n, m, product.out_dtype)
    small = 1.0 if fp8 else k**-0.5
    one = torch.ones(1, device="cuda")
    return {
        "d": d,
        "a": random(*((m, product.a_stride or k) if product.transpose_a else (k, m)), product.a_dtype, small),
        "b": random(*((k, n) if product.transpose_b else (n, product.b_stride or k)), product.b_dtype),
        "c": random(n, m, product.out_dtype) if product.adds and product.out_dtype != torch.float32 else d,
        "bias": None if product.epilogue in (PLAIN, DGELU) else random(1, m, narrow),
        "aux": random(n, m, narrow) if product.epilogue in (GELU_AUX_BIAS, DGELU) else None,
        "inverse_scales": (one, one) if fp8 else None,
    }


def candidates(plan: Plan) -> list[np.ndarray]:
    """All algorithms that the library proposes, the one in use first, each once."""
    found = [plan.algorithm, *plan.candidates(HEURISTICS)]
    for family in plan.families():
        found += plan.candidates(HEURISTICS, family)
    return list({tuple(words): words for words in found}.values())


def alternating_milliseconds(launches: list[Callable[[], None]]) -> list[float]:
    """Median milliseconds of each launch, all at the same clock; infinite for one that the library refuses."""
    times: list[list[float]] = [[] for _ in launches]
    refused = set()
    for _ in range(TURNS + 1):  # the first is to load them
        events = {}
        for i, launch in enumerate(launches):
            if i in refused:
                continue
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            try:
                launch()
            except cublaslt.lt.cuBLASLtError:  # proposed, but not for these pointers
                refused.add(i)
                continue
            stop.record()
            events[i] = start, stop
        torch.cuda.synchronize()
        for i, (start, stop) in events.items():
            times[i].append(start.elapsed_time(stop))
    return [inf if i in refused else median(found[1:]) for i, found in enumerate(times)]


def sustained(launch: Callable[[], None], milliseconds: float) -> float:
    """Mean milliseconds of a launch in the second half of `SUSTAINED_SECONDS` of nothing else."""
    count = max(4, round(SUSTAINED_SECONDS / 2 * 1e3 / milliseconds))
    for _ in range(count):
        launch()
    return launch_milliseconds(launch, count)


@dataclass(frozen=True)
class Choice:
    """The result for a GEMM: milliseconds before and after, and the number of candidates."""

    before: float
    after: float
    candidates: int


def choose(product: Product, scratch: Tensor) -> Choice:
    """Gives the product's plan the algorithm that is fastest under load."""
    plan = cublaslt.plan(product)
    tensors = operands(product)

    def launcher(words: np.ndarray) -> Callable[[], None]:
        def launch() -> None:
            plan.algorithm = words
            plan.launch(**tensors, scratch=scratch)

        return launch

    found = candidates(plan)
    launches = [launcher(words) for words in found]
    short = alternating_milliseconds(launches)
    order = sorted(range(len(found)), key=lambda i: (short[i], i))
    finalists = list(dict.fromkeys([0, *order[:FINALISTS]]))
    long = {i: sustained(launches[i], short[i]) for i in finalists}
    best = min(long, key=lambda i: (long[i], i))
    plan.algorithm = found[best]
    return Choice(long[0], long[best], len(found))


def tune(products: list[Product], path: Path) -> Iterator[str]:
    """Tunes `products` and writes their rows into the table at `path`, keeping its other rows. Yields a line for each."""
    scratch = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")
    gemm_flops(torch.device("cuda"), torch.float16, WARM_SECONDS)
    rows = cublaslt.read_table(path, "algorithms")
    for product in products:
        choice = choose(product, scratch)
        rows[product.name()] = [f"{int(word):x}" for word in cublaslt.plan(product).algorithm]
        tera = 2e-9 * product.m * product.n * product.k / choice.after
        yield (
            f"{product.name():<52} {choice.before:7.3f} -> {choice.after:7.3f} ms  {tera:5.0f} TFLOP/s"
            f"  of {choice.candidates} algorithms"
        )
    write_table(path, rows, cublaslt.read_table(path, "keep_bf16"))


def write_table(path: Path, algorithms: dict[str, list[str]], keep_bf16: dict[str, str]) -> None:
    record = {
        "gpu": torch.cuda.get_device_name(),
        "cublaslt": cublaslt.lt.get_version(),
        "chosen_by": "time under sustained load (`python -m benchmarks.tune`)",
        "keep_bf16": dict(sorted(keep_bf16.items())),
        "algorithms": dict(sorted(algorithms.items())),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    write_durably(path, json.dumps(record, indent=1) + "\n")
    cublaslt.frozen_algorithms.cache_clear()


# A whole run: its GEMMs, then the parts that are slower in fp8.


class NoFeed:
    """Keeps the tokens as they are: only the shapes of a step matter here."""

    def fill(self, first_sample: int) -> None:
        pass


def stepper_of(config: RunConfig, vocab_size: int, *, graphs: bool) -> TrainStep:
    state, scaling = allocate(set_up(config, vocab_size))
    return bind(state, scaling, feed=NoFeed(), graphs=graphs).stepper


def slower_in_fp8(config: RunConfig, vocab_size: int) -> list[str]:
    """The parts of a block whose GEMMs make a whole step slower in fp8 than in bf16; prints a line for each measurement."""
    all_fp8, kept = micro_step_milliseconds(config, vocab_size), list[str]()
    print(f"{'a step with all GEMMs in fp8':<52} {all_fp8:9.2f} ms", flush=True)
    for part in config.shape(vocab_size).fp8_parts:
        without = micro_step_milliseconds(replace(config, fp8_keep_bf16=part), vocab_size)
        kept += [part] if without < all_fp8 * (1 - NOISE) else []
        chosen = "bf16" if part in kept else "fp8"
        print(f"{f'the same with {part} in bf16':<52} {without:9.2f} ms  {chosen}", flush=True)
    return kept


def micro_step_milliseconds(config: RunConfig, vocab_size: int) -> float:
    """The length of a micro-batch, forward and backward, under sustained load."""
    torch.cuda.empty_cache()
    stepper = stepper_of(config, vocab_size, graphs=True)
    stepper.step(0)
    (micro_step,) = stepper.micro_step
    micro_step()  # captured
    return 1e3 * seconds_of(torch.device("cuda"), micro_step, STEP_SECONDS, burst=20)


def parsed_arguments(arguments: Sequence[str] | None) -> Namespace:
    parser = Parser("python -m benchmarks.tune", formatter_class=Formatter)
    add_run_arguments(parser)
    parser.number("--vocab-size", "words (default: as in --data, or GPT-2's)", rule=AT_LEAST_1)
    parser.text("--table", "FILE", "the table to write (default: the user's own)")
    return parser.parse(sys.argv[1:] if arguments is None else arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    parsed = parsed_arguments(arguments)
    asked = run_config(parsed)
    if parsed.table:
        check_replaceable(Path(parsed.table), "--table")
    device = devices.resolve_device(asked.device)
    if device.type != "cuda":
        raise UsageError(f"expected a CUDA GPU to tune for, found device {device.type}")
    config, vocab_size, lines = as_it_runs(asked, parsed.vocab_size or 0, named=parsed.data is not None)
    print("\n".join(lines), flush=True)
    # Lanes change no GEMM, and the GEMMs of one process are tuned.
    config = with_precision(replace(config, lanes=asked.lanes, backend="kernels"), device)
    choose_backend("kernels", device, config.precision)  # raises if a library is missing
    path = Path(parsed.table) if parsed.table else cublaslt.user_table()
    every = replace(config, fp8_keep_bf16="") if config.precision == "fp8" else config
    stepper_of(every, vocab_size, graphs=False).begin(0)  # launches every GEMM of a step
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    for line in tune(list(cublaslt.PLANS), path):
        print(line, flush=True)
    if config.precision == "fp8":
        key = keep_bf16_key(config.micro_batch * config.sequence_length, config.channels)
        decided = cublaslt.read_table(path, "keep_bf16") | {key: ",".join(slower_in_fp8(every, vocab_size))}
        write_table(path, cublaslt.read_table(path, "algorithms"), decided)
    use = "runs with these shapes use it from now on (their bits change)"
    print(f"wrote {path}; {use if path == cublaslt.user_table() else f'copy it to {cublaslt.user_table()} to use it'}")


if __name__ == "__main__":
    run_main(main)
