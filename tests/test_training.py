"""The training step against a plain PyTorch twin; schedules, decay, clipping; planned memory."""

import dataclasses
import gc
import itertools
import math
import time
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from benchmarks.twin import Twin, optimizer_of, twin_step
from handgrad.data.batches import Batches
from handgrad.data.shards import open_dataset
from handgrad.memory.layout import update_parts
from handgrad.ops import cpu
from handgrad.ops.reference.optimizer import round_stochastically
from handgrad.run.assemble import Assembly, assemble
from handgrad.run.resolve import largest_micro_batch, memory_bytes, resolve, schedule_of
from handgrad.settings.config import FIELDS, RunConfig
from handgrad.training.design import Schedule
from handgrad.training.feed import sort_positions
from handgrad.training.state import TrainingState
from handgrad.training.step import WINDOW, SpikeWindow, StepResult


def assembly_of(config: RunConfig) -> Assembly:
    dataset = open_dataset(config.data)
    batches = Batches(dataset.splits["train"], config.sequence_length, config.seed)
    return assemble(resolve(config, dataset.tokenizer.vocab_size), batches)


def steps_of(config: RunConfig, count: int) -> tuple[TrainingState, list[StepResult]]:
    training = assembly_of(config)
    return training.state, [training.stepper.step(step) for step in range(count)]


@pytest.mark.parametrize("backend", ["reference", "auto"])
def test_twenty_steps_equal_the_autograd_twin(config: RunConfig, backend: str) -> None:
    """Losses against a twin in float64: no further off than twice what a twin in float32 is, or two roundings. Norms to
    1e-5: a block's 65,536 squares are added in float32, and small ones get lost beside the sum (2.9e-6 here)."""
    settings = {"steps": 20, "learning_rate": 3e-3, "tokens_per_step": 512, "backend": backend}
    config = dataclasses.replace(config, **settings)
    state, results = steps_of(config, 20)
    fresh, _ = steps_of(config, 0)
    batches = Batches(open_dataset(config.data).splits["train"], config.sequence_length, config.seed)
    steps = []
    for step in range(config.steps):
        steps.append([])
        for micro_step in range(config.micro_steps):
            tokens, targets = (torch.empty(config.micro_batch, config.sequence_length, dtype=torch.int64) for _ in range(2))
            batches.fill(tokens, targets, (step * config.micro_steps + micro_step) * config.micro_batch)
            steps[-1].append((tokens, targets))
    curves = []
    for dtype in (torch.float32, torch.float64):
        twin = Twin(state.design.shape)
        twin.load(state.design.parameters, fresh.master)
        optimizer = optimizer_of(twin.to(dtype), config, fused=False)
        curves.append(np.array([twin_step(twin, optimizer, config, micro, step) for step, micro in enumerate(steps)]))
    single, exact = curves
    ours = np.array([(result.loss, result.norm) for result in results])
    error, own = (np.abs(curve / exact - 1).max(0) for curve in (ours, single))
    assert (error <= (max(2 * own[0], 2 * 2.0**-23), 1e-5)).all(), f"loss and norm off by {error}, a float32 twin by {own}"
    assert (own < 1e-5).all() and ours[-1, 0] < ours[0, 0] - 1, "twenty steps must learn something"


def test_the_micro_batch_changes_nothing_but_rounding(config: RunConfig) -> None:
    """Twelve samples a step in one micro-batch, and in 12, 6, 4, 3 and 2, on one lane or shared by two."""
    config = dataclasses.replace(config, tokens_per_step=12 * 32)
    _, whole = steps_of(dataclasses.replace(config, micro_batch=12), 4)
    for lanes, micro_batches in ((1, (1, 2, 3, 4, 6)), (2, (1, 2, 3, 6))):
        for micro_batch in micro_batches:
            _, divided = steps_of(dataclasses.replace(config, micro_batch=micro_batch, lanes=lanes), 4)
            for a, b in zip(divided, whole, strict=True):
                assert abs(a.loss - b.loss) < 1e-5 and abs(a.norm / b.norm - 1) < 1e-4, (lanes, micro_batch)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_two_runs_and_all_recompute_levels_give_the_same_bits(config: RunConfig, precision: str) -> None:
    config = dataclasses.replace(config, precision=precision)
    reference_state, reference_results = steps_of(config, 5)
    for recompute in (0, 1, 2, 3):
        state, results = steps_of(dataclasses.replace(config, recompute=recompute), 5)
        assert results == reference_results
        for name in ("parameters", "master", "optimizer.m", "optimizer.v"):
            assert name not in state.views or torch.equal(state.views[name], reference_state.views[name]), name


