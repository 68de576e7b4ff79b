"""Steps in fp8: scales that follow the numbers, counts that are right, a padding that stays what it is."""

import dataclasses
import math

import pytest
import torch

from handgrad.backend import choose_backend
from handgrad.config import RunConfig
from handgrad.data.batches import Batches
from handgrad.data.shards import open_dataset
from handgrad.fp8.formats import AMAX, E4M3, E5M2, FORMATS, MARGIN, SCALE
from handgrad.fp8.tables import WEIGHT, fp8_products
from handgrad.training.feed import BatchFeed
from handgrad.training.state import TrainingState, allocate_state
from handgrad.training.step import Stepper, StepResult
from tests.test_fp8_numbers import LARGEST, largest_scales, nearest_codes

CPU = torch.device("cpu")


@pytest.fixture
def fp8(config: RunConfig) -> RunConfig:
    settings = {"precision": "fp8", "fp8_window": 2, "fp8_count_every": 1, "fp8_head": "forward,dgrad"}
    return dataclasses.replace(config, **settings)


def stepper_of(config: RunConfig) -> Stepper:
    dataset = open_dataset(config.data)
    shape = config.shape(dataset.tokenizer.vocab_size)
    dtype = torch.float32 if config.precision == "fp32" else torch.bfloat16
    state = allocate_state(config, shape, dtype, CPU, choose_backend("reference", CPU, config.precision))
    return Stepper(config, state, BatchFeed(Batches(dataset.splits["train"], config.sequence_length, 1), state.activations))


def steps_of(config: RunConfig, count: int) -> tuple[TrainingState, list[StepResult]]:
    stepper = stepper_of(config)
    return stepper.state, [stepper.step(step) for step in range(count)]


@pytest.mark.parametrize(("window", "gradients"), [(1, "e5m2"), (3, "e4m3")])
def test_a_scale_is_made_for_the_largest_number_of_the_last_steps(fp8: RunConfig, window: int, gradients: str) -> None:
    """Of all tensors, weights too, in every step after the first."""
    settings = {"fp8_window": window, "fp8_gradients": gradients, "fp8_margin": 1, "steps": 6, "learning_rate": 1e-2}
    config = dataclasses.replace(fp8, **settings)
    state, results = steps_of(config, 6)
    assert state.scaling is not None
    for place, row in enumerate(state.scaling.table):
        lines = [result.quantized[place] for result in results]
        assert {line.name for line in lines} == {row.name}
        kind = FORMATS[gradients] if row.name.rpartition(".")[2].startswith("d") else E4M3
        for step in range(1, 6):
            amax = max(line.amax for line in lines[max(0, step - window) : step])
            expected = largest_scales(torch.tensor([amax]), kind, 1).item()
            assert lines[step].scale == expected, f"{row.name} in step {step}"
            assert lines[step].limit == LARGEST[kind] / expected
    assert len({tuple(line.scale for line in result.quantized) for result in results}) > 1, "the scales move"


def test_the_largest_numbers_are_those_of_the_tensors(fp8: RunConfig) -> None:
    """With one micro-batch, what the step leaves in memory is what it has measured."""
    config = dataclasses.replace(fp8, micro_batch=8)
    stepper = stepper_of(config)
    stepper.begin(0)
    state = stepper.state
    assert state.scaling is not None and config.micro_steps == 1
    found = {row.name: total[AMAX].item() for row, total in zip(state.scaling.table, state.scaling.totals, strict=True)}
    plain = {"wte": state.plain_weights.head}
    for layer, block in enumerate(state.plain_weights.blocks):
        plain |= {f"blocks.{layer}.{name}": getattr(block, name) for name in vars(block)}
        plain[f"blocks.{layer}.atty"] = state.activations.blocks[layer].atty.plain
    named = [name for name in found if name in plain]
    assert len(named) == 1 + 2 * 5
    for name in named:
        assert found[name] == plain[name].float().abs().max().item(), name
    assert all(amax > 0 for amax in found.values())


def test_numbers_are_counted_in_every_micro_batch(fp8: RunConfig) -> None:
    """A weight's fraction of vanished numbers, counted one by one; fractions are of all numbers that were quantised."""
    config = dataclasses.replace(fp8, fp8_margin=8)
    stepper = stepper_of(config)
    state = stepper.state
    assert state.scaling is not None and config.micro_steps == 2
    stepper.calibrate(0)
    vanished = {}
    for weight in state.scaling.weights:
        codes = nearest_codes(weight.plain.double() * weight.scaling[SCALE], E4M3)
        vanished[weight.scaling.data_ptr()] = ((codes == 0) & (weight.plain != 0)).double().mean().item()
    result = stepper.step(0)
    rows = zip(state.scaling.table, state.scaling.scaling, result.quantized, strict=False)
    for row, scaling, line in rows:
        assert line.clipped is not None and 0 <= line.clipped <= 1 and 0 <= line.vanished <= 1, row.name
        if row.kind == WEIGHT:
            assert math.isclose(line.vanished, vanished[scaling.data_ptr()]) and line.vanished > 0, row.name
        assert line.clipped <= 0.01, "the second micro-batch alone can be larger than the first, and hardly is"


def test_calibrated_scales_are_those_of_the_first_micro_batch(fp8: RunConfig) -> None:
    """Where it is the only one, delayed scales give the first step the bits of current ones."""
    states, results = zip(
        *(steps_of(dataclasses.replace(fp8, micro_batch=8, fp8_scaling=s), 1) for s in ("delayed", "current")), strict=True
    )
    assert results[0] == results[1]
    assert torch.equal(states[0].master, states[1].master)
    assert all(line.clipped == 0 and line.saturated_steps == 0 for line in results[0][0].quantized)


