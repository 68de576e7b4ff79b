"""A batch that grows, as plans, reports and cards of models show it; and no CUDA graph is captured late for it."""

import dataclasses
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from handgrad.errors import DataError, UsageError
from handgrad.interop.model_card import training_lines
from handgrad.joins.parallel import step as parallel_step
from handgrad.joins.parallel.step import ParallelStep, PausedStages
from handgrad.machine.graphs import Replayed
from handgrad.models.passes import Stage
from handgrad.parsing import Record
from handgrad.reports import results
from handgrad.reports.page import tokens_axis
from handgrad.reports.plots import choose_plots
from handgrad.reports.reading import read_run, read_start
from handgrad.reports.results import Run
from handgrad.reports.sections import description, validations
from handgrad.run.open import train
from handgrad.settings.batch_schedule import parse_schedule
from handgrad.settings.config import RunConfig, check
from handgrad.settings.presets import preset
from handgrad.storage import checkpoint
from handgrad.tools.forecast import forecast
from handgrad.tools.plan import describe_plan
from handgrad.training.design import Batch
from tests.test_batch_schedule import GROWING
from tests.test_runs import elsewhere

EIGHT = [256, 512, 768, 1280, 1792, 3072, 4352, 5632]  # the tokens seen after each of eight steps


@pytest.fixture
def growing(config: RunConfig) -> RunConfig:
    return dataclasses.replace(config, batch_schedule=GROWING, steps=8, eval_every=4, save_every=8, sample_tokens=0)


@pytest.fixture
def run(growing: RunConfig) -> Run:
    train(growing)
    return read_run(Path(growing.out), "run")


def test_a_report_counts_the_tokens_of_every_step(run: Run, growing: RunConfig) -> None:
    assert results.tokens_seen(run) == 5632 and results.tokens_at(run, run.steps.step).tolist() == EIGHT
    assert "8 of 8 steps of 256, then 512, then 1,280 tokens: 5.63k tokens" in description(run)
    assert re.findall(r"<td[^>]*>([\d.]+k)</td>", validations(run)) == ["1.28k", "5.63k"]
    plain = elsewhere(growing, "plain", batch_schedule="")
    train(plain)
    other = read_run(Path(plain.out), "plain")
    assert "loss_by_tokens" in [plot.name for plot in choose_plots([run, other])]
    assert "loss_by_tokens" not in [plot.name for plot in choose_plots([run, run])]


def test_the_pages_axis_of_tokens(run: Run) -> None:
    """The script draws a straight line between the points, also from nothing to the first and beyond the last."""
    axis = tokens_axis(run)
    assert axis == [[3, 5, 6], [768, 1792, 3072]]
    assert np.interp([1, 2, 3, 4, 5, 6], [0, *axis[0]], [0, *axis[1]]).tolist() == EIGHT[:6]
    one = dataclasses.replace(run, starts=[dataclasses.replace(run.start, batch_schedule="")])
    assert tokens_axis(one) == 256


def test_a_damaged_schedule_in_a_record_is_refused_by_its_place(run: Run) -> None:
    line = {**dataclasses.asdict(run.start), "batch_schedule": "3:x"}
    with pytest.raises(DataError, match=r"STEP:TOKENS with commas.*line 1"):
        read_start(Record(line, "line 1"))


def test_a_model_card_counts_the_tokens_of_every_step(run: Run, growing: RunConfig) -> None:
    saved = checkpoint.open_checkpoint(Path(growing.out) / "checkpoints" / "step_00000008")
    lines = training_lines(saved)
    assert "| tokens seen | 5,632 in 8 steps |" in lines and f"| batch_schedule | {GROWING} |" in lines


