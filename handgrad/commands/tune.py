"""handgrad tune: freezes the fastest algorithm of every GEMM of a model on this GPU."""

from argparse import Namespace
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch

from handgrad.errors import UsageError
from handgrad.files import check_replaceable
from handgrad.machine import devices
from handgrad.machine.backend import choose_backend
from handgrad.run.assemble import allocate, bind
from handgrad.run.resolve import with_precision
from handgrad.settings.config import RunConfig
from handgrad.tools.plan import as_it_runs
from handgrad.tools.profile import set_up
from handgrad.tools.speeds import seconds_of
from handgrad.training.step import TrainStep

SUSTAINED_SECONDS = 8.0  # of micro-steps, of which the second half is measured
NOISE = 0.005  # relative difference of two equal measurements


class NoFeed:
    """Keeps the tokens as they are: only the shapes of a step matter here."""

    def fill(self, first_sample: int) -> None:
        pass


def as_tuned(parsed: Namespace) -> tuple[RunConfig, int, list[str]]:
    """`as_it_runs`, but with the lanes that were asked for: they change no GEMM, and the GEMMs of one process are tuned."""
    config, vocab_size, lines = as_it_runs(parsed.run_config, parsed.vocab_size or 0, given=parsed.data is not None)
    return replace(config, lanes=parsed.run_config.lanes), vocab_size, lines


def run(parsed: Namespace) -> int:
    config = parsed.run_config
    if parsed.table:
        check_replaceable(Path(parsed.table), "--table")
    device = devices.resolve_device(config.device)
    if device.type != "cuda":
        raise UsageError(f"expected a CUDA GPU to tune for, found device {device.type}")
    config, vocab_size, lines = as_tuned(parsed)
    for line in lines:
        print(line, flush=True)
    config = with_precision(config, device)
    choose_backend("kernels", device, config.precision)  # raises if a library is missing
    from handgrad.ops.cuda import cublaslt
    from handgrad.tools import tune  # only where the kernels can run

    config = replace(config, backend="kernels")
    path = Path(parsed.table) if parsed.table else cublaslt.user_table()
    every = replace(config, fp8_keep_bf16="") if config.precision == "fp8" else config
    stepper_of(every, vocab_size, graphs=False).begin(0)  # launches every GEMM of a step
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    for line in tune.tune(list(cublaslt.PLANS), path):
        print(line, flush=True)
    if config.precision == "fp8":
        kept = []
        for line in slower_in_fp8(every, vocab_size, kept):
            print(line, flush=True)
        from handgrad.joins.fp8.cuda.linear import keep_bf16_key

        key = keep_bf16_key(config.micro_batch * config.sequence_length, config.channels)
        decided = cublaslt.read_table(path, "keep_bf16") | {key: ",".join(kept)}
        tune.write_table(path, cublaslt.read_table(path, "algorithms"), decided)
    use = "runs with these shapes use it from now on (their bits change)"
    print(f"wrote {path}; {use if path == cublaslt.user_table() else f'copy it to {cublaslt.user_table()} to use it'}")
    return 0


def stepper_of(config: RunConfig, vocab_size: int, *, graphs: bool) -> TrainStep:
    state, scaling = allocate(set_up(config, vocab_size))
    return bind(state, scaling, feed=NoFeed(), graphs=graphs).stepper


def slower_in_fp8(config: RunConfig, vocab_size: int, kept: list[str]) -> Iterator[str]:
    """Appends to `kept` the parts of a block whose GEMMs make a whole step slower in fp8 than in bf16."""
    all_fp8 = micro_step_milliseconds(config, vocab_size)
    yield f"{'a step with all GEMMs in fp8':<52} {all_fp8:9.2f} ms"
    for part in config.shape(vocab_size).fp8_parts:
        without = micro_step_milliseconds(replace(config, fp8_keep_bf16=part), vocab_size)
        if without < all_fp8 * (1 - NOISE):
            kept.append(part)
        yield f"{f'the same with {part} in bf16':<52} {without:9.2f} ms  {'bf16' if part in kept else 'fp8'}"


def micro_step_milliseconds(config: RunConfig, vocab_size: int) -> float:
    """The length of a micro-batch, forward and backward, under sustained load."""
    torch.cuda.empty_cache()
    stepper = stepper_of(config, vocab_size, graphs=True)
    stepper.step(0)
    (micro_step,) = stepper.micro_step
    micro_step()  # captured
    return 1e3 * seconds_of(torch.device("cuda"), micro_step, SUSTAINED_SECONDS, burst=20)