def test_current_scales_never_clip(fp8: RunConfig) -> None:
    """Each micro-batch has its own; that one of them is larger than the last one is no saturation."""
    config = dataclasses.replace(
        fp8, fp8_scaling="current", fp8_on_saturation="widen", fp8_saturation_steps=1, micro_batch=1
    )
    state, results = steps_of(config, 5)
    assert state.scaling is not None
    for result in results:
        assert all(line.clipped == 0 for line in result.quantized)
        assert [line.name for line in result.quantized if line.saturated_steps] == []
    assert (state.scaling.scaling[:, MARGIN] == 0).all()


@pytest.mark.parametrize("settings", [{}, {"fp8_scaling": "current"}, {"recompute": 2}, {"fp8_gradients": "e4m3"}], ids=str)
def test_the_padding_stays_zero_and_unseen(fp8: RunConfig, settings: dict) -> None:
    """The padded rows of the embedding, in fp8, too; its amax is that of the rows of words."""
    state, results = steps_of(dataclasses.replace(fp8, weight_decay=0.5, **settings), 3)
    V = state.shape.vocab_size
    head = state.weights.head
    assert (head.plain[V:] == 0).all() and (head.rows[V:].float() == 0).all() and (head.columns[:, V:].float() == 0).all()
    assert head.statistics[AMAX].max() == state.plain_weights.wte[:V].float().abs().max()
    assert all(torch.isfinite(torch.tensor([line.amax for line in result.quantized])).all() for result in results)


def test_the_static_scale_of_the_logits_clips_nothing_and_never_moves(fp8: RunConfig) -> None:
    """No number of their gradient is larger than 1 / tokens_per_step, and twice that would be too large for the scale."""
    config = dataclasses.replace(fp8, tokens_per_step=384, micro_batch=3)
    state, _ = steps_of(config, 3)
    assert state.activations.dlogits is not None and state.activations.dlogits.format == E5M2
    scale = state.scaling.scaling[-1, SCALE].item()
    assert math.log2(scale).is_integer()
    assert LARGEST[E5M2] / 4 < scale / config.tokens_per_step <= LARGEST[E5M2]


@pytest.mark.parametrize("recompute", [0, 1, 2])
def test_recompute_levels_and_second_runs_give_the_same_bits(fp8: RunConfig, recompute: int) -> None:
    expected_state, expected = steps_of(fp8, 3)
    state, results = steps_of(dataclasses.replace(fp8, recompute=recompute), 3)
    assert results == expected
    assert torch.equal(state.master, expected_state.master)
    assert torch.equal(state.scaling.scaling, expected_state.scaling.scaling)


def test_training_in_fp8_learns_what_training_in_bf16_learns(fp8: RunConfig) -> None:
    """Ten steps that take the loss down by more than a half differ by less than a tenth of that."""
    settings = {"steps": 10, "learning_rate": 1e-2, "warmup_steps": 0}
    bf16, rounded = (steps_of(dataclasses.replace(fp8, precision=p, **settings), 10)[1] for p in ("bf16", "fp8"))
    assert rounded[-1].loss < rounded[0].loss - 0.5
    for a, b in zip(bf16, rounded, strict=True):
        assert abs(a.loss - b.loss) < 0.05


def test_numbers_that_are_not_finite_reach_no_scale(fp8: RunConfig) -> None:
    """After a step of NaN, which is skipped, the scales are those for the step before it; the next step is a good one."""
    stepper = stepper_of(fp8)
    bias = stepper.state.weights.lnf_bias
    first = stepper.step(0)
    before = bias.clone()
    bias.fill_(math.nan)
    second = stepper.step(1)
    bias.copy_(before)
    third = stepper.step(2)
    assert first.skipped is None and "loss is nan" in (second.skipped or "") and third.skipped is None
    assert sum(line.amax == 0 for line in second.quantized) == 1 + 4 * fp8.num_layers, "the head's input and all gradients"
    for row, *lines in zip(stepper.state.scaling.table, first.quantized, second.quantized, third.quantized, strict=True):
        amax = torch.tensor([max(lines[0].amax, lines[1].amax)])
        assert lines[2].scale == largest_scales(amax, row.format, 0).item(), row.name


def test_every_quantised_tensor_is_counted_whole(fp8: RunConfig) -> None:
    state = stepper_of(fp8).state
    N, C, Vp = fp8.micro_batch * fp8.sequence_length, fp8.channels, state.shape.padded_vocab_size
    per_token = {"ln1": 1, "dqkv": 3, "atty": 1, "dresidual_mid": 1, "ln2": 1, "gelu": 4, "dhidden": 4, "dresidual_out": 1}
    sizes = {name: width * C * N for name, width in per_token.items()} | {"lnf": N * C, "wte": Vp * C}
    sizes |= {"qkv_weight": 3 * C * C, "proj_weight": C * C, "fc_weight": 4 * C * C, "fcproj_weight": 4 * C * C}
    scaling = state.scaling
    assert len(fp8_products(fp8).blocks) == 3 * fp8.num_layers
    assert len(scaling.table) == 12 * fp8.num_layers + 2 == len({row.name for row in scaling.table})
    assert scaling.numbers == [sizes[row.name.rpartition(".")[2]] for row in scaling.table]
