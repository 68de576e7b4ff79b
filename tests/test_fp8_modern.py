"""The modern network in fp8, with and without its techniques: to the bit one whose products round their operands, near one
that rounds nothing; the forms of its tensors, its memory, its training."""

import dataclasses
import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from handgrad.joins.fp8.formats import E5M2, GRADIENT_FORMATS, SCALE, Quantized
from handgrad.joins.fp8.scaling import MOST_CALIBRATIONS, UNCALIBRATED
from handgrad.joins.fp8.tables import Fp8Gemms
from handgrad.run.resolve import resolve
from handgrad.settings.config import ModelShape, RunConfig
from handgrad.settings.presets import preset
from tests.conftest import Model, make_model, quantized_weights
from tests.fp8_models import (
    BOTH_OF_THE_HEAD,
    SETTINGS,
    RoundedModernProducts,
    bound,
    gemms_of,
    ignores_padding,
    is_as_near_as,
    rounds_its_operands,
    run,
)
from tests.techniques import USUAL, toggled
from tests.test_fp8_numbers import LARGEST, bits
from tests.test_fp8_training import found_in, steps_of
from tests.test_training import assembly_of

SHAPE = ModelShape(vocab_size=57, sequence_length=16, num_layers=2, num_heads=2, channels=32, architecture="modern")
SHAPE = replace(SHAPE, techniques=toggled(""))
BATCH, LENGTH = 3, 16
WITHOUT = ["rotary", "qk_norm", "rotary,qk_norm", "untied_head,softcap", ",".join(USUAL)]
SCALARS = "residual_scalars,input_scalars"  # with them
NEW = f"{SCALARS},value_embeddings"
WITHOUT += [NEW, "value_embeddings,rotary,qk_norm", SCALARS, "residual_scalars", "input_scalars"]


def make(
    dtype: torch.dtype,
    fp8: Fp8Gemms | None = None,
    gradients: str = "e5m2",
    *,
    recompute: int = 0,
    without: str = "",
    private: bool = False,
) -> Model:
    settings = {
        "private": private,
        "recompute": recompute,
        "chunk": 20,
        "fp8": fp8,
        "gradients": GRADIENT_FORMATS[gradients],
    }
    return make_model(replace(SHAPE, techniques=toggled(without)), BATCH, LENGTH, dtype, **settings)


CASES = [*((name, "") for name in SETTINGS), *((name, without) for name in ("all and head",) for without in WITHOUT)]


@pytest.mark.parametrize(("name", "without"), CASES)
def test_the_products_that_are_wanted_and_no_others_round_their_operands(name: str, without: str) -> None:
    plain = make(torch.bfloat16, without=without)
    plain.ops = RoundedModernProducts(plain, *SETTINGS[name])
    rounds_its_operands(plain, lambda level: make(torch.bfloat16, *SETTINGS[name], recompute=level, without=without))


@pytest.mark.parametrize(("name", "without"), CASES)
def test_gradients_are_as_near_as_the_formats_admit(name: str, without: str) -> None:
    """The square doubles the relative error of the product that enters it, which is four times its square: the two
    roundoffs of each `fc` count three times more."""
    exact, rounded = make(torch.float32, without=without), make(torch.float32, *SETTINGS[name], without=without)
    is_as_near_as(bound(*SETTINGS[name], of_each_mlp=3 * 2), exact, rounded)


@pytest.mark.parametrize("without", ["", "untied_head"])
def test_the_padded_vocabulary_touches_nothing(without: str) -> None:
    V, gemms = SHAPE.vocab_size, gemms_of("", BOTH_OF_THE_HEAD)
    clean, poisoned = (make(torch.bfloat16, gemms, without=without) for _ in range(2))
    ignores_padding(clean, poisoned)
    assert (clean.table[-1].view(clean.flat_gradients)[V:] == 0).all() or without, "padded rows have no gradient"


def test_a_tensor_has_the_forms_that_are_read_and_no_others() -> None:
    """Attention's backward passes through 16 bits where something stands before the product; the hidden layer keeps them
    for the slope."""
    model = make(torch.bfloat16, gemms_of("0.qkv", "dgrad"))
    first, second = model.act.blocks
    assert isinstance(first.norm1, Tensor) and isinstance(model.weights.blocks[0].qkv_weight, Tensor)
    assert isinstance(second.norm1, Quantized) and second.norm1.plain is None
    assert isinstance(second.hidden, Quantized) and second.hidden.plain is not None
    gradients = [block.dqkv for block in model.d.blocks]
    assert isinstance(gradients[0], Tensor) and isinstance(gradients[1], Quantized)
    assert gradients[1].plain is None and gradients[1].workspace is not None
    unturned = make(torch.bfloat16, gemms_of(), without="rotary,qk_norm").d.blocks[1].dqkv
    assert unturned.workspace is None, "it is quantised by attention itself"
    mixed, gated = (make(torch.bfloat16, gemms_of(), without=names).act.blocks[1].norm1 for names in (SCALARS, NEW))
    assert mixed.plain is None and gated.plain is not None, "the gates alone read 16 bits"
    assert isinstance(model.weights.wte, Tensor) and model.weights.head.rows is None, "its forward stays in 16 bits"
    for name, weight in quantized_weights(model).items():
        if name != "wte":
            assert torch.equal(bits(weight.columns), bits(weight.rows).t()), name


