"""The model with products in fp8: to the bit one whose products round their operands, and near one that rounds nothing."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from handgrad.joins.fp8.formats import GRADIENT_FORMATS
from handgrad.joins.fp8.tables import Fp8Gemms
from handgrad.run.resolve import resolve
from handgrad.settings.config import ModelShape
from handgrad.settings.presets import preset
from tests.conftest import Model, make_model, quantized_weights
from tests.fp8_models import (
    BOTH_OF_THE_HEAD,
    SETTINGS,
    RoundedProducts,
    bound,
    gemms_of,
    ignores_padding,
    is_as_near_as,
    rounds_its_operands,
)
from tests.test_fp8_numbers import bits

SHAPE = ModelShape(vocab_size=57, sequence_length=16, num_layers=2, num_heads=2, channels=32)
BATCH, LENGTH = 3, 16


def make(dtype: torch.dtype, fp8: Fp8Gemms | None = None, gradients: str = "e5m2", *, recompute: int = 0) -> Model:
    settings = {"recompute": recompute, "chunk": 20, "fp8": fp8, "gradients": GRADIENT_FORMATS[gradients]}
    return make_model(SHAPE, BATCH, LENGTH, dtype, **settings)


@pytest.mark.parametrize("name", SETTINGS)
def test_the_products_that_are_wanted_and_no_others_round_their_operands(name: str) -> None:
    plain = make(torch.bfloat16)
    plain.ops = RoundedProducts(plain, *SETTINGS[name])
    rounds_its_operands(plain, lambda level: make(torch.bfloat16, *SETTINGS[name], recompute=level))


@pytest.mark.parametrize("name", SETTINGS)
def test_gradients_are_as_near_as_the_formats_admit(name: str) -> None:
    is_as_near_as(bound(*SETTINGS[name]), make(torch.float32), make(torch.float32, *SETTINGS[name]))


@pytest.mark.parametrize("recompute", [0, 2])
def test_the_padded_vocabulary_touches_nothing(recompute: int) -> None:
    """Nor the statistics: no amax has seen a padded number, nor any gradient."""
    V, gemms = SHAPE.vocab_size, gemms_of("", BOTH_OF_THE_HEAD)
    clean, poisoned = (make(torch.bfloat16, gemms, recompute=recompute) for _ in range(2))
    ignores_padding(clean, poisoned, recompute=recompute)
    for name in ("fp8.statistics", "fp8.scaling"):
        assert torch.isfinite(clean.views[name][:-1]).all() and torch.equal(
            clean.views[name][:-1], poisoned.views[name][:-1]
        )
    assert (clean.table[0].view(clean.flat_gradients)[V:] == 0).all(), "padded rows have no gradient"


def test_a_tensor_has_the_forms_that_are_read_and_no_others() -> None:
    """In a layer that keeps a part in bf16, its tensors are plain ones; elsewhere a gradient has no 16-bit form."""
    model = make(torch.bfloat16, gemms_of("0.qkv", "dgrad"))
    first, second = model.act.blocks
    assert isinstance(first.ln1, Tensor) and isinstance(model.weights.blocks[0].qkv_weight, Tensor)
    assert not isinstance(second.ln1, Tensor) and second.ln1.plain is None
    gradients = [block.dqkv for block in model.d.blocks]
    assert isinstance(gradients[0], Tensor) and not isinstance(gradients[1], Tensor) and gradients[1].plain is None
    head = quantized_weights(model)["wte"]
    assert head.rows is None and head.columns is not None, "its forward stays in 16 bits"
    other = quantized_weights(make(torch.bfloat16, gemms_of("", "forward")))["wte"]
    assert other.rows is not None and other.columns is None
    for name, weight in quantized_weights(model).items():
        if name != "wte":
            assert torch.equal(bits(weight.columns), bits(weight.rows).t()), name


@pytest.mark.parametrize("gradients", GRADIENT_FORMATS)
def test_a_run_in_fp8_takes_less_memory(gradients: str) -> None:
    """GPT-2 124M as its recipe trains it. The two fp8 forms of the weights cost what bf16 weights take once more."""

    def sizes(**settings: str) -> dict[str, int]:
        return resolve(replace(preset("d12"), device="cpu", **settings), 50257).plan.size_bytes

    bf16, fp8 = sizes(precision="bf16"), sizes(precision="fp8", fp8_gradients=gradients)
    N, C, L = 64 * 1024, 768, 12
    assert fp8["fp8 weights"] == 2 * (L * 12 * C + 50304) * C
    assert fp8["fp8 scales"] < 1 << 20
    # 23 instead of 32 bytes per layer and token and channel are kept.
    assert abs(bf16["activations"] - fp8["activations"] - 9 * N * C * L) < 0.15 * 9 * N * C * L
    assert sum(fp8.values()) < sum(bf16.values())