def test_bf16_follows_fp32(config: RunConfig) -> None:
    """Rounding to 8 bits of mantissa moves a loss of about 5 by less than 2^-8 relative in the mean over 10 steps."""
    _, exact = steps_of(config, 10)
    _, rounded = steps_of(dataclasses.replace(config, precision="bf16"), 10)
    for a, b in zip(exact, rounded, strict=True):
        assert abs(a.loss - b.loss) <= a.loss * 2**-8


def test_initial_weights_follow_the_seed_of_the_configuration(config: RunConfig) -> None:
    """A generator for each parameter, keyed by the seed and its place in the table."""
    for seed in (0, 41):
        state = assembly_of(dataclasses.replace(config, seed=seed)).state
        for index, row in enumerate(state.design.parameters):
            if row.init.kind == "normal":
                generator = torch.Generator().manual_seed(seed * 1_000_003 + index)
                expected = torch.empty(row.stored_shape).normal_(0.0, row.std, generator=generator)
                assert torch.equal(row.stored(state.master), expected), row.name


def test_only_matrices_decay_and_padding_stays_zero(config: RunConfig) -> None:
    state, _ = steps_of(dataclasses.replace(config, weight_decay=0.5), 3)
    decayed = torch.zeros_like(state.master, dtype=torch.bool)
    covered, design = 0, state.design
    for part in update_parts(design.parameters, design.buckets, 0, 1, design.optimizer.kind):
        assert part.flat == part.local
        decayed[part.flat], _ = part.kind
        covered += part.flat.stop - part.flat.start
    assert covered == state.master.numel(), "every element belongs to exactly one part"
    for row in design.parameters:
        assert (row.view(decayed) == (len(row.shape) == 2)).all(), row.name
    named = torch.zeros_like(state.master, dtype=torch.bool)
    for row in design.parameters:
        row.stored(named).fill_(True)
    for flat in (state.master, state.gradients, *state.optimizer.values()):
        assert (flat[~named] == 0).all(), "padding and alignment gaps stay zero"


def test_the_update_is_adamw_with_the_settings_of_the_configuration(config: RunConfig) -> None:
    """Three steps beside the equations in float64, from each step's own gradients; no setting is the default's, and each
    moves the weights by far more than the tolerance."""
    settings = {"beta1": 0.7, "beta2": 0.8, "adam_epsilon": 1e-3, "weight_decay": 0.6}
    config = dataclasses.replace(config, clip_norm=0.0, learning_rate=1e-2, **settings)
    training = assembly_of(config)
    state, step = training.state, training.stepper
    decays = torch.zeros_like(state.master, dtype=torch.bool)
    for row in state.design.parameters:
        row.view(decays).fill_(len(row.shape) == 2)
    w, m, v = state.master.double(), torch.zeros(state.master.shape).double(), torch.zeros(state.master.shape).double()
    for t in (1, 2, 3):
        step.begin(t - 1)
        g, rate = state.gradients.double(), 1e-2 * t / 3
        step.finish(t - 1)
        assert step.result(t - 1).learning_rate == pytest.approx(rate)
        m, v = 0.7 * m + 0.3 * g, 0.8 * v + 0.2 * g**2
        w = w - rate * 0.6 * w * decays - rate * (m / (1 - 0.7**t)) / ((v / (1 - 0.8**t)).sqrt() + 1e-3)
    for found, expected in ((state.master, w), (state.optimizer["m"], m), (state.optimizer["v"], v)):
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-7)