def test_the_memory_of_a_run() -> None:
    """The preset m12. The two fp8 forms of the weights cost what bf16 weights take once more, the head's as well."""

    def sizes(**settings: str) -> dict[str, int]:
        return resolve(replace(preset("m12"), device="cpu", techniques=toggled(""), **settings), 50257).plan.size_bytes

    bf16, fp8, blocks = sizes(precision="bf16"), sizes(precision="fp8"), sizes(precision="fp8", fp8_head="none")
    assert fp8["fp8 weights"] == 2 * (12 * 12 * 768 + 50304) * 768
    assert fp8["fp8 scales"] < 1 << 20
    assert blocks["activations"] < bf16["activations"], "a byte per token, layer and channel less"


# Training.


@pytest.fixture
def fp8(config: RunConfig) -> RunConfig:
    settings = {"precision": "fp8", "fp8_window": 2, "fp8_count_every": 1, "fp8_head": BOTH_OF_THE_HEAD}
    modern_run = {
        "architecture": "modern",
        "techniques": toggled(""),
        "optimizer": "muon",
        "learning_rate": 1e-2,
        "warmup_steps": 0,
    }
    return dataclasses.replace(config, **settings, **modern_run)


@pytest.mark.nightly(but=["residual_scalars,input_scalars,value_embeddings", "softcap,rotary,qk_norm"])
@pytest.mark.parametrize("without", ["", "untied_head", "softcap,rotary,qk_norm", NEW])
def test_training_in_fp8_learns_what_training_in_bf16_learns(fp8: RunConfig, without: str) -> None:
    """Ten steps that take the loss down by more than a half differ by less than a tenth of that."""
    settings = {"steps": 10, "techniques": toggled(without)}
    bf16, rounded = (steps_of(dataclasses.replace(fp8, precision=p, **settings), 10)[1] for p in ("bf16", "fp8"))
    assert rounded[-1].loss < rounded[0].loss - 0.5
    for a, b in zip(bf16, rounded, strict=True):
        assert abs(a.loss - b.loss) < 0.05


@pytest.mark.nightly(but=["delayed-mixed-residual_scalars,input_scalars", "current-e4m3-residual_scalars,input_scalars"])
@pytest.mark.parametrize(
    ("scaling", "gradients", "without"),
    [("delayed", "e4m3", ""), ("delayed", "mixed", SCALARS), ("current", "mixed", ""), ("current", "e4m3", SCALARS)],
)
def test_recompute_levels_give_the_same_bits(fp8: RunConfig, scaling: str, gradients: str, without: str) -> None:
    fp8 = dataclasses.replace(fp8, fp8_scaling=scaling, fp8_gradients=gradients, techniques=toggled(without))
    expected, *told = steps_of(fp8, 3)
    for recompute in (1, 2, 3):
        training, *told_too = steps_of(dataclasses.replace(fp8, recompute=recompute), 3)
        assert told_too == told
        assert torch.equal(training.state.master, expected.state.master)


@pytest.mark.parametrize("without", ["", "untied_head", SCALARS])
def test_every_quantised_tensor_is_counted_whole(fp8: RunConfig, without: str) -> None:
    training, _, found = steps_of(dataclasses.replace(fp8, techniques=toggled(without)), 3)
    N, C, Vp = fp8.micro_batch * fp8.sequence_length, fp8.channels, training.design.shape.padded_vocab_size
    per_token = {"norm1": 1, "dqkv": 3, "atty": 1, "dresidual_mid": 1, "norm2": 1, "hidden": 4, "dhidden": 4}
    sizes = {name: width * C * N for name, width in (per_token | {"dresidual_out": 1, "lnf": 1}).items()}
    sizes |= {"qkv_weight": 3 * C * C, "proj_weight": C * C, "fc_weight": 4 * C * C, "fcproj_weight": 4 * C * C}
    sizes |= {"wte" if without == "untied_head" else "head": Vp * C}
    resolved, scaling = training.design.fp8, training.scaling
    assert len(resolved.table) == 12 * fp8.num_layers + 2 == len({row.name for row in resolved.table})
    assert scaling is not None
    assert scaling.numbers == [sizes[row.name.rpartition(".")[2]] for row in resolved.table]
    assert all(line.amax > 0 for line in found[2])


