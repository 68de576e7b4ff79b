"""Steps in fp8: scales that follow the numbers, counts that are right, a padding that stays what it is."""

import dataclasses
import math

import pytest
import torch

from handgrad.joins.fp8.formats import AMAX, E4M3, E5M2, GRADIENT_FORMATS, MARGIN, SCALE
from handgrad.joins.fp8.scaling import Finding, findings, weights_of
from handgrad.joins.fp8.tables import WEIGHT
from handgrad.run.assemble import Assembly
from handgrad.settings.config import RunConfig
from handgrad.training.step import StepResult
from tests.test_fp8_numbers import LARGEST, largest_scales, nearest_codes
from tests.test_training import assembly_of


@pytest.fixture
def fp8(config: RunConfig) -> RunConfig:
    settings = {"precision": "fp8", "fp8_window": 2, "fp8_count_every": 1, "fp8_head": "forward,dgrad"}
    return dataclasses.replace(config, **settings)


Findings = tuple[Finding, ...]


def found_in(training: Assembly, step: int) -> tuple[StepResult, Findings]:
    """A step, and its statistics of the quantised tensors."""
    result, batch, scaling = training.stepper.step(step), training.design.batch, training.scaling
    if scaling is None:
        return result, ()
    micro_steps = batch.lanes * batch.micro_steps(step)
    return result, findings(scaling, result.reports["fp8"], micro_steps, counted=scaling.fp8.counts(step))


def steps_of(config: RunConfig, count: int) -> tuple[Assembly, list[StepResult], list[Findings]]:
    training = assembly_of(config)
    made = [found_in(training, step) for step in range(count)]
    return training, [result for result, _ in made], [found for _, found in made]


@pytest.mark.parametrize(("window", "gradients"), [(1, "e5m2"), (3, "e4m3"), (2, "mixed")])
def test_a_scale_is_made_for_the_largest_number_of_the_last_steps(fp8: RunConfig, window: int, gradients: str) -> None:
    """Of all tensors, weights too, in every step after the first."""
    settings = {"fp8_window": window, "fp8_gradients": gradients, "fp8_margin": 1, "steps": 6, "learning_rate": 1e-2}
    config = dataclasses.replace(fp8, **settings)
    training, _, found = steps_of(config, 6)
    for place, row in enumerate(training.design.fp8.table):
        lines = [of_step[place] for of_step in found]
        assert {line.name for line in lines} == {row.name}
        kind = GRADIENT_FORMATS[gradients][0] if row.name.rpartition(".")[2].startswith("d") else E4M3
        for step in range(1, 6):
            amax = max(line.amax for line in lines[max(0, step - window) : step])
            expected = largest_scales(torch.tensor([amax]), kind, 1).item()
            assert lines[step].scale == expected, f"{row.name} in step {step}"
            assert lines[step].limit == LARGEST[kind] / expected
    assert len({tuple(line.scale for line in of_step) for of_step in found}) > 1, "the scales move"


def test_the_largest_numbers_are_those_of_the_tensors(fp8: RunConfig) -> None:
    """With one micro-batch, what the step leaves in memory is what it has measured."""
    config = dataclasses.replace(fp8, micro_batch=8)
    training = assembly_of(config)
    training.stepper.begin(0)
    state, scaling = training.state, training.scaling
    assert scaling is not None and config.micro_steps == 1
    found = {row.name: total[AMAX].item() for row, total in zip(scaling.fp8.table, scaling.totals, strict=True)}
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
    training = assembly_of(config)
    scaling = training.scaling
    assert scaling is not None and config.micro_steps == 2
    training.stepper.run_before_step(0)
    vanished = {}
    for weight in weights_of(scaling.tensors):
        codes = nearest_codes(weight.plain.double() * weight.scaling[SCALE], E4M3)
        vanished[weight.scaling.data_ptr()] = ((codes == 0) & (weight.plain != 0)).double().mean().item()
    _, found = found_in(training, 0)
    for row, numbers, line in zip(scaling.fp8.table, scaling.scaling[:-1], found, strict=True):
        assert line.clipped is not None and 0 <= line.clipped <= 1 and 0 <= line.vanished <= 1, row.name
        if row.kind == WEIGHT:
            assert math.isclose(line.vanished, vanished[numbers.data_ptr()]) and line.vanished > 0, row.name
        assert line.clipped <= 0.01, "the second micro-batch alone can be larger than the first, and hardly is"


def test_calibrated_scales_are_those_of_the_first_micro_batch(fp8: RunConfig) -> None:
    """With a single micro-batch, delayed scales give the first step the bits of current ones."""
    (one, results, found), (other, other_results, other_found) = (
        steps_of(dataclasses.replace(fp8, micro_batch=8, fp8_scaling=s), 1) for s in ("delayed", "current")
    )
    assert (results, found) == (other_results, other_found)
    assert torch.equal(one.state.master, other.state.master)
    assert all(line.clipped == 0 and line.saturated_steps == 0 for line in found[0])


