"""The time of a step by kernel type, compared with the peak rates of this machine's memory and tensor cores.

Torch's profiler records launches and times in a separate pass without CUDA graphs: each operation runs inside a named range
(`recorder`), and a kernel belongs to the innermost range around its launch on the host. The wall time of a step comes from
steps as `handgrad train` makes them.
"""

import math
import os
import tempfile
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from torch import Tensor

import handgrad
from handgrad.evaluation.load import check_available
from handgrad.format import human_count
from handgrad.machine import devices, power
from handgrad.run.assemble import assemble, bind
from handgrad.run.checks import check_offload
from handgrad.run.resolve import resolve, with_precision, with_tuned_gemms
from handgrad.settings.config import RunConfig
from handgrad.tools.recorder import Recorder, Spent, read_trace, spent_on_cpu, spent_on_gpu
from handgrad.tools.speeds import copy_bandwidth, gemm_flops
from handgrad.training.design import Design
from handgrad.training.feed import Source
from handgrad.training.step import StepResult, TrainStep

WARMUP_STEPS = 3
HOT_SECONDS = 3.0  # of steps on a GPU before each measurement, so that its clock falls to what the power limit allows


class MadeUpTokens:
    """Random tokens that repeat about as often as words do: word k at a rate of about 1 / k."""

    def __init__(self, vocab_size: int, seed: int):
        self.vocab_size, self.generator = vocab_size, np.random.default_rng(seed)

    def fill(self, inputs: Tensor, targets: Tensor, first_sample: int, document_starts: Tensor | None = None) -> None:
        """Fills in random tokens; in a packed run, a row is one document."""
        if document_starts is not None:
            document_starts.zero_()
        drawn = np.exp(self.generator.random(inputs.numel() + 1) * np.log(self.vocab_size + 1)) - 1
        tokens = drawn.astype(np.int64).clip(0, self.vocab_size - 1)
        inputs.numpy()[:] = tokens[:-1].reshape(inputs.shape)
        targets.numpy()[:] = tokens[1:].reshape(inputs.shape)


def set_up(config: RunConfig, vocab_size: int) -> Design:
    """The design of a run on one process; raises `DataError` if it does not fit."""
    device = devices.resolve_device(config.device)
    check_offload(config, device, 1)
    config = with_tuned_gemms(with_precision(config, device), device)
    design = resolve(config, vocab_size, device=device)
    design.plain_ops.check_sizes(**design.shape.kernel_sizes)
    advice = "`handgrad plan` shows what takes it, and the --micro-batch that fits"
    check_available(design.plan.total_bytes, device, "the run", advice)
    return design


def make_steps(stepper: TrainStep, first: int, count: int) -> list[StepResult]:
    """Makes `count` steps; returns their results. Launches a step before it reads the previous result, as in training."""
    results = []
    stepper.begin(first)
    for step in range(first, first + count):
        stepper.finish(step)
        if step + 1 < first + count:
            stepper.begin(step + 1)
        results.append(stepper.result(step))
    return results


def profile_run(config: RunConfig, vocab_size: int, source: Source, steps: int, trace: Path | None) -> list[str]:
    """Measures `steps` optimizer steps twice, once as in training and once recorded; returns the lines to print."""
    device = devices.resolve_device(config.device)
    config = with_precision(config, device)
    dtype = devices.dtype_of(device, config.precision)
    devices.set_arithmetic(device, config.precision)
    cuda = device.type == "cuda"
    config = replace(config, schedule="constant", batch_schedule="", skip_loss_z=0.0, skip_norm_z=0.0)
    ceilings = copying, flops = copy_bandwidth(device), gemm_flops(device, dtype, HOT_SECONDS if cuda else 0.1)
    if cuda:
        torch.cuda.empty_cache()
    training = assemble(set_up(config, vocab_size), source)
    stepper, state = training.stepper, training.state
    results = make_steps(stepper, 0, WARMUP_STEPS)
    hot_steps = math.ceil(HOT_SECONDS / results[-1].elapsed_seconds) if cuda else 0
    done = WARMUP_STEPS
    make_steps(stepper, done, hot_steps + 1)
    done += hot_steps + 1
    with power.Sampler(device) as sampler:
        results = make_steps(stepper, done, steps)
    wall_ms = fmean(result.elapsed_seconds for result in results) * 1e3
    done += steps

    recorder = Recorder(training.design, state.plain_weights.head, torch.profiler.record_function)
    stepper = bind(state, training.scaling, source, graphs=False).stepper
    spent, recorded = recorded_steps(stepper, recorder, done, hot_steps + 1, steps, trace)
    per_step = config.micro_steps * max(1, config.lanes)  # one process runs the micro-steps of all lanes
    idle = sum(result.skipped is not None for result in recorded)
    return [
        f"handgrad {handgrad.__version__}, torch {torch.__version__}, {devices.describe(device)}",
        f"run        {config.num_layers} layers, {config.channels} channels, {config.precision}, recompute"
        f" {config.recompute}; {per_step} micro-steps of {config.micro_batch} x {config.sequence_length} tokens",
        f"ceilings   {rate_text(copying, copying, 'B')} by a copy of 2 GB, {rate_text(flops, flops, 'FLOP')} by a large"
        f" {'bf16' if config.precision == 'fp8' else config.precision} product under load"
        + ("" if cuda else " (smaller ones on a CPU)"),
        f"recorded   launches and ms: {steps} steps without CUDA graphs; wall time: {steps} steps as in training",
        *([f"           {idle} of the recorded steps made no update, so their AdamW did nothing"] if idle else []),
        *power_lines(sampler.summary),
        "",
        *table(spent, recorder, steps * per_step, per_step, wall_ms, ceilings),
        "",
        f"{human_count(config.tokens_per_step / wall_ms * 1e3)} tokens/s",
        *([f"trace      {trace} (open it at ui.perfetto.dev)"] if trace else []),
    ]


