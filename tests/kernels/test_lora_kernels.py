"""Adapters over the kernels in Triton's interpreter, the library's products in plain torch: the reference's numbers."""

import os
from typing import Any

import pytest
import torch
from torch import Tensor

if torch.cuda.is_available():
    pytest.skip("a GPU runs tests/gpu/test_lora_on_gpu.py", allow_module_level=True)
os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported: it decides what @triton.jit makes of a kernel
pytest.importorskip("triton")

from handgrad.joins.fp8 import cuda as fp8_cuda, reference as fp8_reference
from handgrad.joins.lora import cuda as lora_cuda
from handgrad.joins.lora.bind import add_linear_forward, add_linear_operations
from handgrad.ops import cuda, reference
from handgrad.ops.cuda import linear
from tests.kernels.test_modern_fp8 import stand_ins  # noqa: F401 - a fixture
from tests.test_fp8_benchmark import interpreted, multiply as multiply_in_16_bits  # noqa: F401 - a fixture
from tests.test_fp8_lora import LENGTH, LORA, SHAPES as FP8_SHAPES, SMALL, AdaptedInFp8
from tests.test_lora import SHAPES, Adapted

MEBIBYTES = 1 << 20


def multiply(d: Tensor, a: Tensor, b: Tensor, *, scratch: Tensor, **options: Any) -> None:
    """cuBLASLt's product of float32: column-major, so the operands stand the other way round. It may add what it writes."""
    left, right = (b.t() if options.get("transpose_b") else b), (a.t() if options.get("transpose_a") else a)
    product = left @ right
    for term in (options.get("bias"), options.get("added")):
        if term is not None:
            product = product + term
    assert scratch.numel() >= MEBIBYTES and not options.get("aux")
    d.copy_(product)


@pytest.fixture(autouse=True)
def library(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (lora_cuda, linear):
        monkeypatch.setattr(module, "multiply", multiply)


@pytest.mark.nightly(but=["qwen2"])
@pytest.mark.parametrize("name", ["gpt2", "qwen2", "qwen3", "gemma3", "olmo3"])
def test_a_model_with_adapters(name: str) -> None:
    found, wanted = (Adapted(SHAPES[name], "rank=3,alpha=1.5", ops, dtype=torch.float32) for ops in (cuda, reference))
    found.model.act.scratch = torch.zeros(MEBIBYTES, dtype=torch.uint8)
    found.model.d.attention_scratch = torch.zeros(MEBIBYTES, dtype=torch.uint8)
    for adapted in (found, wanted):
        adapted.run()
    torch.testing.assert_close(found.model.act.losses, wanted.model.act.losses, rtol=1e-5, atol=1e-5)
    for row, gradient in wanted.gradients.items():
        error = (found.gradients[row] - gradient).norm() / gradient.norm()
        assert error <= 1e-4, f"{row}: relative error {error:.3g}"


@pytest.mark.parametrize("tf32", [False, True])
def test_the_products_of_tf32_are_its_own(tf32: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(lora_cuda, "multiply", lambda *_, tf32, **__: seen.append(tf32))
    monkeypatch.setattr(linear, "multiply", lambda *_, tf32, **__: seen.append(tf32))
    from handgrad.ops.cuda import tf32 as tf32_ops

    forward, backward = add_linear_operations(tf32_ops if tf32 else cuda)
    numbers, scratch = torch.zeros(2, 2), torch.zeros(1)
    forward(numbers, numbers, numbers, scratch=scratch)
    backward(numbers, numbers, numbers, numbers, numbers, scratch=scratch)
    assert seen == [tf32] * 3
    assert add_linear_operations(reference)[0] is add_linear_forward


FP8_CASES = [("gpt2", 0), ("gpt2", 3), ("qwen2", 1), ("qwen3", 2), ("llama", 0)]


@pytest.mark.nightly(but=["qwen3-2"])
@pytest.mark.usefixtures("interpreted", "stand_ins")
@pytest.mark.parametrize(("name", "recompute"), FP8_CASES)
def test_a_model_beside_weights_in_fp8(name: str, recompute: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In float16, from the gradients of the same numbers in float32 without fp8: at most twice the reference's distance,
    adapter by adapter. The frozen weights are the reference's to the bit."""
    for module in (lora_cuda, linear):
        monkeypatch.setattr(module, "multiply", multiply_in_16_bits)
    settings = {"recompute": recompute, "dtype": torch.float16, "noise": 0.1}
    own = AdaptedInFp8(FP8_SHAPES[name], backends=(reference, fp8_reference), **settings)
    found = AdaptedInFp8(FP8_SHAPES[name], backends=(cuda, fp8_cuda), **settings)
    exact = Adapted(FP8_SHAPES[name], LORA, reference, 0, torch.float32, LENGTH, 0.1)
    exact.model.flat.copy_(own.model.flat)
    for row, values in exact.views.items():
        values.copy_(own.views[row].mul_(SMALL))
        found.views[row].mul_(SMALL)
    for weight, form in own.forms.items():
        if weight.endswith("_weight"):
            assert found.forms[weight].rows.view(torch.uint8).equal(form.rows.view(torch.uint8)), weight
    for adapted, level in ((own, recompute), (found, recompute), (exact, 0)):
        adapted.run(level)
    losses, own_losses, found_losses = (adapted.model.act.losses for adapted in (exact, own, found))
    assert (found_losses - losses).norm() <= 2 * (own_losses - losses).norm()
    for row, right in exact.gradients.items():
        errors = [(adapted.gradients[row] - right).norm().item() for adapted in (own, found)]
        assert 0 < errors[1] <= 2 * errors[0], (row, errors)
