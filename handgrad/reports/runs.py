"""A run as plain data for plots and tables; `reading` makes it from a run folder, `main_log` from a log of llm.c's."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from handgrad.settings.batch_schedule import BatchSchedule, parse_schedule


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
    """The GPU's sensors, an element per reading. NaN where the GPU does not report a quantity."""

    step: np.ndarray
    watts: np.ndarray
    sm_megahertz: np.ndarray


@dataclass(frozen=True)
class Pace:
    """The time that ranks took for their own work, over the steps since the last such line."""

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
class TaskFigure:
    """A metric of a task after a step, with its standard error; NaN where unknown."""

    value: float
    stderr: float
    examples: int


@dataclass(frozen=True)
class Run:
    """The content of one run folder."""

    name: str
    folder: Path
    config: dict[str, Any]
    starts: list[Start]
    first_steps: list[int | None]  # the first step after each launch, None if it never finished one
    steps: Steps
    skipped: dict[int, str]  # step: the reason for leaving out its update
    validations: list[tuple[int, float]]  # step, nats per token
    tasks: dict[tuple[str, str], list[tuple[int, TaskFigure]]]  # (task, metric): its figures by step
    samples: list[tuple[int, str]]
    events: list[tuple[int, str]]
    gpu: GpuReadings
    paces: list[Pace]  # of a run on several ranks
    fp8: list[tuple[int, dict[str, Quantized]]]  # step, classes of tensors by name
    last_line_cut: bool
    is_log: bool = False  # a main.log in llm.c's format: curves alone

    @property
    def start(self) -> Start:
        """The latest launch."""
        return self.starts[-1]
