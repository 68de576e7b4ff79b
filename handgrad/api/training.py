"""A run, driven step by step: the run of `handgrad train`, bit for bit."""

import contextlib
import inspect
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar, Unpack

from handgrad.api.model import Model
from handgrad.errors import NumericsError, Preempted, UsageError
from handgrad.evaluation import rewards
from handgrad.evaluation.load import Weights
from handgrad.joins.lora import tables as lora
from handgrad.machine import devices
from handgrad.run.loop import Run, preempted
from handgrad.run.open import open_run
from handgrad.run.settings import run_config
from handgrad.settings.config import RunConfig, check, to_dict
from handgrad.storage import checkpoint
from handgrad.training.step import StepResult

if TYPE_CHECKING:
    from handgrad.api.reports import Curves


Described = TypeVar("Described", bound=Callable[..., Any])


class Settings(TypedDict, total=False):
    """The fields of `RunConfig` as keywords, for type checkers, editors and notebooks; a test keeps both equal.
    `handgrad train --help-all` explains each."""

    data: str | os.PathLike[str]
    out: str | os.PathLike[str]
    architecture: str
    techniques: str
    llama: str
    gemma3: str
    olmo: str
    vqvae: str
    num_layers: int
    num_heads: int
    channels: int
    sequence_length: int
    init_from: str | os.PathLike[str]
    freeze: str
    lora: str
    steps: int
    epochs: float
    tokens_per_step: int
    batch_schedule: str
    micro_batch: int
    lanes: int
    packing: str
    objective: str
    teacher: str | os.PathLike[str]
    teacher_divergence: str
    dpo_beta: float
    dpo_smoothing: float
    reward: str | Callable[..., float]  # or a function (row, answer), called in this process
    rollouts: int
    answer_tokens: int
    answer_stop: str
    updates: int
    clip_ratio: float
    reward_seconds: int
    overfit_one_batch: bool
    learning_rate: float
    optimizer: str
    matrix_learning_rate: float
    schedule: str
    warmup_steps: int
    cooldown_fraction: float
    final_learning_rate_fraction: float
    weight_decay: float
    beta1: float
    beta2: float
    adam_epsilon: float
    clip_norm: float
    skip_loss_z: float
    skip_norm_z: float
    max_skips: int
    seed: int
    dropout: float
    zero: int
    reduce_precision: str
    check_ranks_every: int
    join_seconds: int
    silence_seconds: int
    stall_seconds: int
    fp8_keep_bf16: str
    fp8_head: str
    fp8_gradients: str
    fp8_scaling: str
    fp8_window: int
    fp8_margin: int
    fp8_count_every: int
    fp8_on_saturation: str
    fp8_saturation_steps: int
    eval_every: int
    eval_tokens: int
    eval_stride: int
    eval_tasks: str
    eval_task_examples: int
    sample_every: int
    sample_tokens: int
    log_every: int
    log_to: str
    audit_every: int
    gpu_every: int
    save_every: int
    keep_checkpoints: int
    keep_every: int
    keep_best: bool
    async_save: bool
    device: str
    precision: str
    backend: str
    master_weights: bool
    moments: str
    offload: bool
    recompute: int
    head_chunk_tokens: int


def with_settings(described: Described) -> Described:
    """Shows the fields instead of `**settings` in the signature, for completion in a notebook and for `help`."""
    signature = inspect.signature(described)
    *own, rest = signature.parameters.values()
    assert rest.kind is rest.VAR_KEYWORD
    fields = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=..., annotation=kind)
        for name, kind in Settings.__annotations__.items()
    ]
    described.__signature__ = signature.replace(parameters=[*own, *fields])  # type: ignore[attr-defined]
    return described


@dataclass(frozen=True)
class Step:
    """The results of one step."""

    step: int  # counted from 1
    loss: float  # mean over the step's tokens, nats
    norm: float  # of the whole gradient, before clipping
    learning_rate: float
    tokens_per_second: float
    skipped: str | None  # the reason for skipping the update


