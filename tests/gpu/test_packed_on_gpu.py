"""Rows of documents on a GPU: the whole model against float64, and runs that leave the same bits."""

import dataclasses
from functools import partial
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

from handgrad.data.prepare import PrepareOptions, prepare
from handgrad.machine import devices
from handgrad.ops import cuda as kernels
from handgrad.settings.config import ModelShape, RunConfig
from tests.gpu.models import MODERN, MODERN_NEW, SHAPE, gradients
from tests.gpu.runs import leave_the_same_bits
from tests.gpu.test_kernels_on_gpu import DTYPES, GPU, compare, with_scalars_joined
from tests.test_runs import records

LLAMA = ModelShape(301, 48, 3, 4, 64, "llama", llama="kv_heads=2,qk_norm,qkv_bias")
SHAPES = {"gpt2": SHAPE, "modern": MODERN, "modern, all": MODERN_NEW, "llama": LLAMA}


@pytest.fixture(autouse=True)
def exact_products() -> None:
    devices.set_arithmetic(GPU, "fp32")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SHAPES)
def test_gradients_of_rows_of_documents(name: str, dtype: torch.dtype) -> None:
    run = partial(gradients, scale=1.0 / 80, shape=SHAPES[name], packed=True)
    compare(lambda ops, kind: with_scalars_joined(run(ops, GPU, kind)), dtype)


@pytest.mark.parametrize("name", SHAPES)
def test_recompute_keeps_the_bits(name: str) -> None:
    run = partial(gradients, kernels, GPU, torch.bfloat16, shape=SHAPES[name], packed=True)
    kept = run()
    for level in (2, 3):
        again = run(recompute=level)
        assert all(torch.equal(kept[tensor], again[tensor]) for tensor in kept)


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
@pytest.mark.parametrize("architecture", ["gpt2", "modern", "llama"])
def test_runs_over_chats(architecture: str, precision: str, config: RunConfig, tmp_path: Path) -> None:
    """With graphs, whose documents change from step to step."""
    folder = tmp_path / "questions"
    prepare(PrepareOptions("questions", folder, tokenizer="bytes", documents=400, validation_fraction=0.2, workers=1))
    chats = dataclasses.replace(config, data=str(folder), architecture=architecture, precision=precision, device="cuda")
    chats = dataclasses.replace(chats, num_heads=2, channels=128, sequence_length=128, tokens_per_step=1024)
    leave_the_same_bits(chats)
    steps = records(chats.out, ("step",))
    assert steps[-1]["loss"] < steps[0]["loss"] and all(0 < step["trained_tokens"] < 1024 for step in steps)