def recorded_steps(
    stepper: TrainStep, recorder: Recorder, first: int, warmup_steps: int, steps: int, trace: Path | None
) -> tuple[dict[str, Spent], list[StepResult]]:
    """(time by kernel type, results) of `steps` steps without CUDA graphs. Before them it makes step `first`, while the
    recorder counts the work, and `warmup_steps` more. `trace`: the file for the profiler's trace."""
    device = stepper.design.device
    cuda, activity = device.type == "cuda", torch.profiler.ProfilerActivity
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # at lower levels, torch 2.13's profiler prints two lines of its own
    with recorder.recording(), tempfile.TemporaryDirectory() as folder:
        recorder.counting = True
        make_steps(stepper, first, 1)
        recorder.counting = False
        activities = [activity.CPU, *([activity.CUDA] if cuda else [])]
        once = torch.profiler.schedule(wait=0, warmup=1, active=1)  # a GPU cools down while the profiler starts
        with torch.profiler.profile(activities=activities, schedule=once) as profiler:
            make_steps(stepper, first + 1, warmup_steps)
            profiler.step()
            results = make_steps(stepper, first + 1 + warmup_steps, steps)
            devices.synchronize(device)
        path = trace or Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = read_trace(path)
    return spent_on_gpu(events) if cuda else spent_on_cpu(events), results


def power_lines(summary: dict[str, Any] | None) -> list[str]:
    """Power and clock while the steps ran as in training."""
    if not summary or not summary["watts"] or not summary["sm_megahertz"]:
        return []
    held = ", ".join(f"{word} in {share:.0%}" for word, share in summary["throttle"].items()) or "nothing"
    watts, clock = summary["watts"]["mean"], summary["sm_megahertz"]["mean"]
    return [f"GPU        {watts:.0f} W and {clock:.0f} MHz in the mean of the timed steps, held back by {held}"]


def table(
    spent: dict[str, Spent],
    recorder: Recorder,
    micro_steps: int,
    per_step: int,
    wall_ms: float,
    ceilings: tuple[float, float],
) -> list[str]:
    """A row per kernel type, longest first, with means over `micro_steps` recorded micro-steps, `per_step` per step."""
    wall = wall_ms / per_step
    head = f"{'per micro-step':<32}{'launches':>9}{'ms':>10}{'share':>8}{'counted':>17}{'achieved':>18}{'of ceiling':>12}"
    lines = [head]
    for kind, row in sorted(spent.items(), key=lambda item: -item[1].microseconds):
        ms = row.microseconds / 1e3 / micro_steps
        line = f"{kind:<32}{row.launches / micro_steps:>9.4g}{ms:>10.3f}{ms / wall:>8.1%}"
        work = recorder.counted.get(kind, 0) / per_step
        if work and ms > 0:
            in_flops, rate = kind in recorder.in_flops, work / ms * 1e3
            amount = f"{work / 1e9:.4g} GFLOP" if in_flops else f"{work / 1e6:.4g} MB"
            speed = rate_text(rate, ceilings[in_flops], "FLOP" if in_flops else "B")
            line += f"{amount:>17}{speed:>18}{rate / ceilings[in_flops]:>12.1%}"
        lines.append(line)
    total = sum(row.microseconds for row in spent.values()) / 1e3 / micro_steps
    launches = sum(row.launches for row in spent.values()) / micro_steps
    return [
        *lines,
        f"{'sum of kernels':<32}{launches:>9.4g}{total:>10.3f}{total / wall:>8.1%}",
        f"{'wall time':<41}{wall:>10.3f}    a step takes {wall_ms:.2f} ms: {per_step} micro-steps and its update",
        f"{'gap':<41}{wall - total:>10.3f}{1 - total / wall:>8.1%}"
        + ("    below 0: recording takes time itself" if total > wall else ""),
    ]


def rate_text(rate: float, ceiling: float, unit: str) -> str:
    """(4.1e9, 5.1e10, "FLOP") -> '4.1 GFLOP/s': in billions per second if the ceiling is below a tenth of a trillion."""
    size, prefix = (1e12, "T") if ceiling >= 1e11 else (1e9, "G")
    return f"{rate / size:.3g} {prefix}{unit}/s"
