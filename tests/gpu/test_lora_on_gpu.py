"""Adapters on a CUDA GPU, beside weights in bf16 and in fp8: as exact as the reference, the same bits every time, the base
untouched; a run learns, resumes with the same bits, and allocates its plan alone."""

import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

from handgrad.joins.fp8 import cuda as fp8_cuda
from handgrad.joins.lora import tables
from handgrad.joins.lora.bind import WithAdapters, adapted as with_adapters_of
from handgrad.joins.lora.tables import LoraDesign, adapters_of
from handgrad.memory.arena import make_plan
from handgrad.memory.rows import named
from handgrad.models import architecture, named_weights
from handgrad.models.passes import run
from handgrad.networks.lora import parse_lora
from handgrad.ops import cuda, reference
from handgrad.run.open import train
from handgrad.settings.config import ModelShape, RunConfig
from tests.conftest import make_model, small_run
from tests.gpu.runs import check_allocations
from tests.test_fp8_lora import LAYERS, LENGTH as FP8_LENGTH, SMALL, AdaptedInFp8, gemms_of
from tests.test_lora import Adapted
from tests.test_runs import records, same_bits

BATCH, LENGTH = 4, 64
GPT2 = ModelShape(301, LENGTH, 2, 4, 64)
LLAMA = ModelShape(301, LENGTH, 2, 4, 64, "llama", llama="kv_heads=2,tied,qkv_bias,qk_norm,feed_forward=160")
LORA = "rank=8,alpha=12"


def gradients(ops: Any, device: str, dtype: torch.dtype, shape: ModelShape) -> dict[str, torch.Tensor]:
    """Of every adapter, by name; all numbers are bf16's."""
    source, model = make_model(shape, BATCH, LENGTH, torch.float64), architecture(shape)
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    base = named_weights(shape, source.flat.to(torch.bfloat16).to(device, dtype), source.table)
    rows = model.activations(shape, BATCH, LENGTH, dtype, ops, chunk=100, training=True)
    design = LoraDesign(tuple(adapters_of(shape, parse_lora(LORA))))
    buffers = [row.buffer(0) for row in rows if not row.of]
    added = tables.buffers(design, source.table, BATCH * LENGTH, dtype)
    views = make_plan([*buffers, *added]).allocate(torch.device(device))
    act, d = (named(kind, views, shape.num_layers) for kind in (model.Activations, model.Gradients))
    act.tokens.copy_(source.act.tokens)
    act.targets.copy_(source.act.targets)
    numbers = torch.Generator().manual_seed(3)
    table = design.table(1)
    drawn = {row.name: 0.3 * torch.randn(row.shape, generator=numbers) for row in table}
    tensors = {name: values.to(torch.bfloat16).to(device, dtype) for name, values in drawn.items()}
    found = {row.name: torch.zeros(row.shape, dtype=exact, device=device) for row in table}
    weights, adapting = with_adapters_of(design.adapters, base, tensors, found), WithAdapters(ops, views)
    nothing = named(model.Weights, {row.name: None for row in source.table}, shape.num_layers)
    run(model.forward(adapting, weights, act, shape))
    scale = torch.tensor([1 / (BATCH * LENGTH)], dtype=exact, device=device)
    run(model.backward(adapting, weights, nothing, act, d, scale, shape, recompute=0))
    return {name: values.cpu() for name, values in found.items()}