def test_stochastic_rounding_takes_seed_step_and_place(config: RunConfig) -> None:
    """The bf16 weights are the float32 update rounded by (seed, step, place in the flat buffer), in every step anew."""
    settings = {"precision": "bf16", "master_weights": False, "clip_norm": 0.0, "weight_decay": 0.0, "warmup_steps": 0}
    training = assembly_of(dataclasses.replace(config, seed=77, **settings))
    state, step = training.state, training.stepper
    for t in (1, 2):
        step.begin(t - 1)
        exact, g = state.master.float(), state.gradients.clone()
        m, v = state.optimizer["m"].clone(), state.optimizer["v"].clone()
        step.finish(t - 1)
        controls, results = state.controls, state.results
        betas = {"beta1": config.beta1, "beta2": config.beta2}
        cpu.adamw_update(exact, exact, m, v, g, controls, results, epsilon=config.adam_epsilon, weight_decay=0.0, **betas)
        expected = torch.empty_like(state.master)
        round_stochastically(expected, exact, t, 77, 0)
        assert torch.equal(state.master, expected) and not torch.equal(expected, exact.bfloat16())


def test_clipping_bounds_the_update(config: RunConfig) -> None:
    settings = {"learning_rate": 1e-3, "warmup_steps": 0, "weight_decay": 0.0}
    config = dataclasses.replace(config, clip_norm=1e-3, **settings)
    state, results = steps_of(config, 1)
    assert results[0].norm > 1e-2
    # m = (1 - beta1) * clipped gradient after the first step.
    clipped = state.optimizer["m"].norm() / (1 - config.beta1)
    assert abs(clipped - 1e-3) < 1e-6


def test_overfitting_one_batch_drives_the_loss_down(config: RunConfig) -> None:
    settings = {"overfit_one_batch": True, "steps": 60, "learning_rate": 1e-2, "warmup_steps": 5}
    _, results = steps_of(dataclasses.replace(config, **settings), 60)
    assert results[-1].loss < 0.5 * math.log(13), "one batch of a thirteen-word text must be learnt by heart"
    assert min(r.loss for r in results) == min(r.loss for r in results[-10:])


