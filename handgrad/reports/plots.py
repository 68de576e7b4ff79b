"""The plots of a report, as functions that draw into an axes. `drawing` writes them to files."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from handgrad.reports.results import Run, TaskFigure, envelope, measure_of, short_text, smooth, thin, tokens_at

# Name: (light, dark). `drawing` draws in the light colours and replaces each with `var(--name)` in the page, so a plot
# follows the reader's colour scheme. All light colours must therefore differ.
PALETTE = {
    "page": ("#fcfcfa", "#16181b"),
    "card": ("#f3f3ef", "#1e2125"),
    "line": ("#dcdcd5", "#34383e"),
    "ink": ("#22252a", "#e4e4e0"),
    "faint": ("#666b73", "#9aa0a8"),
    "floor": ("#7d828a", "#8b9199"),
    "warning": ("#b3261e", "#ff8a80"),
    "run0": ("#2364aa", "#6fb1f5"),
    "run1": ("#bd5208", "#ff9d52"),
    "run2": ("#034e21", "#acefd1"),
    "run3": ("#612c77", "#62946c"),
    "run4": ("#b8338a", "#f4a5ec"),
    "run5": ("#687c02", "#73d41d"),
    "run6": ("#75170e", "#fb4165"),
    "run7": ("#1f19b1", "#aa64c7"),
}
RUN_COLORS = 8
# Four runs share a dash: readers who see few hues tell four colours apart, not eight. So 16 runs differ.
DASHES = ((), (5, 2), (1.3, 1.5), (6, 1.6, 1.3, 1.6))
FEW_RUNS = 6  # more names than these do not fit beside a small plot
RAW_BINS = 500  # of a raw curve in a plot of one run: finer than the screen shows
LLMC_FINEWEB = 3.272  # validation loss, nats per token, of llm.c's published GPT-2 124M on 10B tokens of FineWeb
RUN_LINE, NAME, LEADER = "run-", "name-", "leader-"  # marks on a run's line, its name, the line between; its index follows
MARKS = 150  # validation points or skip marks per run
HEADLINES = ("acc_norm", "acc_norm_llmc", "acc")  # the plot shows the first of these that a task has
NAMED_CLASSES = 6  # of fp8 tensors in a plot's legend
CLOSE_UP_STEPS = 50  # shorter runs need no close-up

Style = dict[str, Any]
Values = Sequence[float] | np.ndarray


@dataclass(frozen=True)
class Plot:
    """One figure. `name` goes into the file name, `title` into the figure, `caption` below it in the page."""

    name: str
    title: str
    caption: str
    wide: bool
    draw: Callable[[Axes, Sequence[Run]], None]
    section: str = "Curves"  # of the page


def choose_plots(runs: Sequence[Run]) -> list[Plot]:
    """The plots that these runs have data for, in reading order."""
    dots = " Dots: validation." if any(run.validations for run in runs) else ""
    floor = " Dashed: entropy of the source, which no model can beat." if floors(runs) else ""
    crosses = " Crosses: skipped updates." if any(run.skipped for run in runs) else ""
    of_teacher = " Training: the divergence from a teacher." if any(run.start.teacher for run in runs) else ""
    caption = "Thin: every step. Thick: running mean." + of_teacher + dots + floor
    units = {measure_of(run)[0] for run in runs}
    plots = [Plot("loss", f"Loss, {units.pop() if len(units) == 1 else 'nats per token'}", caption, True, draw_loss)]
    if all(len(run.steps.step) >= CLOSE_UP_STEPS for run in runs):
        caption = "The same, without the fall of the first fifth."
        plots.append(Plot("loss_close_up", "Loss, close-up", caption, True, draw_loss_close_up))
    if len({run.start.batch for run in runs if not run.is_log}) > 1:
        caption = "The same curves by tokens seen, because the runs take steps of different sizes."
        draw = partial(draw_loss, by_tokens=True)
        plots.append(Plot("loss_by_tokens", "Loss against tokens seen", caption, True, draw))
    speed, step_time = (partial(draw_quantity, of="steps", quantity=name) for name in ("tokens_per_second", "step_ms"))
    rates = partial(draw_values, of=lambda run: envelope(run.steps.step, run.steps.learning_rate, RAW_BINS // 2))
    plots += [
        Plot("gradient_norm", "Gradient norm", "Before clipping, log scale." + crosses, False, draw_norm),
        Plot("learning_rate", "Learning rate", "As scheduled.", False, rates),
        Plot("tokens_per_second", "Tokens per second", "Thick: running median.", False, speed),
        Plot("step_time", "Milliseconds per step", "Rare peaks may pass the top.", False, step_time),
    ]
    columns: tuple[tuple[Literal["gpu", "rollouts"], str, str, str], ...] = (
        ("rollouts", "reward", "Reward", "Mean of a step's answers."),
        ("rollouts", "answer_tokens", "Tokens per answer", "Mean of a step's answers."),
        ("rollouts", "entropy", "Entropy, nats per token", "Of the sampled tokens, an estimate."),
        ("gpu", "watts", "GPU power, watts", "Of the board, in the last second before the reading."),
        ("gpu", "sm_megahertz", "GPU clock, MHz", "Of the multiprocessors. It falls where the power limit holds it back."),
    )
    for of, quantity, title, caption in columns:
        if any(np.isfinite(getattr(getattr(run, of), quantity)).any() for run in runs):
            draw = partial(draw_quantity, of=of, quantity=quantity)
            plots.append(Plot(f"{of.removesuffix('s')}_{quantity}", title, caption, False, draw))
    if any(len(divergences(run)[0]) for run in runs):
        draw, caption = partial(draw_values, of=divergences, marker="."), "Nats per token, at each validation."
        plots.append(Plot("rollout_kl", "KL divergence from the start", caption, False, draw))
    if any(len(figures) > 1 for run in runs for figures in headline_figures(run).values()):
        caption = "Of each task acc_norm, else acc. Bars: a standard error."
        plots.append(Plot("tasks", "Accuracy on tasks", caption, True, draw_tasks, "Tasks"))
    if any(classes for run in runs for _, classes in run.fp8):
        of = "Worst layer of each class of tensors." if len(runs) == 1 else "Worst tensor of each run."
        plots += [
            Plot(f"fp8_{quantity}", title, f"{caption} {of}", False, partial(draw_fp8, quantity=quantity), "fp8")
            for quantity, title, caption in (
                ("vanished", "Vanished numbers, percent", "Too small for their scale: they became zero."),
                ("clipped", "Clipped numbers, percent", "Too large for their scale: they became the largest number."),
            )
        ]
    return plots


# Axes, styles and names.


def light(name: str) -> str:
    return PALETTE[name][0]


def run_style(index: int) -> Style:
    """Colour and dash of the run at `index`."""
    dash = dash_of(index)
    return {"color": light(f"run{index % RUN_COLORS}"), "linestyle": (0, dash) if dash else "solid"}


def dash_of(index: int) -> tuple[float, ...]:
    """The lengths of strokes and gaps of the run at `index`, in widths of its line; empty if solid."""
    return DASHES[index // 4 % len(DASHES)]


def label(name: str) -> str:
    """A run's name for a legend: short, without matplotlib's formulas ($) and its "do not show" mark (leading _)."""
    name = "".join(c if c.isprintable() else "?" for c in shortened(name, 34)).replace("$", r"\$")
    return f" {name}" if name.startswith("_") else name


def shortened(name: str, most: int) -> str:
    """At most so many characters of a name: it loses its middle, since the ends of runs' names tell them apart."""
    return name if len(name) <= most else f"{name[: most // 2 - 2]}…{name[most // 2 - most - 1 :]}"


