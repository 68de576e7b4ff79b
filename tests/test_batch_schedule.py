"""A batch that grows: which samples a step takes, the mean over its own tokens, the same bits wherever a run stops."""

import dataclasses
import itertools
import math
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from benchmarks.twin import Twin, optimizer_of, twin_step
from handgrad.data.batches import Batches
from handgrad.data.shards import open_dataset
from handgrad.errors import ConfigError, DataError, UsageError
from handgrad.ops import UPDATE, cpu, reference
from handgrad.run.open import open_run, train
from handgrad.run.resolve import largest_micro_batch
from handgrad.run.settings import run_config
from handgrad.settings.batch_schedule import parse_schedule
from handgrad.settings.config import RunConfig, check, to_dict
from handgrad.storage import checkpoint
from handgrad.training.design import Batch
from handgrad.training.feed import BatchFeed
from tests.test_runs import elsewhere, interrupt_at, records, same_bits
from tests.test_suspicion import FAULTY, flip, run_ahead
from tests.test_training import assembly_of, steps_of

GROWING = "3:512,5:1280"  # after 256 tokens a step, of 32 each sample: 8, 16, 40 samples


@pytest.fixture
def growing(config: RunConfig) -> RunConfig:
    return dataclasses.replace(config, batch_schedule=GROWING, steps=8, eval_every=4)


@pytest.mark.parametrize("text", ["", "1:64", "3:512,5:1280", "2:96,3:32,9:320"])
def test_every_sample_comes_once_in_its_order(text: str) -> None:
    """The position is a function of the step alone, and equals what a count over the steps before gives."""
    schedule = parse_schedule(256, text)
    batch, place = Batch(1, 1, 32, schedule), 0
    changes = dict(tuple(map(int, stage.split(":"))) for stage in text.split(",") if stage)
    tokens = 256
    for step in range(12):
        tokens = changes.get(step, tokens)
        assert (batch.tokens(step), batch.first_sample(step)) == (tokens, place)
        assert batch.micro_steps(step) == tokens // 32 and schedule.tokens_before(step) == 32 * place
        place += tokens // 32


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1000", "batch_schedule must be STEP:TOKENS with commas, such as 1000:262144,4000:524288, found '1000'"),
        ("4:512,x:9", "found 'x:9'"),
        ("4:0", "found '4:0'"),
        ("4:1e3", "found '4:1e3'"),
        ("0:512,4:1024", "changes the batch after step 1 or later, found '0:512'; .* size is --tokens-per-step 512"),
        ("4:512,4:1024", "the steps of batch_schedule must rise, found 4:1024 after 4:512"),
        ("4:512,9:1000", r"must be a multiple of micro_batch \* sequence_length = 4 \* 32 = 128, found 9:1000; try 9:1024"),
    ],
)
def test_a_schedule_that_does_not_hold_is_refused(text: str, message: str, config: RunConfig) -> None:
    with pytest.raises(UsageError, match=message) as refused:
        check(dataclasses.replace(config, batch_schedule=text))
    assert "\n" not in str(refused.value)


def test_every_stage_divides_into_the_lanes(growing: RunConfig) -> None:
    check(dataclasses.replace(growing, lanes=2))
    message = r"tokens in batch_schedule must be a multiple of lanes \* micro_batch .* found 5:1408; try 5:1536"
    with pytest.raises(UsageError, match=message):
        check(dataclasses.replace(growing, lanes=2, batch_schedule="3:512,5:1408"))


