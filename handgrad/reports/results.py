"""A run as plain data for plots and tables, its results as numbers, and numbers as text. NaN stands for unknown, and shows
as a dash."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from handgrad.networks import NETWORKS
from handgrad.networks.vqvae import psnr
from handgrad.settings.batch_schedule import BatchSchedule, parse_schedule

DASH = "–"


@dataclass(frozen=True)
class DataSource:
    """The data of a run."""

    folder: str
    source: str  # as named to `handgrad prepare`; "" if unknown
    identity: str
    tokenizer: str
    train_tokens: float
    validation_tokens: float
    validation_text_bytes: float


@dataclass(frozen=True)
class Start:
    """One launch of a run, the first or a resume: its "run" line. Unknown numbers are NaN, unknown texts empty."""

    time: float  # seconds since 1970
    host: str
    command: str
    commit: str  # of handgrad's checkout
    handgrad: str
    torch: str
    device: str
    precision: str
    parameters: float
    trained_parameters: float
    tokens_per_step: int
    batch_schedule: str
    teacher: str  # its weights, if the training loss is the divergence from one
    steps: int  # planned
    vocab_size: float
    memory_bytes: dict[str, float]
    data: DataSource
    floor_nats_per_token: float
    flops_per_token: float

    @property
    def batch(self) -> BatchSchedule:
        """The tokens of every step."""
        return parse_schedule(self.tokens_per_step, self.batch_schedule)


@dataclass(frozen=True)
class Steps:
    """One array element per step, in order. Non-finite values stay as they are."""

    step: np.ndarray
    loss: np.ndarray  # nats per token
    learning_rate: np.ndarray
    norm: np.ndarray  # of the gradient, before clipping
    step_ms: np.ndarray
    tokens_per_second: np.ndarray
    time: np.ndarray  # seconds since 1970


@dataclass(frozen=True)
class GpuReadings:
    """The GPU's sensors, an element per reading. NaN if the GPU does not report a quantity."""

    step: np.ndarray
    watts: np.ndarray
    sm_megahertz: np.ndarray


@dataclass(frozen=True)
class Pace:
    """The time that ranks spent on their own work, over the steps since the previous such line."""

    step: int
    slowest: int  # rank
    slowest_ms: float  # per step
    median_ms: float


@dataclass(frozen=True)
class Quantized:
    """Statistics of a class of fp8 tensors in one step, the worst of all layers."""

    largest_amax: float
    smallest_scale: float
    largest_scale: float
    clipped_fraction: float  # of the numbers: too large for their scale
    vanished_fraction: float  # of the numbers: became zero
    most_vanished: str  # the tensor with that fraction


@dataclass(frozen=True)
class RolloutFigures:
    """Means over the rollouts of each step that sampled, as columns."""

    step: np.ndarray
    reward: np.ndarray
    answer_tokens: np.ndarray
    entropy: np.ndarray  # nats per token


@dataclass(frozen=True)
class TaskFigure:
    """A metric of a task after a step, with its standard error; NaN where unknown."""

    value: float
    stderr: float
    examples: int


@dataclass(frozen=True, kw_only=True)
class Run:
    """The content of one run folder."""

    name: str
    folder: Path
    config: dict[str, Any]
    starts: list[Start]
    first_steps: list[int | None]  # the first step after each launch, None if it never finished one
    steps: Steps
    skipped: dict[int, str] = field(default_factory=dict)  # step: the reason for skipping its update
    validations: list[tuple[int, float]]  # step, nats per token
    tasks: dict[tuple[str, str], list[tuple[int, TaskFigure]]]  # (task, metric): its figures by step
    samples: list[tuple[int, str]] = field(default_factory=list)
    events: list[tuple[int, str]] = field(default_factory=list)
    gpu: GpuReadings = field(default_factory=lambda: GpuReadings(*np.empty((3, 0))))
    paces: list[Pace] = field(default_factory=list)  # of a run on several ranks
    fp8: list[tuple[int, dict[str, Quantized]]] = field(default_factory=list)  # step, classes of tensors by name
    last_line_cut: bool
    sets: dict[int, dict[str, float]] = field(default_factory=dict)  # step: nats per token of each of several data sets
    pairs: dict[int, tuple[float, float]] = field(default_factory=dict)  # step: accuracy, mean margin of pairs
    # step: reward of a validation, its standard error, divergence from the start's policy in nats a token (NaN: unknown)
    rewards: dict[int, tuple[float, float, float]] = field(default_factory=dict)
    rollouts: RolloutFigures = field(default_factory=lambda: RolloutFigures(*np.empty((4, 0))))
    is_log: bool = False  # a main.log in llm.c's format: curves only

    @property
    def start(self) -> Start:
        """The latest launch."""
        return self.starts[-1]