@pytest.fixture
def new_objects() -> Iterator[None]:
    """`gc.get_objects` lists the objects of this test alone: other tests leave tensors without memory behind."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.usefixtures("new_objects")
def test_no_buffer_is_made_after_the_first_step(config: RunConfig) -> None:
    """All state lies in the planned allocations, and a step leaves no new tensor behind."""
    training = assembly_of(config)
    state = training.state
    planned = {t.untyped_storage().data_ptr() for t in (state.parameters, state.master, *state.optimizer.values())}
    for structure in (state, state.weights, state.weight_gradients, state.activations, state.activation_gradients):
        planned |= {t.untyped_storage().data_ptr() for t in tensors_in(structure)}
    assert len(planned) == len(state.design.plan.size_bytes), "one allocation per kind, all lies in one of them"

    def living() -> set[int]:
        gc.collect()
        return {t.untyped_storage().data_ptr() for t in gc.get_objects() if type(t) is torch.Tensor}

    training.stepper.step(0)
    before = living()
    assert before >= planned, "the search finds the planned allocations"
    for step in range(1, 5):
        training.stepper.step(step)
    assert living() <= before


@pytest.mark.parametrize("backend", ["reference", "auto"])
def test_a_step_on_a_cpu_frees_the_temporaries_of_its_operations(config: RunConfig, backend: str) -> None:
    """Torch allocates within its calls, beside the plan; a step ends with the bytes that it began with."""
    step = assembly_of(dataclasses.replace(config, backend=backend)).stepper
    step.step(0)
    with torch.profiler.profile(profile_memory=True) as seen:
        step.step(1)
    changes = [event.self_cpu_memory_usage for event in seen.events()]
    assert max(changes) > 0 and sum(changes) == 0


def tensors_in(structure: object) -> list[torch.Tensor]:
    found = []
    for value in vars(structure).values():
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, list):
            found += [t for item in value if hasattr(item, "__dict__") for t in tensors_in(item)]
    return found


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant", "wsd", "trapezoid"])
def test_schedules(config: RunConfig, schedule: str) -> None:
    settings = {"steps": 100, "warmup_steps": 10, "learning_rate": 1.0, "final_learning_rate_fraction": 0.1}
    resolved = schedule_of(dataclasses.replace(config, schedule=schedule, **settings))
    rates = [resolved.rate(step) for step in range(101)]
    assert rates[0] == 0.1 and rates[9] == 1.0 and rates[10] == 1.0
    if schedule == "constant":
        assert set(rates[9:]) == {1.0}
        return
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert abs(rates[100] - 0.1) < 1e-12 and resolved.rate(150) == rates[100], "it stays where it ends"
    middle = {"cosine": 0.55, "linear": 0.55, "wsd": 1.0, "trapezoid": 1.0}[schedule]
    assert abs(rates[55] - middle) < 1e-12
    if schedule == "wsd":
        assert rates[80] == 1.0 and abs(rates[85] - (0.1 + 0.9 * (1 - math.sqrt(0.25)))) < 1e-12
    if schedule in ("wsd", "trapezoid"):
        whole = schedule_of(dataclasses.replace(config, schedule=schedule, **settings, cooldown_fraction=1.0))
        assert whole.rate(9) == whole.rate(10) == 1.0 > whole.rate(11), "the cooldown waits for the warm-up"
    if schedule == "trapezoid":
        assert rates[80] == 1.0 and abs(rates[85] - (0.1 + 0.9 * 0.75)) < 1e-12
        longer = schedule_of(dataclasses.replace(config, schedule=schedule, **settings, cooldown_fraction=0.5))
        assert longer.rate(50) == 1.0 and abs(longer.rate(75) - 0.55) < 1e-12
        rounded = dataclasses.replace(longer, cooldown_fraction=0.29)  # of 100 steps 28.999999999999996
        assert rounded.rate(71) == 1.0 > rounded.rate(72)


def test_a_step_asks_its_schedule_once(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rate that a step reports is the rate it sent to the device."""
    rate, asked = Schedule.rate, list[int]()
    monkeypatch.setattr(Schedule, "rate", lambda schedule, step: asked.append(step) or rate(schedule, step))
    training = assembly_of(config)
    rates = [training.stepper.step(step).learning_rate for step in range(3)]
    assert asked == [0, 1, 2] and rates == [rate(training.design.schedule, step) for step in range(3)]


@pytest.mark.parametrize("largest", [3, 40_000, 65_535, 65_536, 1 << 20])
def test_positions_are_sorted_by_token(largest: int) -> None:
    """And equal tokens stay in their order, in which their gradients are added; of small and of large vocabularies."""
    tokens = torch.randint(largest + 1, (3, 40), generator=torch.Generator().manual_seed(0))
    tokens[0, :4] = tokens[2, :4] = torch.tensor([largest, 0, largest, 1])
    positions = torch.empty(120, dtype=torch.int32)
    sort_positions(positions, tokens)
    assert positions.tolist() == sorted(range(120), key=lambda place: (int(tokens.flatten()[place]), place))