def test_a_plan_lists_the_stages_and_sums_their_tokens(growing: RunConfig) -> None:
    lines = describe_plan(growing, 257)
    place = next(number for number, line in enumerate(lines) if line.startswith("run "))
    assert lines[place].startswith("run        8 steps of 256 tokens = 2 x 4 x 32: 5.6k tokens,")
    assert lines[place + 1 : place + 3] == [
        "           after step 3: 512 tokens a step = 4 x 4 x 32",
        "           after step 5: 1280 tokens a step = 10 x 4 x 32",
    ]
    assert not any("after step" in line for line in describe_plan(dataclasses.replace(growing, batch_schedule=""), 257))


def test_a_forecast_takes_every_stage_at_its_speed() -> None:
    """On a GPU whose speed is estimated: longer steps are faster by the token. A measured speed stands for stages of many
    micro-batches alone."""
    d12 = dataclasses.replace(preset("d12"), steps=300, tokens_per_step=1 << 16)
    plain = {size: forecast(dataclasses.replace(d12, tokens_per_step=size), 50257, "4090") for size in (1 << 16, 1 << 19)}
    grown = forecast(dataclasses.replace(d12, batch_schedule=f"100:{1 << 19}"), 50257, "4090")
    expected = plain[1 << 16].seconds / 3 + plain[1 << 19].seconds * 2 / 3
    assert grown.seconds == pytest.approx(expected) and plain[1 << 16].tokens_per_second < grown.tokens_per_second
    full = dataclasses.replace(d12, tokens_per_step=1 << 19)
    assert forecast(dataclasses.replace(full, batch_schedule=f"100:{1 << 20}"), 50257, "h200").measured
    assert not forecast(dataclasses.replace(full, batch_schedule=f"100:{1 << 18}"), 50257, "h200").measured
    odd = dataclasses.replace(d12, batch_schedule=f"100:{96 * 1024}")
    assert forecast(odd, 50257, "h200").micro_batch == 32, "of samples 64 and 96"
    with pytest.raises(UsageError, match=r"found 100:7168; try 100:8192, or fewer GPUs$"):
        forecast(check(dataclasses.replace(d12, micro_batch=1, batch_schedule="100:7168")), 50257, "h200", ranks=2)


class Noted(Replayed):
    """A graph that notes its capture."""

    def __init__(self, name: Any, captured: list[Any]):
        super().__init__([])
        self.name, self.captured = name, captured

    def capture(self) -> Any:
        self.captured.append(self.name)


@pytest.mark.parametrize(
    ("schedule", "kinds"),
    [
        ("3:128", {(True, True), (True, False), (False, True)}),
        ("3:128,5:192", {(True, True), (True, False), (False, True), "plain"}),
    ],
)
def test_the_graphs_of_later_stages_are_captured_with_those_of_the_first(schedule: str, kinds: set) -> None:
    """Two ranks with 1 micro-batch each, then 2, then 3: a micro-step that only waits for weights, that only sends
    gradients, and at last one that does neither."""
    captured: list[Any] = []
    step: Any = object.__new__(ParallelStep)
    step.design = SimpleNamespace(batch=Batch(1, 2, 32, parse_schedule(64, schedule)))
    step.sync = SimpleNamespace(sharding=SimpleNamespace(lanes_per_rank=1))
    step.paused = {kind: Noted(kind, captured) for kind in ((True, False), (False, True), (True, True))}
    step.micro_step = Noted("plain", captured)
    step.capture_ahead()
    assert {*captured} == kinds and len(captured) == len(kinds) and not step.captures_ahead


def test_a_graph_that_was_captured_ahead_is_replayed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    graph = lambda run, stream: SimpleNamespace(replay=lambda: [launch() for launch in run])  # noqa: E731
    monkeypatch.setattr(parallel_step, "capture", lambda run, stream: made.append("graph") or graph(run, stream))
    monkeypatch.setattr(parallel_step.torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(parallel_step.torch.cuda, "Stream", lambda: None)
    stages = PausedStages([Stage("a", lambda: made.append("launch"))], True, True, graphs=True)
    stages.capture()
    stages.capture()
    assert made == ["graph"]
    stages(lambda stage: made.append("pause"))
    assert made == ["graph", "pause", "launch"]