# Results.


def steps_done(run: Run) -> int:
    return int(run.steps.step[-1])


def tokens_seen(run: Run) -> float:
    return run.start.batch.tokens_before(steps_done(run)) or math.nan  # a main.log does not record them


def tokens_at(run: Run, steps: np.ndarray) -> np.ndarray:
    """The tokens seen after each of these numbers of steps."""
    stages = run.start.batch.stages
    parts = (
        (np.clip(steps, stage.first_step, end) - stage.first_step) * stage.tokens_per_step
        for stage, end in zip(stages, [*(stage.first_step for stage in stages[1:]), math.inf], strict=True)
    )
    return sum(parts, np.zeros(len(steps)))


def seconds_in_steps(run: Run) -> float:
    """Time spent in the steps, without validations, samples and checkpoints."""
    return float(np.nansum(run.steps.step_ms)) / 1000


def wall_clock(run: Run) -> np.ndarray:
    """Seconds that the run had taken by the end of each step, with validations, without pauses between launches. A step
    without a recorded time counts with its own milliseconds."""
    began = {first: start.time for first, start in zip(run.first_steps, run.starts, strict=True)}
    before = np.roll(run.steps.time, 1)
    before[0] = math.nan
    for index in np.flatnonzero(np.isin(run.steps.step, [first for first in began if first is not None])):
        before[index] = began[int(run.steps.step[index])]
    taken = run.steps.time - before
    return np.cumsum(np.where(taken >= 0, taken, np.nan_to_num(run.steps.step_ms, posinf=0, neginf=0) / 1000))


def date_text(seconds: float) -> str:
    """A time in UTC, the same text wherever the report is written."""
    if not 0 <= seconds < 1e11:
        return DASH
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M UTC")


def median(values: np.ndarray) -> float:
    finite = values[np.isfinite(values)]
    return float(np.median(finite)) if len(finite) else math.nan


