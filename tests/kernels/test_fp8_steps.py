"""A whole micro-step in fp8 by the kernels, interpreted in float16, beside the reference's."""

import os
from dataclasses import replace

import pytest
import torch

if torch.cuda.is_available():
    pytest.skip("a GPU runs tests/gpu/test_fp8_shapes_on_gpu.py and its neighbours", allow_module_level=True)
os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported: it decides what @triton.jit makes of a kernel
pytest.importorskip("triton")
pytest.importorskip("nvmath")

from handgrad.joins.fp8 import cuda as fp8_kernels
from handgrad.joins.fp8.formats import E4M3
from handgrad.joins.fp8.tables import fp8_gemms
from handgrad.ops import cuda as kernels
from handgrad.settings.config import ModelShape
from tests.conftest import Model, make_model
from tests.fp8_models import run
from tests.techniques import toggled
from tests.test_fp8_benchmark import interpreted  # noqa: F401 - a fixture

B, T = 4, 12  # 48 tokens, in chunks of 32 and 16
GPT2 = ModelShape(vocab_size=57, sequence_length=T, num_layers=1, num_heads=3, channels=48)
WITHOUT_CAP = toggled("softcap,residual_scalars,input_scalars")  # the cap's tanh is PTX
MODERN = replace(GPT2, architecture="modern", techniques=WITHOUT_CAP)
LLAMA = replace(GPT2, architecture="llama")
WIDE = replace(GPT2, num_heads=1, channels=128)
GEMMS = fp8_gemms("", "forward,dgrad,wgrad", 1, ("qkv", "proj", "mlp"))


def make(shape: ModelShape, dtype: torch.dtype, **settings: object) -> Model:
    model = make_model(shape, B, T, dtype, chunk=32, **settings)
    model.act.sorted_positions.copy_(torch.argsort(model.act.tokens.view(-1), stable=True))
    return model


CASES = {
    "GPT-2": (GPT2, 1),
    "heads of 128": (WIDE, 0),
    "GPT-2, whole blocks": (GPT2, 3),
    "modern": (MODERN, 2),
    "Llama": (replace(LLAMA, llama="kv_heads=1,tied,feed_forward=48"), 0),
    "Qwen2, whole blocks": (replace(LLAMA, llama="kv_heads=1,qkv_bias,feed_forward=80"), 3),
    "Qwen3": (replace(LLAMA, llama="kv_heads=3,qk_norm,feed_forward=48"), 2),
}


@pytest.mark.nightly(but=["GPT-2", "Qwen2, whole blocks"])
@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("case", CASES)
def test_kernels_are_as_good_as_the_reference(case: str) -> None:
    """From the gradients without fp8: at most twice the reference's own distance, tensor by tensor."""
    shape, recompute = CASES[case]
    fp8 = {"fp8": GEMMS, "gradients": (E4M3, E4M3), "recompute": recompute}
    exact = make(shape, torch.float32)
    models = make(shape, torch.float16, **fp8), make(shape, torch.float16, **fp8, backends=(kernels, fp8_kernels))
    exact.flat.copy_(models[0].flat)
    (losses, right), (own_losses, own), (found_losses, found) = (
        run(model, recompute=level) for model, level in zip((exact, *models), (0, recompute, recompute), strict=True)
    )
    assert (found_losses - losses).norm() <= 2 * (own_losses - losses).norm()
    for row in exact.table:
        errors = [(row.view(gradients) - row.view(right)).norm().item() for gradients in (own, found)]
        assert 0 < errors[1] <= 2 * errors[0], (row.name, errors)