@pytest.mark.parametrize("shape", [GPT2, LLAMA], ids=["gpt2", "llama"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_gradients(shape: ModelShape, dtype: torch.dtype) -> None:
    """At most twice as far from float64 as the reference in the same dtype; twice the same bits."""
    found, again = (gradients(cuda, "cuda", dtype, shape) for _ in range(2))
    exact = gradients(reference, "cpu", torch.float64, shape)
    rounded = gradients(reference, "cuda", dtype, shape)

    def error(of: dict[str, torch.Tensor]) -> float:
        return math.hypot(*((of[name].double() - exact[name]).norm() for name in exact))

    assert error(found) <= 2 * error(rounded) + 1e-6 * math.hypot(*(values.norm() for values in exact.values()))
    assert all(found[name].equal(again[name]) for name in found)


FP8_GPT2 = ModelShape(301, FP8_LENGTH, LAYERS, 4, 64)
FP8_LLAMA = ModelShape(301, FP8_LENGTH, LAYERS, 4, 64, "llama", llama="kv_heads=2,tied,qkv_bias,qk_norm,feed_forward=160")


needs_fp8 = pytest.mark.skipif(torch.cuda.get_device_capability() < (8, 9), reason="needs a GPU with fp8")


@needs_fp8
@pytest.mark.parametrize("shape", [FP8_GPT2, FP8_LLAMA], ids=["gpt2", "llama"])
@pytest.mark.parametrize("kept", ["", "0.mlp,1.qkv"])
def test_gradients_beside_weights_in_fp8(shape: ModelShape, kept: str) -> None:
    """From those of the same numbers without fp8 in float32: at most twice as far as the reference; at every level of
    recomputation the same bits, and twice. The frozen weights are the reference's to the bit."""
    settings = {"gemms": gemms_of(kept), "noise": 0.1}
    own = AdaptedInFp8(shape, LORA, **settings)
    exact = Adapted(shape, LORA, reference, 0, torch.float32, FP8_LENGTH, 0.1)
    exact.model.flat.copy_(own.model.flat)
    levels = [
        AdaptedInFp8(shape, LORA, recompute=level, backends=(cuda, fp8_cuda), device="cuda", **settings)
        for level in (0, 0, 1, 2, 3)
    ]
    for row, values in exact.views.items():
        values.copy_(own.views[row].mul_(SMALL))
        for adapted in levels:
            adapted.views[row].mul_(SMALL)
    for adapted, level in zip((own, exact, *levels), (0, 0, 0, 0, 1, 2, 3), strict=True):
        adapted.run(level)
    found, *others = levels
    for weight, form in own.forms.items():
        if weight.endswith("_weight"):
            assert found.forms[weight].rows.cpu().view(torch.uint8).equal(form.rows.view(torch.uint8)), weight
    for row, right in exact.gradients.items():
        errors = [(adapted.gradients[row].cpu() - right).norm().item() for adapted in (own, found)]
        assert 0 < errors[1] <= 2 * errors[0], (row, errors)
        assert all(found.gradients[row].equal(other.gradients[row]) for other in others), row


@needs_fp8
def test_steps_beside_weights_in_fp8_allocate_the_plan_alone() -> None:
    config = RunConfig(num_layers=4, num_heads=4, channels=256, sequence_length=256, micro_batch=8, tokens_per_step=4096)
    check_allocations(replace(config, precision="fp8", lora=LORA, init_from="x", device="cuda", optimizer="adamw"))


@pytest.mark.parametrize("precision", ["bf16", "fp32", pytest.param("fp8", marks=needs_fp8)])
def test_a_run_learns_and_resumes(shards: Path, tmp_path: Path, precision: str) -> None:
    sizes = {"architecture": "llama", "llama": "kv_heads=1,tied", "device": "cuda", "precision": precision}
    base = replace(small_run(shards, tmp_path / "base"), **sizes, steps=80, eval_every=0, sample_tokens=0)
    train(base)
    settings = {"steps": 12, "learning_rate": 4e-3, "weight_decay": 0.0, "overfit_one_batch": True, "save_every": 4}
    whole: RunConfig = replace(base, **settings, out=str(tmp_path / "whole"), init_from=base.out, lora=LORA)
    whole = replace(whole, sample_tokens=8, eval_every=6)
    train(whole)
    losses = [record["loss"] for record in records(whole.out, ("step",))]
    assert losses[-1] < losses[0] - 0.02
    again = replace(whole, out=str(tmp_path / "again"))
    shutil.copytree(whole.out, again.out)
    shutil.rmtree(tmp_path / "again" / "checkpoints" / "step_00000012")
    train(again)
    same_bits(whole.out, again.out, 12)