def final_training_loss(run: Run) -> float:
    """Mean loss of the last 2 % of the steps (nats per token), because a single batch is noisy."""
    last = run.steps.loss[-max(1, len(run.steps.loss) // 50) :]
    finite = last[np.isfinite(last)]
    return float(finite.mean()) if len(finite) else math.nan


def final_validation(run: Run) -> float:
    """The last validation loss, nats per token."""
    return run.validations[-1][1] if run.validations else math.nan


def best_validation(run: Run) -> tuple[int, float]:
    """Step and loss (nats per token) of the lowest validation loss."""
    finite = [(step, loss) for step, loss in run.validations if math.isfinite(loss)]
    return min(finite, key=lambda pair: pair[1], default=(0, math.nan))


def perplexity(loss: float) -> float:
    return math.exp(loss) if not loss > 700 else math.inf  # e^710 is beyond a float


def bits_per_byte(run: Run, loss: float) -> float:
    """Bits per byte of validation text: the loss in a unit that does not depend on the tokenizer."""
    data = run.start.data
    if not data.validation_text_bytes > 0 or squares(run):
        return math.nan
    return loss * data.validation_tokens / data.validation_text_bytes / math.log(2)


# Numbers as text.


def shown(value: float, form: Callable[[float], str]) -> str:
    """`value` as formatted by `form`, or a symbol for NaN and infinity."""
    if math.isnan(value):
        return DASH
    return form(value) if math.isfinite(value) else "∞" if value > 0 else "-∞"


def loss_text(value: float) -> str:
    return shown(value, "{:.4f}".format)


def validation_text(run: Run) -> str:
    """The last validation loss; NaN means that the run diverged, a dash that it had no validation."""
    loss = final_validation(run)
    return "NaN" if run.validations and math.isnan(loss) else loss_text(loss)


def squares(run: Run) -> bool:
    """True if the loss is a squared error, of a network of pictures."""
    network = NETWORKS.get(str(run.config.get("architecture")))
    return network is not None and network.pictures


def measure_of(run: Run) -> tuple[str, str, Callable[[float], str]]:
    """(the unit of a run's loss; the name and the text of the same in another unit)."""
    if squares(run):
        return "squared error per byte", "PSNR", lambda loss: shown(loss, lambda error: f"{psnr(error):.2f} dB")
    of = "pair" if run.pairs else "token from the teacher" if run.rewards and run.validations else "token"
    return f"nats per {of}", "perplexity", perplexity_text


def perplexity_text(loss: float) -> str:
    """The perplexity of a loss."""
    return shown(perplexity(loss), lambda v: f"{v:.2f}" if v < 1000 else f"{v:,.0f}" if v < 1e9 else f"{v:.1e}")


def floor_text(run: Run, loss: float) -> str:
    """The excess of a loss over the entropy of the source, which no model can beat, in percent of the entropy."""
    floor = run.start.floor_nats_per_token
    percent = 100 * (loss / floor - 1) if floor > 0 else math.nan
    return shown(percent, lambda v: f"{v:+.1f} %" if abs(v) < 100 else f"{v:+,.0f} %")


def fraction_text(value: float) -> str:
    """A fraction in percent, to three digits; a small one never shows as zero."""
    return shown(value, lambda v: "0 %" if v == 0 else f"{100 * v:.3g} %" if v >= 1e-6 else f"{100 * v:.0e} %")


def scales_text(smallest: float, largest: float) -> str:
    """A range of scales, powers of two: 2^6 or 2^6 to 2^8."""
    ends = [shown(scale, lambda v: f"2^{math.log2(v):g}" if v > 0 else f"{v:g}") for scale in (smallest, largest)]
    return " to ".join(dict.fromkeys(ends))


def count_text(value: float) -> str:
    """A count in full: 961,536."""
    return shown(value, "{:,.0f}".format)


def short_text(value: float) -> str:
    """A count to about three digits: 600, 8.19k, 4.92M."""
    return shown(value, lambda v: scaled(v, 1000, ("", "k", "M", "G", "T", "P", "E")))


def bytes_text(value: float) -> str:
    return shown(value, lambda v: scaled(v, 1024, (" B", " KiB", " MiB", " GiB", " TiB")))


def scaled(value: float, base: int, units: tuple[str, ...]) -> str:
    """`value` to three digits, in the first unit that makes it less than `base`."""
    power = 0
    while abs(float(f"{value:.3g}")) >= base and power < len(units) - 1:
        value, power = value / base, power + 1
    return (f"{value:.3g}" if abs(value) < 999.5 else f"{value:.0f}") + units[power]


def duration_text(seconds: float) -> str:
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours < 48 else f"{hours // 24} d {hours % 24} h"


# Long series, thinned for drawing: the curve looks the same, the file stays small.


def smooth(values: np.ndarray, half_width: int, picked: np.ndarray, average: Callable = np.mean) -> np.ndarray:
    """`average` at each of the indices `picked`, over up to `half_width` finite neighbours on each side.

    The window is centred, so the curve does not lag. At the start of the series it shrinks on both sides equally, because
    a loss falls steeply there; at the end it stays wide and one-sided, because only noise is left to average.
    An index whose own value is not finite stays NaN: a diverged stretch is a gap in the curve."""
    smoothed = np.full(len(picked), np.nan)
    for i, index in enumerate(picked):
        if np.isfinite(values[index]):
            reach = min(index, half_width)
            window = values[index - reach : index + reach + 1]
            smoothed[i] = average(window[np.isfinite(window)])
    return smoothed


def envelope(x: np.ndarray, y: np.ndarray, bins: int) -> tuple[np.ndarray, np.ndarray]:
    """At most 2 `bins` points: the lowest and the highest of each bin, in order, so that every spike stays visible."""
    y = np.where(np.isfinite(y), y, np.nan)
    if len(y) <= 2 * bins:
        return x, y
    keep = []
    for indices in np.array_split(np.arange(len(y)), bins):
        within = y[indices]
        if np.isnan(within).all():
            keep.append(int(indices[0]))  # one NaN breaks the line here
            continue
        keep.extend(sorted({int(indices[np.nanargmin(within)]), int(indices[np.nanargmax(within)])}))
    return x[keep], y[keep]


def thin(count: int, limit: int) -> np.ndarray:
    """At most `limit` (2 or more) indices of `count` items, evenly spread, with the first and the last."""
    return np.unique(np.linspace(0, count - 1, min(count, limit)).round().astype(int)) if count else np.empty(0, int)