@pytest.mark.parametrize("ops", [reference, cpu], ids=["reference", "cpu"])
@pytest.mark.parametrize("scale", [1.0, 8.0])
def test_a_step_of_more_tokens_than_the_first_has_the_mean_of_its_own(ops: ModuleType, scale: float) -> None:
    """30 tokens' losses of 90 in all have the mean 3. Gradients made for 10 tokens whose sum has the norm 12 have 4 in the
    mean, clipped to 1, and the loss scale holds for the next gradients, made for 10 again."""
    controls, results = torch.tensor([5, 1e-3, math.inf, math.inf, 30], dtype=torch.float64), torch.zeros(5).double()
    loss_scale, losses = torch.tensor([scale / 10, scale, 7.0]), torch.tensor([90.0], dtype=torch.float64)
    settings = {"gradient_tokens": 10, "clip_norm": 1.0, "dynamic_loss_scale": True}
    ops.verdict(results, loss_scale, losses, torch.tensor([(12 * scale) ** 2]), controls, **settings)
    torch.testing.assert_close(results, torch.tensor([3.0, 4.0, 0.25 / (3 * scale), UPDATE, scale], dtype=torch.float64))
    assert torch.equal(loss_scale, torch.tensor([scale / 10, scale, 8.0]))


def test_steps_of_all_stages_equal_the_autograd_twin(growing: RunConfig) -> None:
    """It takes the mean over the micro-batches of each step, and reads the samples one step after the other."""
    state, results = steps_of(growing, growing.steps)
    fresh, _ = steps_of(growing, 0)
    batches = Batches(open_dataset(growing.data).splits["train"], growing.sequence_length, growing.seed)
    twin = Twin(state.design.shape)
    twin.load(state.design.parameters, fresh.master)
    optimizer, first, expected = optimizer_of(twin.double(), growing, fused=False), itertools.count(0, 4), []
    for step, count in enumerate([2, 2, 2, 4, 4, 10, 10, 10]):
        micro_batches = []
        for _ in range(count):
            tokens, targets = (torch.empty(4, 32, dtype=torch.int64) for _ in range(2))
            batches.fill(tokens, targets, next(first))
            micro_batches.append((tokens, targets))
        expected.append(twin_step(twin, optimizer, growing, micro_batches, step))
    ours = np.array([(result.loss, result.norm) for result in results])
    np.testing.assert_allclose(ours, np.array(expected), rtol=1e-5)