def name_end(axes: Axes, name: str, x: Values, y: Values, color: str, index: int | str) -> None:
    """Writes a curve's name beside its last finite point, right of the plot; `drawing` finds its height."""
    if len(known := np.flatnonzero(np.isfinite(y))):
        where: Style = {"xytext": (1.018, 0.5), "textcoords": "axes fraction", "va": "center", "annotation_clip": False}
        axes.annotate(label(name), (x[known[-1]], y[known[-1]]), color=color, gid=f"{NAME}{index}", **where)


def show_steps_to(axes: Axes, end: float) -> None:
    axes.set_xlim(-0.015 * end, 1.015 * end)


def show_values_as(axes: Axes, form: Callable[[float], str] = "{:g}".format) -> None:
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: form(value)))


def tick_sparsely(axes: Axes, count: int) -> None:
    """Puts ticks at a few whole numbers along x; labels large ones in thousands and millions."""
    axes.xaxis.set_major_locator(MaxNLocator(count, integer=True, steps=[1, 2, 2.5, 5, 10]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: short_text(value)))


def run_mark(index: int) -> Style:
    """Marks a line as belonging to the run at `index`, so that the page's script finds it."""
    return {"gid": f"{RUN_LINE}{index}"}


def draw_curve(
    axes: Axes, x: np.ndarray, y: np.ndarray, index: int, runs: Sequence[Run], average: Callable = np.median, name: str = ""
) -> None:
    """Draws the raw curve thin and pale, and its running `average` on top: by default the median, which smears no spikes.

    The page shows the average's values under the pointer, labelled `name` or, without one, by the run's name."""
    bins = max(60, RAW_BINS // len(runs))  # so the file does not grow with the number of runs
    style: Style = {**run_style(index), **run_mark(index), "label": label(name or runs[index].name)}
    axes.plot(*envelope(x, y, bins), color=style["color"], alpha=0.28, linewidth=0.6, **run_mark(index))
    picked = thin(len(y), bins)
    curve = smooth(y, smoothing(len(y)), picked, average)
    axes.plot(x[picked], curve, linewidth=1.5, **style)
    if name or len(runs) > 1:
        name_end(axes, name or runs[index].name, x[picked], curve, style["color"], index)
    # All steps, even if their values are not finite: the axis shows how long a diverged run went on.
    show_steps_to(axes, max(float(x[-1]), axes.get_xlim()[1] / 1.015, 1.0))


def smoothing(steps: int) -> int:
    """The number of neighbours on each side in a running average."""
    return max(2, steps // 100)


# Loss.


def floors(runs: Sequence[Run]) -> list[float]:
    """The known entropies of the runs' sources (nats per token), each once."""
    return sorted({run.start.floor_nats_per_token for run in runs if math.isfinite(run.start.floor_nats_per_token)})


def on_fineweb(run: Run) -> bool:
    """True if the shards hold FineWeb in GPT-2's tokens, so that the loss is comparable with llm.c's."""
    dataset = run.start.data.source.split(":")[0]
    return dataset in ("fineweb", "HuggingFaceFW/fineweb") and run.start.data.tokenizer == "gpt2"


def draw_loss(axes: Axes, runs: Sequence[Run], *, by_tokens: bool = False) -> None:
    """Training and validation loss over the steps, or over the tokens."""
    for index, run in enumerate(runs):
        if by_tokens and run.is_log:
            continue
        x_of = partial(tokens_at, run) if by_tokens else np.asarray
        name = "training" if len(runs) == 1 else run.name
        draw_curve(axes, x_of(run.steps.step), run.steps.loss, index, runs, np.mean, name)
        if len(picked := thin(len(run.validations), MARKS)):
            points = np.array(run.validations, dtype=float)[picked]
            points[~np.isfinite(points)] = np.nan
            # One run: the second colour tells validation from training. Several: the colour tells the runs apart.
            color = light("run1") if len(runs) == 1 else run_style(index)["color"]
            size = 4.6 if len(runs) <= FEW_RUNS else 3.2
            dots: Style = {"color": color, "marker": "o", "markersize": size, "linewidth": 0.9, "zorder": 4}
            dots |= {"markeredgecolor": light("page"), "markeredgewidth": 0.7}
            name = "validation" if len(runs) == 1 else f"{run.name}, validation"
            x = x_of(points[:, 0])
            axes.plot(x, points[:, 1], label=label(name), **run_mark(index), **dots)
            if len(runs) == 1:
                name_end(axes, name, x, points[:, 1], color, index)
    dashed: Style = {"color": light("floor"), "linewidth": 1.0, "linestyle": (0, (4, 3))}
    for floor in floors(runs):
        axes.axhline(floor, zorder=1.5, **dashed)
        name_end(axes, f"source entropy, {floor:.3f}", [axes.get_xlim()[1]], [floor], light("faint"), "")
    if any(on_fineweb(run) for run in runs):
        dotted: Style = {**dashed, "linestyle": (0, (1, 2))}
        axes.axhline(LLMC_FINEWEB, zorder=1.5, **dotted)
        name_end(axes, f"llm.c's GPT-2 124M, {LLMC_FINEWEB}", [axes.get_xlim()[1]], [LLMC_FINEWEB], light("faint"), "")
    limit_loss(axes, runs)
    if by_tokens:
        axes.set_xlabel("tokens")


def draw_loss_close_up(axes: Axes, runs: Sequence[Run]) -> None:
    """Draws the losses from the lowest value up to the running mean after a fifth of the run."""
    draw_loss(axes, runs)
    lows, tops = floors(runs), []
    for run in runs:
        fifth = len(run.steps.loss) // 5
        picked = np.arange(fifth, len(run.steps.loss), max(1, fifth // 50))
        if np.isfinite(means := smooth(run.steps.loss, smoothing(len(run.steps.loss)), picked)).any():
            lows.append(float(np.nanmin(means)))
            tops.append(float(means[np.isfinite(means)][0]))
    if tops and (room := max(tops) - min(lows)) > 0:
        axes.set_ylim(min(lows) - 0.08 * room, max(tops) + 0.05 * room)


def limit_loss(axes: Axes, runs: Sequence[Run]) -> None:
    """Cuts the top of the plot if a few steps of a diverging run would flatten everything else."""
    tops = []
    for run in runs:
        if len(finite := run.steps.loss[np.isfinite(run.steps.loss)]):
            tops.append(min(finite.max(), 1.3 * max(finite[0], np.quantile(finite, 0.98))))
    bottom, top = axes.get_ylim()
    if tops and max(tops) > bottom:
        axes.set_ylim(bottom, min(top, max(tops) + 0.04 * (max(tops) - bottom)))


# The other curves of a step.


def draw_norm(axes: Axes, runs: Sequence[Run]) -> None:
    drawn = False
    for index, run in enumerate(runs):
        norm = np.where(np.isfinite(run.steps.norm) & (run.steps.norm > 0), run.steps.norm, np.nan)
        drawn = drawn or not np.isnan(norm).all()
        draw_curve(axes, run.steps.step, norm, index, runs)
        skipped = np.isin(run.steps.step, list(run.skipped))
        picked = np.flatnonzero(skipped)[thin(int(skipped.sum()), MARKS)]
        color = light("warning") if len(runs) == 1 else run_style(index)["color"]
        cross: Style = {"color": color, "marker": "x", "markersize": 4.5, "markeredgewidth": 1.2, "linestyle": "none"}
        known = picked[~np.isnan(norm[picked])]
        cross |= run_mark(index)
        axes.plot(run.steps.step[known], norm[known], zorder=4, **cross)
        # A norm that is not finite has no height: its cross goes to the upper edge.
        edge = picked[np.isnan(norm[picked])]
        axes.plot(run.steps.step[edge], np.full(len(edge), 0.97), transform=axes.get_xaxis_transform(), **cross)
    clips = {run.config.get("clip_norm") for run in runs}
    if len(clips) == 1 and isinstance(clip := clips.pop(), int | float) and clip > 0:
        axes.axhline(clip, color=light("floor"), linewidth=0.9, linestyle=(0, (1, 2)), zorder=1.5)
        style: Style = {"ha": "right", "color": light("faint"), "fontsize": 7}
        offset = {"xytext": (0, 2.5), "textcoords": "offset points"}
        axes.annotate(f"clipped at {clip:g}", (0.99, clip), xycoords=("axes fraction", "data"), **offset, **style)
        drawn = True
    if drawn:
        axes.set_yscale("log")
        low, high = axes.get_ylim()
        # Within one decade, powers of ten alone would label the axis with a single number.
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0,) if high / low > 300 else (1.0, 2.0, 5.0)))
        show_values_as(axes)
        axes.yaxis.set_minor_formatter(NullFormatter())


def draw_values(axes: Axes, runs: Sequence[Run], *, of: Callable[[Run], tuple[Values, Values]], marker: str = "") -> None:
    """Draws `of(run)`, steps and values, from zero and without an average."""
    for index, run in enumerate(runs):
        style: Style = {**run_style(index), **run_mark(index), "linewidth": 1.5, "label": label(run.name)}
        if len((curve := of(run))[0]):
            axes.plot(*curve, marker=marker, **style)
            if len(runs) > 1:
                name_end(axes, run.name, *curve, style["color"], index)
    axes.set_ylim(bottom=0)
    show_values_as(axes)


def divergences(run: Run) -> tuple[Values, Values]:
    """The known divergences of the policy from the first one, in nats a token: few, at validations."""
    known = [(step, kl) for step, (_, _, kl) in run.rewards.items() if math.isfinite(kl)]
    return [step for step, _ in known], [kl for _, kl in known]


def draw_quantity(axes: Axes, runs: Sequence[Run], *, of: Literal["steps", "gpu", "rollouts"], quantity: str) -> None:
    """Draws a column from zero, so that a wobble looks as small as it is, and cuts above 99 % of the values."""
    tops = [0.0]
    for index, run in enumerate(runs):
        steps, values = getattr(run, of).step, getattr(getattr(run, of), quantity)
        if len(steps):
            draw_curve(axes, steps, values, index, runs)
        if len(finite := values[np.isfinite(values)]):
            tops.append(np.quantile(finite, 0.99))
    axes.set_ylim(0, 1.15 * max(tops) or 1)
    show_values_as(axes, short_text)


# Tasks.


def headline_figures(run: Run) -> dict[str, list[tuple[int, TaskFigure]]]:
    """One accuracy metric per task, with its figures by step."""
    figures = {}
    for task in dict.fromkeys(task for task, _ in run.tasks):
        if (metric := next((m for m in HEADLINES if (task, m) in run.tasks), None)) is not None:
            figures[task] = run.tasks[task, metric]
    return figures


def draw_tasks(axes: Axes, runs: Sequence[Run]) -> None:
    """Draws a line per run and task. Colours distinguish the tasks of one run, or several runs."""
    end = 1.0
    for index, run in enumerate(runs):
        for number, (task, figures) in enumerate(headline_figures(run).items()):
            steps = [float(step) for step, _ in figures]
            values, bars = [figure.value for _, figure in figures], [figure.stderr for _, figure in figures]
            name = task if len(runs) == 1 else f"{run.name}: {task}"
            color, dash = run_style(number if len(runs) == 1 else index)["color"], run_style(4 * number)["linestyle"]
            for bar in axes.errorbar(steps, values, bars, fmt="none", ecolor=color, elinewidth=0.6).lines[2]:
                bar.set(**run_mark(index))
            axes.plot(steps, values, marker=".", color=color, linestyle=dash, label=label(name), **run_mark(index))
            name_end(axes, name, steps, values, color, index)
            end = max(end, steps[-1])
    show_steps_to(axes, end)
    show_values_as(axes)


# fp8.


def draw_fp8(axes: Axes, runs: Sequence[Run], *, quantity: str) -> None:
    """Draws from zero. One run: a line per class of tensors, the worst ones named. Several: the worst class of each run."""
    top, end = 0.0, 1.0
    faint: Style = {"color": light("floor"), "alpha": 0.5, "linewidth": 0.7}
    for index, run in enumerate(runs):
        if not (lines := percents(run, quantity)):
            continue
        if len(runs) > 1:
            lines = {"": np.fmax.reduce([*lines.values()])}
        steps = np.array([step for step, _ in run.fp8], dtype=float)
        for number, (name, values) in enumerate(lines.items()):
            largest = float(np.nanmax(values, initial=0.0))
            named = bool(name) and number < NAMED_CLASSES and largest > 0
            style: Style = {"linewidth": 1.3, **run_style(number if name else index)} if named or not name else faint
            marker = "." if len(steps) == 1 else ""
            curve = envelope(steps, values, RAW_BINS // 2)
            shown = label(name or run.name) if named or not name else None
            axes.plot(*curve, marker=marker, label=shown, **run_mark(index), **style)
            if shown:
                name_end(axes, name or run.name, *curve, style["color"], index)
            top = max(top, largest)
        end = max(end, steps[-1])
    show_steps_to(axes, end)
    axes.set_ylim(0, 1.1 * top or 1)
    show_values_as(axes)


def percents(run: Run, quantity: str) -> dict[str, np.ndarray]:
    """The fraction `quantity` in percent at each step of `run.fp8`, by class of tensors, worst class first."""
    lines = {}
    for name in dict.fromkeys(name for _, classes in run.fp8 for name in classes):
        met = [classes.get(name) for _, classes in run.fp8]
        values = [100 * getattr(statistics, f"{quantity}_fraction") if statistics else math.nan for statistics in met]
        lines[name] = np.where(np.isfinite(values), values, math.nan)
    return dict(sorted(lines.items(), key=lambda line: -np.nanmax([*line[1], 0.0])))