def test_a_step_launched_ahead_leaves_the_length_of_the_one_before(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock that ticks once a reading: a step lasts from its own beginning to its own end."""
    step, ticks = assembly_of(config).stepper, itertools.count(100)
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(ticks)))
    step.begin(0)
    step.finish(0)
    step.begin(1)
    assert step.result(0).elapsed_seconds == 1.0
    step.finish(1)
    assert step.result(1).elapsed_seconds == 1.0


def test_the_verdict_is_on_the_window_before_the_step(config: RunConfig) -> None:
    """Skipped steps do not enter the window: the third spike in a row stands out as much as the first."""
    config = dataclasses.replace(config, skip_loss_z=4.0)
    stepper = assembly_of(config).stepper
    stepper.loss_window = SpikeWindow([0.1 * (i % 2) for i in range(WINDOW)])
    stepper.norm_window = SpikeWindow([2.0 + i % 2 for i in range(WINDOW)])
    for step in range(3):
        result = stepper.step(step)
        assert result.loss_z is not None and abs(result.loss_z - (result.loss - 0.05) / 0.05) < 1e-6
        assert result.norm_z is not None and abs(result.norm_z - (result.norm - 2.5) / 0.5) < 1e-6
        assert result.skipped is not None and "loss" in result.skipped and result.loss_z > 11.3


def test_clipping_can_be_turned_off(config: RunConfig) -> None:
    state, results = steps_of(dataclasses.replace(config, clip_norm=0.0), 1)
    assert results[0].norm > 1
    assert abs(state.optimizer["m"].norm() / (1 - config.beta1) - results[0].norm) < 1e-4 * results[0].norm


def test_what_may_change_in_a_resumed_run() -> None:
    """Only where things lie, or whether they are kept or made again, and how often they are looked at: nothing that touches
    a number."""
    free = {name for name, known in FIELDS.items() if known.metadata["free"]}
    where = {"data", "out", "teacher", "offload", "recompute", "reward_seconds"}
    how_often = {"audit_every", "eval_every", "sample_every", "log_every", "gpu_every", "save_every", "log_to"}
    ranks = {"zero", "check_ranks_every", "join_seconds", "silence_seconds", "stall_seconds"}
    of_those = {"eval_tokens", "eval_stride", "eval_tasks", "eval_task_examples", "sample_tokens"}
    kept = {"keep_checkpoints", "keep_every", "keep_best", "async_save"}
    assert free == where | how_often | ranks | of_those | kept


@pytest.mark.fault(41)
def test_largest_micro_batch_fits(config: RunConfig) -> None:
    """Beside the texts that the run writes: `check_fits` takes the same micro-batch."""
    budget = sum(memory_bytes(resolve(dataclasses.replace(config, micro_batch=2), 257)).values())
    assert [largest_micro_batch(config, 257, available) for available in (budget, budget - 1, 1000)] == [2, 1, 0]


def test_moments_of_bf16_take_half_and_learn_as_much(config: RunConfig) -> None:
    """The loss of the last ten of 40 steps, in float32: each moment is its float32 value but for 2^-8 of it, at random."""
    kept_state, kept = steps_of(config, 40)
    state, results = steps_of(dataclasses.replace(config, moments="bf16"), 40)
    assert state.optimizer["m"].dtype == state.optimizer["v"].dtype == torch.bfloat16
    assert kept_state.design.plan.total_bytes - state.design.plan.total_bytes == 4 * state.master.numel()
    ends = [sum(result.loss for result in found[-10:]) / 10 for found in (kept, results)]
    assert ends[0] < kept[0].loss - 1 and abs(ends[1] - ends[0]) < 2**-6 * ends[0]


def test_without_master_weights_training_learns_and_repeats(config: RunConfig) -> None:
    """bf16 alone: four bytes a parameter less, the same bits every time, and a loss near that with master weights."""
    config = dataclasses.replace(config, precision="bf16", learning_rate=3e-3, tokens_per_step=512)
    kept_state, kept = steps_of(config, 20)
    state, results = steps_of(dataclasses.replace(config, master_weights=False), 20)
    again, _ = steps_of(dataclasses.replace(config, master_weights=False), 20)
    assert state.master.dtype == torch.bfloat16 and torch.equal(state.master, again.master)
    assert kept_state.design.plan.total_bytes - state.design.plan.total_bytes == 4 * state.master.numel()
    assert results[-1].loss < results[0].loss - 1 and abs(results[-1].loss - kept[-1].loss) < 0.1 * kept[-1].loss