@pytest.mark.nightly(but=["{'precision': 'fp8', 'fp8_window': 3}"])
@pytest.mark.parametrize(
    "settings", [{}, {"lanes": 2}, {"precision": "fp16"}, {"precision": "fp8", "fp8_window": 3}], ids=str
)
def test_a_run_that_stops_in_any_stage_has_the_bits_of_an_unbroken_one(
    settings: dict, growing: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within stages and exactly where they change; and no sample is read twice or left out."""
    growing = dataclasses.replace(growing, save_every=1, keep_checkpoints=0, **settings)
    whole, taken, fill = elsewhere(growing, "whole"), list[int](), BatchFeed.fill
    with monkeypatch.context() as patch:
        patch.setattr(BatchFeed, "fill", lambda feed, first: (fill(feed, first), taken.append(first))[0])
        train(whole)
    ran_ahead = int(growing.precision == "fp8")  # one micro-batch makes the first scales
    assert taken[ran_ahead:] == list(range(0, (3 * 256 + 2 * 512 + 3 * 1280) // 32, 4))
    for stop in (2, 3, 4, 5, 7):
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            interrupt_at(patch, stop)
            train(growing)
    train(growing)
    same_bits(whole.out, growing.out, growing.steps)


def test_the_schedule_belongs_to_the_run(growing: RunConfig) -> None:
    train(dataclasses.replace(growing, steps=8))
    with pytest.raises(ConfigError, match=f"batch_schedule: '{GROWING}' -> ''"):
        train(dataclasses.replace(growing, batch_schedule=""))


@pytest.mark.parametrize("ahead", [False, True])
def test_a_step_of_a_later_stage_is_made_again(growing: RunConfig, ahead: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its micro-batches, also while the step behind it has begun, one of another size."""
    growing = dataclasses.replace(growing, batch_schedule=f"3:512,{FAULTY + 1}:1280")
    whole = elsewhere(growing, "whole")
    train(whole)
    if ahead:
        run_ahead(monkeypatch)
    with monkeypatch.context() as patch:
        flip(patch, {0: 0})
        train(growing)
    same_bits(whole.out, growing.out, growing.steps)
    (event,) = [record["text"] for record in records(growing.out, ("event",))]
    right = records(whole.out, ("step",))[FAULTY]
    assert f"and again loss {right['loss']:.6g} and norm {right['norm']:.6g}" in event


def test_the_record_counts_the_tokens_of_every_step(growing: RunConfig, capsys: pytest.CaptureFixture) -> None:
    train(growing)
    header = capsys.readouterr().out
    assert "batch      256 tokens a step = 2 x 4 x 32; 8 steps = 5.6k tokens, 0.2 epochs\n" in header
    assert "           after step 3: 512 tokens a step = 4 x 4 x 32\n" in header
    assert "           after step 5: 1280 tokens a step = 10 x 4 x 32\n" in header
    (start,) = records(growing.out, ("run",))
    assert (start["tokens_per_step"], start["batch_schedule"]) == (256, GROWING)
    steps = records(growing.out, ("step",))
    assert [step["tokens"] for step in steps] == [256, 512, 768, 1280, 1792, 3072, 4352, 5632]
    rates = [step["learning_rate"] for step in steps]
    plain = elsewhere(growing, "plain", batch_schedule="")
    train(plain)
    unchanged = records(plain.out, ("step",))
    assert [step["learning_rate"] for step in unchanged] == rates, "the rate goes by steps"
    assert steps[:3] == unchanged[:3] and steps[3]["loss"] != unchanged[3]["loss"], "the first stage has the same bits"
    assert "batch_schedule" not in records(plain.out, ("run",))[0] and "after step" not in capsys.readouterr().out


def test_speed_and_remaining_time_go_by_tokens(growing: RunConfig) -> None:
    """At 1 ms per token the rate is 1000 tokens/s in every stage, and what is left takes its tokens' time."""
    with open_run(growing, console="nothing") as run:
        run.begin()
        shown = []
        run.step_lines.log.display.update = lambda step, line: shown.append(line(200))  # type: ignore[method-assign]
        result = run.training.stepper.step(0)
        for step in range(1, 7):
            seconds = growing.batch.tokens(step - 1) / 1e3
            run.step_lines.show(step, dataclasses.replace(result, elapsed_seconds=seconds))
    assert all("| 1.0k tok/s |" in line for line in shown), shown
    assert shown[2].startswith("0:05 left") and shown[4].startswith("0:04 left"), "2 * 512 + 3 * 1280 tokens, and 3 * 1280"


def test_a_micro_batch_divides_the_steps_of_all_stages(growing: RunConfig) -> None:
    """Steps of 8, 16 and 40 samples, then of 8, 12 and 40."""
    assert largest_micro_batch(growing, 257, 1 << 40) == 8
    assert largest_micro_batch(dataclasses.replace(growing, batch_schedule="3:384,5:1280"), 257, 1 << 40) == 4


def test_a_step_larger_than_the_data_is_refused_at_the_start(growing: RunConfig) -> None:
    with pytest.raises(DataError, match=r"one step takes 4096 samples .* --batch-schedule ''"):
        train(dataclasses.replace(growing, batch_schedule="3:131072"))


def test_sizes_that_follow_from_the_data_need_the_steps_that_the_schedule_counts(shards: Path) -> None:
    with pytest.raises(UsageError, match="give --steps and --tokens-per-step"):
        run_config("", "", "", {"data": str(shards), "batch_schedule": "3:4096"})
    chosen = {"data": str(shards), "steps": 9, "tokens_per_step": 2048, "batch_schedule": "3:4096", "device": "cpu"}
    assert run_config("", "", "", chosen).batch.tokens(3) == 4096


def test_a_checkpoint_of_before_has_no_schedule(config: RunConfig) -> None:
    train(dataclasses.replace(config, steps=4, save_every=4, eval_every=0))
    saved = checkpoint.peek_config(Path(config.out))
    assert saved is not None and saved.pop("batch_schedule") == ""
    assert RunConfig(**saved).batch == parse_schedule(256, "") and to_dict(RunConfig(**saved))["batch_schedule"] == ""


def test_memory_is_that_of_one_micro_batch(growing: RunConfig, config: RunConfig) -> None:
    assert assembly_of(growing).design.plan.size_bytes == assembly_of(config).design.plan.size_bytes