OnStep = Callable[[Step], object]


@with_settings
def preset(name: str, **settings: Unpack[Settings]) -> RunConfig:
    """The configuration of `handgrad train NAME` with these settings; `handgrad train --help-all` lists them all.
    Raises `UsageError` for an unknown name or an invalid value."""
    return check(configuration(name, settings))


def configuration(
    start: str | RunConfig, settings: Settings, recipe_file: str = "", model: str = "", **planned: Any
) -> RunConfig:
    """The configuration for the arguments of `Training`: the command's, or a `RunConfig` with fields replaced."""
    values = {name: os.fspath(value) if isinstance(value, os.PathLike) else value for name, value in settings.items()}
    if isinstance(start, RunConfig):
        values, start = to_dict(start) | values, ""
    return run_config(start, os.fspath(recipe_file), model, values, **planned)


@with_settings
class Training:
    """A run in a folder, new or resumed. The caller decides when it makes steps.

        with handgrad.Training("tiny", data="shards", out="runs/a", steps=100) as run:
            run.steps(50)
            print(run.model().generate("Once"))
            run.steps()

    It is the run of `handgrad train` with the same settings: the same bits, the same files, the same schedule of saves,
    validations and samples; either can continue the other's run. Until it is closed, this process owns the folder.
    """

    def __init__(
        self,
        preset: str | RunConfig = "",
        *,
        config: str = "",
        model: str = "",
        allow_changes: bool = False,
        quiet: bool = False,
        **settings: Unpack[Settings],
    ):
        """`preset`: a name or a whole `RunConfig`; `config`: a recipe file; `model`: the name of a model size; `settings`:
        single fields of `RunConfig`. `quiet`: prints nothing to the console; log.txt has the lines.

        Raises the errors of `handgrad train`."""
        reward = settings.get("reward")
        function = reward if callable(reward) else None
        if function is not None:
            settings["reward"] = rewards.PYTHON + getattr(function, "__qualname__", type(function).__name__)
        resolved = configuration(preset, settings, config, model)
        with contextlib.ExitStack() as opening:
            console = "nothing" if quiet else "lines"
            how: dict[str, Any] = {"allow_changes": allow_changes, "console": console, "reward": function}
            run = opening.enter_context(open_run(resolved, **how))
            self.config: RunConfig = run.config
            run.begin()
            self._run: Run | None = run
            self._opened = opening.pop_all()
        self._stepping = self._torn = False
        self.completed = run.completed  # steps
        self.validation_loss = run.evaluations.loss  # in nats; the last one that this process measured

    def __repr__(self) -> str:
        state = "" if self._run else ", closed"
        return f"<handgrad.Training: {self.config.out}, {self.completed} of {self.config.steps} steps{state}>"

    @property
    def folder(self) -> Path:
        """The run folder, for `handgrad.load`, `handgrad.metrics` and the commands."""
        return Path(self.config.out)

    def steps(self, count: int | None = None, on_step: OnStep | None = None) -> list[Step]:
        """Makes `count` steps, or all remaining ones, and returns them. Validations, samples and checkpoints follow the
        step after which they are due.

        Calls `on_step` with each step as soon as its numbers are known; `model()` then has its weights. An exception in
        `on_step` stops the run after a complete step (on a GPU the one in progress): nothing is lost, and `steps` continues
        from there. Ctrl-C finishes the step, saves the run and raises `KeyboardInterrupt`; a second Ctrl-C raises it at
        once, and the caller must then reopen the run, at its last checkpoint. SIGTERM and SIGHUP save and raise
        `Preempted`. Raises `NumericsError` if updates keep being skipped."""
        run = self._standing()
        if count is not None and (not hasattr(count, "__index__") or count < 1):
            raise UsageError(f"expected a whole number of steps, 1 or more, found {count!r:.40}")
        until = self.config.steps if count is None else min(self.config.steps, run.completed + int(count))
        steps: list[Step] = []

        def take(number: int, result: StepResult) -> None:
            rate = run.batch.tokens(number - 1) / result.elapsed_seconds
            steps.append(Step(number, result.loss, result.norm, result.learning_rate, rate, result.skipped))
            self.completed = number
            if on_step is not None:
                on_step(steps[-1])

        devices.set_arithmetic(run.design.device, run.design.precision)  # a model may have changed it
        self._stepping = True
        try:
            run.advance(until, take, keeps_process=True)
            if run.signals.received is not None:  # during the last step: only the caller is left to stop
                raise preempted(run.signals.received, run.completed, run.saves.last_saved)
        except Preempted as stopped:
            if signal.SIGINT in (run.stop_signal, run.signals.received):
                raise KeyboardInterrupt(str(stopped)) from None
            raise
        except BaseException as error:
            self._torn = error is not run.callback_error
            raise
        finally:
            self._stepping = False
            self.completed, self.validation_loss = run.completed, run.evaluations.loss
        return steps

    def model(self) -> Model:
        """A copy of the current weights, to evaluate or to sample, which later steps do not change; bf16 for an fp8 run."""
        run = self._open()
        run.training.await_weights()
        design, parameters = run.design, run.training.state.parameters
        precision = "bf16" if self.config.precision == "fp8" else self.config.precision
        tensors = {row.name: row.stored(parameters) for row in design.parameters}
        if design.lora is not None:
            tensors = lora.saved(run.training.state)
        origin = {"from": "training", "source": self.config.out, "step": self.completed}
        now = Weights(design.shape, run.dataset.tokenizer, lambda row: tensors[row.name], origin, self.config)
        return Model(now, design.plain_ops, design.device, precision)

    def plot(self, curve: str = "loss") -> "Curves":
        """`handgrad.plot` of this run so far; a notebook shows it."""
        from handgrad.api.reports import plot  # imports matplotlib, which training does not need

        return plot(self.folder, curve=curve)

    def save(self) -> Path:
        """Saves a checkpoint of the current step, if there is none yet; returns its folder. Raises `NumericsError` if the
        last step's numbers were not finite."""
        run = self._standing()
        run.save()
        run.saves.wait()
        if run.saves.last_saved != run.completed:
            raise NumericsError(f"the numbers of step {run.completed} are not finite and were not saved")
        return checkpoint.folder_of(run.folder.checkpoints, run.saves.last_saved)

    def close(self) -> None:
        """Saves the run if needed and releases folder and memory. The same settings continue it."""
        if self._stepping:
            raise UsageError("a run cannot be closed while it makes a step; raise an exception in on_step, then close it")
        run, self._run = self._run, None
        if run is None:
            return
        with self._opened:
            if not self._torn and run.completed > max(0, run.saves.last_saved):
                run.save()
                run.saves.wait()

    def _open(self) -> Run:
        if self._run is None:
            raise UsageError(f"the run in {self.config.out} is closed; open it again, or handgrad.load it")
        return self._run

    def _standing(self) -> Run:
        run = self._open()
        if self._stepping:
            raise UsageError("on_step cannot make or save steps itself: the next one may be in progress")
        if self._torn:
            raise UsageError(
                f"the run in {self.config.out} ended within a step; close it and open it again: it continues from its"
                " last checkpoint"
            )
        return run

    def __enter__(self) -> "Training":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        """Like `close`, but after an error on one of several ranks saves nothing, because a checkpoint needs all ranks."""
        if error is None or self._run is None or self._run.ranks.size == 1:
            self.close()
            return
        self._run = None
        self._opened.__exit__(kind, error, trace)


@with_settings
def train(
    preset: str | RunConfig = "",
    *,
    config: str = "",
    model: str = "",
    allow_changes: bool = False,
    quiet: bool = False,
    **settings: Unpack[Settings],
) -> float | None:
    """Makes all steps of a `Training` with the same arguments; returns the last validation loss in nats, if there was one.
    Leaves a finished run as it is."""
    with Training(preset, config=config, model=model, allow_changes=allow_changes, quiet=quiet, **settings) as run:
        run.steps()
        return run.validation_loss
