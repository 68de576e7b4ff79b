"""The same run, from the same weights, in several precisions and by the twin: how far do the losses drift apart?

Every contender starts from handgrad's initial weights and sees the same batches under the same schedule. handgrad in
float32 is the measure; the twin's distance from it is the price of bf16 for anyone.

    handgrad bench loss --data shards/shakespeare
"""

import dataclasses
import sys
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.contenders import HandgradRun, Settings, TwinRun, known_names, tokens_of
from benchmarks.record import write_record
from benchmarks.turns import Peer, PeerFailed, Run, answers, excuses, note, say
from benchmarks.twin_switches import Switches
from handgrad.errors import UsageError
from handgrad.machine import devices

# name: (backend, precision) of handgrad
HANDGRADS = {
    "handgrad-fp32": ("reference", "fp32"),
    "handgrad-fp32-kernels": ("kernels", "fp32"),
    "handgrad-bf16": ("auto", "bf16"),
    "handgrad-bf16-reference": ("reference", "bf16"),
}
TWINS = {
    "twin-flash": Switches(attention="flash"),
    "twin-cudnn": Switches(attention="cudnn"),
    "twin-fp32": Switches(attention="plain", autocast=False, tf32=False),
}
MEASURE = "handgrad-fp32"
DEFAULT_CONTENDERS = "handgrad-fp32,handgrad-bf16,twin-cudnn"

LATE = 20  # the last steps, averaged


def make_run(name: str, settings: Settings) -> Run:
    """A contender, in its own process."""
    config, tokens = settings.config(), tokens_of(settings)
    if name in TWINS:
        switches = dataclasses.replace(TWINS[name], compiled=config.device == "cuda")
        return TwinRun(config, tokens, switches, same_weights=True)
    backend, precision = HANDGRADS[name]
    return HandgradRun(dataclasses.replace(config, precision=precision), tokens, backend=backend)


def curve(name: str, settings: Settings) -> list[float]:
    """The loss of every step of a contender, from a process of its own; raises `PeerFailed`."""
    peer = Peer(name, [sys.executable, "-m", "benchmarks.gpu_loss", name, settings.to_json()])
    try:
        return peer.answer()["losses"]
    finally:
        peer.close()


def differences(losses: list[float], measure: list[float]) -> dict[str, float]:
    """The distance of a curve from the measure's, in nats: the largest and the mean of a step, the first step's, and the
    difference of the means over the last steps (which keeps its sign)."""
    distances = [abs(a - b) for a, b in zip(losses, measure, strict=True)]
    return {
        "first": distances[0],
        "largest": max(distances),
        "mean": fmean(distances),
        "late_mean": fmean(losses[-LATE:]) - fmean(measure[-LATE:]),
    }


def table(curves: dict[str, list[float]], measure: str) -> list[str]:
    """The lines to print, in nats."""
    lines = [f"{'':<26}{'first':>10}{'last':>10}{'late mean':>11}   from {measure}: first, largest, mean, late mean"]
    for name, losses in curves.items():
        found = differences(losses, curves[measure])
        numbers = "" if name == measure else "".join(f"{value:>11.2e}" for value in found.values())
        lines.append(f"{name:<26}{losses[0]:>10.5f}{losses[-1]:>10.5f}{fmean(losses[-LATE:]):>11.5f}   {numbers}".rstrip())
    return lines


def plot(curves: dict[str, list[float]], measure: str, path: Path) -> None:
    """Above, the curves; below, their distance from the measure's, in log scale."""
    from matplotlib.figure import Figure  # here: the contenders' processes draw nothing

    figure = Figure(figsize=(8, 7), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True)
    for index, (name, losses) in enumerate(curves.items()):
        steps = range(1, len(losses) + 1)
        above.plot(steps, losses, label=name, linewidth=1.2, color=f"C{index}")
        if name != measure:
            distances = [abs(a - b) for a, b in zip(losses, curves[measure], strict=True)]
            below.plot(steps, distances, label=f"|{name} - {measure}|", linewidth=0.9, color=f"C{index}")
    above.set_ylabel("loss, nats per token")
    below.set_ylabel("distance, nats per token")
    below.set_xlabel("step")
    below.set_yscale("log")
    for axes in (above, below):
        axes.grid(alpha=0.3)
        if axes.lines:
            axes.legend(frameon=False)
    figure.savefig(path, dpi=120)


def check_contenders(text: str) -> list[str]:
    """The names in a comma-separated list, at least two; raises `UsageError` for an unknown one."""
    known = [*HANDGRADS, *TWINS]
    names = known_names(text, known)
    if len(set(names)) < 2:
        raise UsageError(f"--contenders needs two names to compare, found {text!r}; known: {', '.join(known)}")
    return names


def compare(settings: Settings, contenders: str, out: str) -> dict[str, list[float]]:
    """Makes the runs one after the other, prints the table, writes `out` (JSON) and a plot beside it if `out` is not
    empty; returns the curves."""
    names = check_contenders(contenders)
    device = devices.resolve_device(settings.device)
    tokens = tokens_of(settings)
    curves: dict[str, list[float]] = {}
    failed: dict[str, str] = {}
    for name in names:
        try:
            curves[name] = curve(name, settings)
            note(f"{name}: loss {curves[name][0]:.4f} to {curves[name][-1]:.4f}")
        except PeerFailed as failure:
            failed[name] = str(failure)
            note(f"{name}: {failure}")
    if not curves:
        raise UsageError(f"no contender could run: {'; '.join(f'{name}: {why}' for name, why in failed.items())}")
    measure = MEASURE if MEASURE in curves else next(iter(curves))
    print(
        f"\n{settings.model}, {settings.steps} steps of {settings.micro_steps} x {settings.micro_batch} x"
        f" {settings.sequence_length} tokens ({tokens.words}), {devices.describe(device)}; nats per token, late mean: of"
        f" {LATE} steps\n"
    )
    print("\n".join([*table(curves, measure), *(f"{name:<26} failed: {why}" for name, why in failed.items())]))
    if out:
        distances = {name: differences(losses, curves[measure]) for name, losses in curves.items() if name != measure}
        content: dict[str, Any] = {"measure": measure, "differences": distances, "failed": failed}
        rounded = {name: [round(loss, 6) for loss in losses] for name, losses in curves.items()}
        described = dataclasses.asdict(settings)
        write_record(out, device, settings=described, tokens=tokens.words, **content, curves=rounded)
        picture = Path(out).with_suffix(".png")
        plot(curves, measure, picture)
        print(f"written    {picture}")
    return curves


def contend(name: str, settings: Settings) -> None:
    """A contender's process: all steps at once, one answer."""

    def more(launched: int) -> bool:
        if launched % 50 == 0:
            note(f"{name}: step {launched} of {settings.steps}")
        return launched < settings.steps

    pipe = answers()
    with excuses(pipe):
        say(pipe, {"losses": make_run(name, settings).turn(more)})


if __name__ == "__main__":
    contend(sys.argv[1], Settings.from_json(sys.argv[2]))
