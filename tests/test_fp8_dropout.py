"""Dropout where GEMMs run in fp8: masks come first, then the rounding."""

import dataclasses
import shutil
from pathlib import Path

import pytest
import torch

from handgrad.joins.dropout.bind import WithDropout
from handgrad.joins.fp8.formats import AMAX, GRADIENT_FORMATS, Quantized
from handgrad.models import compute_losses
from handgrad.run.header import dropout_lines
from handgrad.run.open import train
from handgrad.run.resolve import resolve
from handgrad.settings.config import RunConfig, check
from handgrad.training.feed import SAMPLE_NUMBERS
from tests.conftest import Model, make_model
from tests.fp8_models import SETTINGS, RoundedProducts, bound, gemms_of, rounds_its_operands, run
from tests.test_fp8_model import BATCH, LENGTH, SHAPE
from tests.test_fp8_training import steps_of
from tests.test_runs import elsewhere, same_bits

P = 0.3


def make(name: str | None, recompute: int = 0, p: float = P, *, dtype: torch.dtype = torch.bfloat16) -> Model:
    """In the settings of that name; without fp8 if there is none."""
    fp8, gradients = SETTINGS[name] if name else (None, "e5m2")
    settings = {"recompute": recompute, "chunk": 20, "fp8": fp8, "gradients": GRADIENT_FORMATS[gradients], "dropout": p}
    return make_model(SHAPE, BATCH, LENGTH, dtype, **settings)


@pytest.mark.parametrize("name", SETTINGS)
def test_a_product_rounds_its_operand_after_dropout(name: str) -> None:
    """At every recompute level, the bits of a model in 16 bits whose products round what dropout has left."""
    plain = make(None)
    rounding = RoundedProducts(plain, *SETTINGS[name])
    rounding.__name__ = "handgrad.ops.reference"
    tensors = plain.weights, plain.gradients, plain.act, plain.d
    plain.ops = WithDropout(rounding, *tensors, samples=torch.arange(BATCH), probability=P, seed=1337)
    rounds_its_operands(plain, lambda level: make(name, level))


def test_gradients_are_as_near_as_the_formats_admit() -> None:
    exact, model = make(None, dtype=torch.float32), make("all")
    exact.flat.copy_(model.flat)
    (_, wanted), (_, found) = run(exact), run(model)
    admitted = bound(*SETTINGS["all"])
    for row in exact.table:
        right = row.view(wanted)
        error = ((row.view(found) - right).norm() / right.norm()).item()
        assert 0 < error <= admitted, f"{row.name}: relative error {error:.3f}, admitted {admitted:.3f}"


def test_evaluation_leaves_nothing_out() -> None:
    """A validation in fp8 has the bits of a run without dropout."""
    losses = []
    for p in (P, 0.0):
        model = make("all", p=p)
        model.ops = make("all", p=0.0).ops
        compute_losses(model.ops, model.weights, model.act, SHAPE)
        losses.append(model.act.losses.clone())
    assert torch.equal(*losses)


@pytest.fixture
def fp8(config: RunConfig) -> RunConfig:
    return dataclasses.replace(config, precision="fp8", dropout=P, fp8_window=3, fp8_count_every=1)


def test_the_largest_numbers_are_those_after_dropout(fp8: RunConfig) -> None:
    """Current scales admit the tensor that the product reads. Kept numbers are larger by 1 / (1 - p): a scale made before
    dropout would clip them."""
    for scaling in ("delayed", "current"):
        config = dataclasses.replace(fp8, micro_batch=8, fp8_scaling=scaling)
        training, _, found = steps_of(config, 1)
        assert all(line.clipped == 0 and line.amax > 0 for line in found[0])
        block = training.state.activations.blocks[0]
        assert isinstance(block.atty, Quantized) and block.atty.plain is not None
        assert block.atty.statistics[AMAX].max() == block.atty.plain.abs().max()


def test_a_run_without_dropout_has_no_memory_for_it(fp8: RunConfig) -> None:
    without, with_dropout = (
        {buffer.name: buffer.shape for buffer in resolve(dataclasses.replace(fp8, dropout=p), 257).plan.buffers}
        for p in (0.0, P)
    )
    tokens = fp8.micro_batch * fp8.sequence_length
    more = {SAMPLE_NUMBERS: (fp8.micro_batch,), "dqkv_16_bits": (tokens, 3 * fp8.channels)}
    assert with_dropout == without | more


def test_the_header_says_what_quantising_adds(fp8: RunConfig) -> None:
    """Two layers: 24 passes over 4 x 32 tokens of 32 channels in 16 bits, and 8 a layer for what quantising reads and
    writes by itself; without `qkv` in fp8 2 a layer."""
    for keep, moved in (("", "320.0 KiB"), ("qkv", "224.0 KiB"), ("qkv,proj,mlp", "192.0 KiB")):
        config = dataclasses.replace(fp8, fp8_keep_bf16=keep)
        (line,) = dropout_lines(config, resolve(config, 257))
        assert line.endswith(f"masks take no memory, and a micro-batch moves {moved} more")


@pytest.mark.parametrize("settings", [{}, {"fp8_gradients": "mixed", "fp8_head": "forward,dgrad"}], ids=str)
def test_recompute_levels_give_the_same_bits(fp8: RunConfig, settings: dict) -> None:
    states = [steps_of(dataclasses.replace(fp8, recompute=level, **settings), 3) for level in (0, 1, 2, 3)]
    for training, results, found in states[1:]:
        assert torch.equal(training.state.master, states[0][0].state.master)
        assert (results, found) == states[0][1:]


def test_a_resumed_run_has_the_same_bits(fp8: RunConfig) -> None:
    config = check(dataclasses.replace(fp8, steps=8, sample_tokens=0, keep_checkpoints=0))
    train(config)
    again = elsewhere(config, "again")
    shutil.copytree(config.out, again.out)
    shutil.rmtree(Path(again.out) / "checkpoints" / "step_00000008")
    train(again)
    assert "resumed at step 4" in (Path(again.out) / "log.txt").read_text()
    same_bits(config.out, again.out, 8)


def test_gemms_kept_in_16_bits_are_dropouts_own(fp8: RunConfig) -> None:
    """With every part in bf16, the bits of a bf16 run with dropout."""
    none, plain = (
        steps_of(dataclasses.replace(fp8, **settings), 3)
        for settings in (
            {"fp8_keep_bf16": "qkv,proj,mlp", "fp8_head": "none"},
            {"precision": "bf16", "backend": "reference"},
        )
    )
    assert torch.equal(none[0].state.master, plain[0].state.master) and none[1] == plain[1]
    assert len(gemms_of("qkv,proj,mlp").blocks) == 0
