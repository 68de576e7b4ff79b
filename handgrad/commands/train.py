"""handgrad train: trains the run in --out, or resumes it; --gpus and --ranks start processes, --restarts restarts them."""

import itertools
import os
import shlex
from argparse import Namespace
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from handgrad.errors import UsageError
from handgrad.evaluation.outcome import FALLING, OVERFITTED, Outcome
from handgrad.joins.parallel.launchers import find_rank_info
from handgrad.joins.parallel.local import command_line, end_with_launcher, is_launched, run_ranks, supervise
from handgrad.machine import devices, threads
from handgrad.run.console import LABEL_WIDTH, output_wrap
from handgrad.run.open import open_run
from handgrad.settings.config import check
from handgrad.storage import checkpoint
from handgrad.storage.run_files import REPORT_FILE


def run(parsed: Namespace) -> int:
    config, ranks = parsed.run_config, checked_ranks(parsed)
    if (ranks > 1 or parsed.restarts) and not is_launched():
        check(config)  # else `open_run` does
        return supervise(partial(launch, parsed, ranks), partial(saved_step, Path(config.out)), parsed.restarts or 0)
    end_with_launcher()
    with open_run(config, allow_changes=parsed.allow_changes, strict=parsed.strict) as run:
        if parsed.epochs:
            run.log.line(f"epochs     {parsed.epochs:g} epochs = {config.steps:,} steps")
        run.begin()
        run.advance(config.steps)
        uses = "chat" if run.dataset.is_chat else "sample"
        uses = "prepare --images FOLDER --codes" if run.design.shape.network.pictures else uses
    if find_rank_info(os.environ).rank:
        return 0  # rank 0 logs
    print(f"report     {write_report([Path(config.out)], Path(config.out) / REPORT_FILE)}")
    print(output_wrap(LABEL_WIDTH).feed(f"next       {next_step(parsed, run.outcome, uses)}", ends=True))
    return 0


def next_step(parsed: Namespace, outcome: Outcome | None, uses: str) -> str:
    """The commands for a finished run, of which `uses` is the first without the model, or the flags of its outcome."""
    out, advice, kind = parsed.run_config.out, [*outcome.advice] if outcome else [], outcome.kind if outcome else ""
    model = shlex.quote(f"{out}/best" if kind == OVERFITTED and not advice else out)
    if not advice:
        return f"handgrad {uses} {model}   or   handgrad evaluate {model}"
    if parsed.epochs and advice[0] == "--steps":
        advice[:2] = "--epochs", f"{parsed.epochs * int(advice[1]) / parsed.run_config.steps:g}"
    if "--allow-changes" not in advice:  # a new run
        advice += "--out", next(name for number in itertools.count(2) if not Path(name := f"{out}-{number}").exists())
    again = f"the same command with {shlex.join(advice)}"
    return f"handgrad {uses} {model}   or   {again}" if kind in (FALLING, OVERFITTED) else again


def write_report(runs: Sequence[Path], out: Path) -> Path:
    """The page `out` about the run folders `runs`, as `page.write_report` writes it."""
    from handgrad.reports import page  # imports matplotlib, which only rank 0 needs, after the steps

    return page.write_report(runs, out)


def saved_step(run: Path) -> int:
    """The step of the newest checkpoint, -1 without one."""
    newest = checkpoint.peek(run)
    return checkpoint.step_of(newest[0]) if newest else -1


def launch(parsed: Namespace, ranks: int, received: list[int]) -> int:
    """Starts this command as `ranks` processes, in the environment that this process was started in; returns their exit
    code. Appends the forwarded signals to `received`."""
    command, environment = command_line("train", *parsed.arguments), threads.environment_before()
    return run_ranks(command, ranks, environment, parsed.run_config.silence_seconds + 5, received)


def checked_ranks(parsed: Namespace) -> int:
    """The number of processes to start. Raises `UsageError` if there are too few GPUs, or another launcher started it."""
    config, ranks = parsed.run_config, parsed.gpus or parsed.ranks or 1
    if parsed.gpus and parsed.ranks:
        raise UsageError("--gpus and --ranks mean the same; give one of them")
    if (ranks > 1 or parsed.restarts) and not is_launched() and (info := find_rank_info(os.environ)).size > 1:
        raise UsageError(f"{info.launcher} has started {info.size} processes; leave --gpus, --ranks and --restarts out")
    if parsed.gpus and config.device not in ("auto", "cuda"):
        raise UsageError(f"--gpus is for GPUs, found --device {config.device}; use --ranks {ranks}")
    on_gpus = parsed.gpus or (ranks > 1 and config.device in ("auto", "cuda") and devices.gpu_count())
    if on_gpus and ranks > (gpu_count := devices.gpu_count()):
        flag = "--gpus" if parsed.gpus else "--ranks"
        remedy = f"use {flag} {gpu_count}" if gpu_count else f"use --ranks {ranks} --device cpu"
        raise UsageError(f"{flag} {ranks} needs {ranks} GPUs, torch finds {gpu_count} on this machine; {remedy}")
    return ranks