def test_a_tensor_that_begins_as_zeros_has_a_scale_when_it_is_none(fp8: RunConfig) -> None:
    """Head and projections are 0 in the first step, so the stream's gradient is until the second and those in the branches
    until the third. Each is quantised at a scale for its own numbers from the first on."""
    training = assembly_of(fp8)
    scaling, seen = training.scaling, []
    assert scaling is not None
    for step in range(4):
        _, found = found_in(training, step)
        seen.append({line.name for line in found if line.amax > 0})
        assert scaling.calibrated_from == (2 if step >= 2 else None)
        for line in found:
            assert line.amax == 0 or (line.scale != 1 and line.limit / 16 < line.amax <= 4 * line.limit), (step, line)
    names = {row.name for row in training.design.fp8.table}
    weights = {f"blocks.{layer}.{name}_weight" for layer in range(fp8.num_layers) for name in ("proj", "fcproj")}
    assert seen[0].isdisjoint({"head", "blocks.0.dresidual_mid", *weights}) and "head" in seen[1]
    assert "blocks.1.dresidual_out" in seen[1] and "blocks.1.dqkv" not in seen[1] and seen[2] == seen[3] == names


def test_a_frozen_zero_is_waited_for_a_few_steps_only(fp8: RunConfig) -> None:
    training = assembly_of(dataclasses.replace(fp8, freeze="blocks.1.proj_weight", steps=12))
    assert training.scaling is not None
    for step in range(10):
        assert training.scaling.calibrates(step) == (step < MOST_CALIBRATIONS)
        training.stepper.step(step)
    assert training.scaling.calibrated_from == MOST_CALIBRATIONS - 1
    assert training.scaling.calibrates(MOST_CALIBRATIONS - 2), "if that step is begun again, behind the one launched ahead"


def test_a_step_before_all_scales_is_resumed_and_begun_again_with_the_same_bits(fp8: RunConfig) -> None:
    """From what a checkpoint holds of the scales; and where the third step has begun when the second is made again."""
    whole, resumed = assembly_of(fp8), assembly_of(fp8)
    for step in range(2):
        whole.stepper.step(step)
    assert whole.scaling is not None and resumed.scaling is not None
    saved = whole.scaling.saved()
    assert saved[UNCALIBRATED] is True
    for name in ("parameters", "master", *(f"optimizer.{name}" for name in whole.design.optimizer_state)):
        resumed.state.views[name].copy_(whole.state.views[name])
    assert resumed.scaling.restore(saved) and not resumed.scaling.calibrated
    for training in (whole, resumed):
        training.stepper.step(2)
    assert UNCALIBRATED not in whole.scaling.saved() and whole.scaling.saved() == resumed.scaling.saved()
    assert torch.equal(whole.state.master, resumed.state.master)

    again = assembly_of(fp8)
    again.stepper.step(0)
    again.stepper.begin(1)
    again.stepper.run_before_step(2)  # as a launch ahead does
    again.stepper.relaunch(1)
    again.stepper.finish(1)
    again.stepper.result(1)
    again.stepper.step(2)
    assert torch.equal(whole.state.master, again.state.master)


@pytest.mark.parametrize("without", ["", "softcap", "untied_head"])
def test_the_static_scale_of_the_logits_clips_nothing_and_never_moves(fp8: RunConfig, without: str) -> None:
    """No number of their gradient is larger than 1 / tokens_per_step, as the slope of the cap is at most 1; and twice that
    would be too large for the scale."""
    training, _, _ = steps_of(dataclasses.replace(fp8, techniques=toggled(without)), 3)
    logits = training.state.activations.logits
    assert logits.format == E5M2
    scale = logits.scaling[SCALE].item()
    assert math.log2(scale).is_integer()
    assert LARGEST[E5M2] / 4 < scale / fp8.tokens_per_step <= LARGEST[E5M2]


@pytest.mark.parametrize("without", ["", "softcap", "untied_head"])
def test_the_logits_gradient_clips_nothing_at_its_static_scale(without: str) -> None:
    """The slope of the cap, at most 1, makes it smaller alone."""
    model = make(torch.bfloat16, gemms_of("", BOTH_OF_THE_HEAD), without=without, private=True)
    run(model)
    logits = model.act.logits
    plain, scale = logits.plain.float(), logits.scaling[SCALE]
    assert 0 < plain.abs().max() <= 1 and scale == 2.0**15
    assert torch.equal(logits.rows.float(), (plain * scale).to(E5M2).float()), "nothing was clipped"