def test_current_scales_never_clip(fp8: RunConfig) -> None:
    """Each micro-batch has its own; that one of them is larger than the last one is no saturation."""
    config = dataclasses.replace(
        fp8, fp8_scaling="current", fp8_on_saturation="widen", fp8_saturation_steps=1, micro_batch=1
    )
    training, _, found = steps_of(config, 5)
    for of_step in found:
        assert all(line.clipped == 0 for line in of_step)
        assert [line.name for line in of_step if line.saturated_steps] == []
    assert training.scaling is not None and (training.scaling.scaling[:, MARGIN] == 0).all()


@pytest.mark.parametrize("settings", [{}, {"fp8_scaling": "current"}, {"recompute": 2}, {"fp8_gradients": "e4m3"}], ids=str)
def test_the_padding_stays_zero_and_unseen(fp8: RunConfig, settings: dict) -> None:
    """The padded rows of the embedding, in fp8, too; its amax is that of the rows of words."""
    training, _, found = steps_of(dataclasses.replace(fp8, weight_decay=0.5, **settings), 3)
    state, V = training.state, training.design.shape.vocab_size
    head = state.weights.head
    assert (head.plain[V:] == 0).all() and (head.rows[V:].float() == 0).all() and (head.columns[:, V:].float() == 0).all()
    assert head.statistics[AMAX].max() == state.plain_weights.wte[:V].float().abs().max()
    assert all(math.isfinite(line.amax) for of_step in found for line in of_step)


@pytest.mark.parametrize(("tokens", "micro_batch"), [(384, 3), (256, 4)])
def test_the_static_scale_of_the_logits_clips_nothing_and_never_moves(
    fp8: RunConfig, tokens: int, micro_batch: int
) -> None:
    """No number of their gradient is larger than 1 / tokens_per_step, and twice that would be too large for the scale."""
    config = dataclasses.replace(fp8, tokens_per_step=tokens, micro_batch=micro_batch)
    training, _, _ = steps_of(config, 3)
    logits = training.state.activations.logits
    assert logits.format == E5M2
    scale = logits.scaling[SCALE].item()
    assert math.log2(scale).is_integer()
    assert LARGEST[E5M2] / 4 < scale / config.tokens_per_step <= LARGEST[E5M2]


@pytest.mark.parametrize("recompute", [0, 1, 2, 3])
def test_recompute_levels_and_second_runs_give_the_same_bits(fp8: RunConfig, recompute: int) -> None:
    expected, *told = steps_of(fp8, 3)
    training, *told_too = steps_of(dataclasses.replace(fp8, recompute=recompute), 3)
    assert told_too == told
    assert torch.equal(training.state.master, expected.state.master)
    assert expected.scaling is not None and training.scaling is not None
    assert torch.equal(training.scaling.scaling, expected.scaling.scaling)


def test_training_in_fp8_learns_what_training_in_bf16_learns(fp8: RunConfig) -> None:
    """Ten steps that take the loss down by more than a half differ by less than a tenth of that."""
    settings = {"steps": 10, "learning_rate": 1e-2, "warmup_steps": 0}
    bf16, rounded = (steps_of(dataclasses.replace(fp8, precision=p, **settings), 10)[1] for p in ("bf16", "fp8"))
    assert rounded[-1].loss < rounded[0].loss - 0.5
    for a, b in zip(bf16, rounded, strict=True):
        assert abs(a.loss - b.loss) < 0.05


def test_numbers_that_are_not_finite_reach_no_scale(fp8: RunConfig) -> None:
    """After a step of NaN, which is skipped, the scales are those for the step before it; the next step is a good one."""
    training = assembly_of(fp8)
    bias = training.state.weights.lnf_bias
    first, *found = found_in(training, 0)
    before = bias.clone()
    bias.fill_(math.nan)
    second, found_in_second = found_in(training, 1)
    bias.copy_(before)
    third, found_in_third = found_in(training, 2)
    found += [found_in_second, found_in_third]
    assert first.skipped is None and "loss is nan" in (second.skipped or "") and third.skipped is None
    assert sum(line.amax == 0 for line in found[1]) == 1 + 4 * fp8.num_layers, "the head's input and all gradients"
    for row, *lines in zip(training.design.fp8.table, *found, strict=True):
        amax = torch.tensor([max(lines[0].amax, lines[1].amax)])
        assert lines[2].scale == largest_scales(amax, row.format, 0).item(), row.name


def test_every_quantised_tensor_is_counted_whole(fp8: RunConfig) -> None:
    training = assembly_of(fp8)
    N, C, Vp = fp8.micro_batch * fp8.sequence_length, fp8.channels, training.design.shape.padded_vocab_size
    per_token = {"ln1": 1, "dqkv": 3, "atty": 1, "dresidual_mid": 1, "ln2": 1, "gelu": 4, "dhidden": 4, "dresidual_out": 1}
    sizes = {name: width * C * N for name, width in per_token.items()} | {"lnf": N * C, "wte": Vp * C}
    sizes |= {"qkv_weight": 3 * C * C, "proj_weight": C * C, "fc_weight": 4 * C * C, "fcproj_weight": 4 * C * C}
    resolved, scaling = training.design.fp8, training.scaling
    assert len(resolved.gemms.blocks) == 3 * fp8.num_layers
    assert len(resolved.table) == 12 * fp8.num_layers + 2 == len({row.name for row in resolved.table})
    assert scaling is not None
    assert scaling.numbers == [sizes[row.name.rpartition(".")[2]] for row in resolved.table]
