"""Shapes in fp8: a model trains whose GEMMs have sides of multiples of 16, with any heads, lengths and vocabulary."""

import dataclasses
import math
from types import ModuleType

import pytest
import torch

from handgrad.errors import DataError, UsageError
from handgrad.joins.fp8.formats import GRADIENT_FORMATS
from handgrad.joins.fp8.tables import fp8_gemms
from handgrad.machine.gpus import GPUS
from handgrad.models import gpt2, modern
from handgrad.run import checks
from handgrad.run.resolve import largest_micro_batch, memory_bytes, resolve
from handgrad.settings.config import ModelShape, RunConfig, check
from handgrad.tools import forecast
from tests.conftest import make_model
from tests.fp8_models import BOTH_OF_THE_HEAD, RoundedModernProducts, RoundedProducts, rounds_its_operands
from tests.techniques import toggled
from tests.test_fp8_training import steps_of

# (samples, tokens of a sample, heads, channels, vocabulary)
SHAPES = {
    "three heads": (2, 16, 3, 48, 57),
    "lengths of no multiple of 16": (2, 24, 2, 32, 57),
    "an odd length": (16, 7, 2, 32, 130),
    "one token a sample": (16, 1, 1, 16, 1),
    "heads of 64": (1, 16, 3, 192, 57),
    "heads of 128": (1, 32, 1, 128, 128),
    "heads of 80": (1, 16, 1, 80, 300),
    "wider than long": (1, 16, 5, 160, 57),
}
MODELS: dict[str, tuple[ModuleType, type[RoundedProducts]]] = {
    "gpt2": (gpt2, RoundedProducts),
    "modern": (modern, RoundedModernProducts),
}


@pytest.mark.nightly(but=["heads of 64-gpt2", "an odd length-modern", "three heads-gpt2", "wider than long-modern"])
@pytest.mark.parametrize("architecture", MODELS)
@pytest.mark.parametrize("name", SHAPES)
def test_every_product_rounds_its_operands(name: str, architecture: str) -> None:
    """In chunks of the head that no 16 divides."""
    B, T, H, C, V = SHAPES[name]
    _, rounding = MODELS[architecture]
    shape = ModelShape(V, max(T, 2), 2, H, C, architecture, toggled("") if architecture == "modern" else "")
    gemms = fp8_gemms("", BOTH_OF_THE_HEAD, shape.num_layers, shape.fp8_parts)
    settings = {"chunk": 7, "gradients": GRADIENT_FORMATS["mixed"]}
    plain = make_model(shape, B, T, torch.bfloat16, **settings)
    plain.ops = rounding(plain, gemms, "mixed")
    rounds_its_operands(
        plain, lambda level: make_model(shape, B, T, torch.bfloat16, fp8=gemms, recompute=level, **settings)
    )


LENGTH = {"sequence_length": 24, "precision": "fp8", "tokens_per_step": 192}


@pytest.mark.nightly(but=["{'architecture': 'modern'}"])
@pytest.mark.parametrize("settings", [{}, {"architecture": "modern"}, {"num_heads": 1}], ids=str)
def test_a_run_whose_samples_are_no_multiple_of_16(config: RunConfig, settings: dict) -> None:
    config = check(dataclasses.replace(config, **LENGTH, micro_batch=2, **settings))
    first, results, found = steps_of(config, 3)
    assert results[-1].loss < results[0].loss and all(math.isfinite(line.amax) for line in found[-1])
    for recompute in (1, 2, 3):
        again, other, _ = steps_of(dataclasses.replace(config, recompute=recompute), 3)
        assert other == results and torch.equal(again.state.master, first.state.master)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"micro_batch": 1}, r"found 1 \* 24 = 24; try --micro-batch 2$"),
        ({"micro_batch": 3, "tokens_per_step": 72}, r"= 72; try --micro-batch 4 --tokens-per-step 96$"),
        ({"micro_batch": 8, "sequence_length": 25, "tokens_per_step": 200}, r"--micro-batch 16 --tokens-per-step 400$"),
        ({"channels": 528, "num_heads": 3}, "takes heads of up to 128 channels, found 176; .* --num-heads 6 fits$"),
        ({"channels": 40}, "channels must be a multiple of 16 for precision fp8, found 40$"),
    ],
)
def test_other_shapes_are_refused(config: RunConfig, settings: dict, told: str) -> None:
    with pytest.raises(UsageError, match=told):
        check(dataclasses.replace(config, **(LENGTH | settings)))


def memory_of(config: RunConfig) -> int:
    return sum(memory_bytes(resolve(config, 257)).values())


def test_micro_batches_that_are_found_are_some_that_train(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """`plan` for a micro-batch that does not fit, and for a GPU that is not there."""
    config = dataclasses.replace(config, **LENGTH, micro_batch=8, fp8_head="none")  # of 257 words it takes more than bf16's
    small = memory_of(dataclasses.replace(config, micro_batch=2))
    assert largest_micro_batch(config, 257, small) == 2
    assert largest_micro_batch(config, 257, small - 1) == 0, "1 x 24 is no multiple of 16"
    needed = memory_of(config)
    assert largest_micro_batch(config, 257, needed) == 8
    assert largest_micro_batch(config, 257, needed - 1) == 4
    monkeypatch.setattr(checks, "training_batches", lambda *_: type("Batches", (), {"samples_per_epoch": 1 << 20}))
    monkeypatch.setattr(checks, "validation_batches", lambda *_, **__: None)
    monkeypatch.setattr(checks.devices, "available_bytes", lambda device: needed)
    checks.check_fits(config, resolve(config, 257), None)  # type: ignore[arg-type]
    monkeypatch.setattr(checks.devices, "available_bytes", lambda device: needed - 1)
    with pytest.raises(DataError, match=r"the run needs .* free; try --micro-batch 4 "):
        checks.check_fits(config, resolve(config, 257), None)  # type: ignore[arg-type]
    assert list(forecast.micro_batches(dataclasses.replace(config, lanes=1))) == [2, 4, 8]
    eight = dataclasses.replace(config, lanes=8)
    with pytest.raises(UsageError, match=r"= 8 \* 8 \* 24 = 1536, found 192; try --tokens-per-step 1536, or fewer GPUs$"):
        forecast.resolved_on(eight, GPUS["h100"], 8)
    assert forecast.micro_batches(forecast.resolved_on(dataclasses.replace(eight, tokens_per_step=1536), GPUS["h100"], 8))
