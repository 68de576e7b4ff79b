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

from handgrad.lora import cuda as lora_cuda, reference as lora_reference
from handgrad.lora.bind import added_products
from handgrad.ops import cuda, reference
from handgrad.ops.cuda import linear
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


@pytest.mark.parametrize("name", ["gpt2", "qwen2", "qwen3"])
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

    forward, backward = added_products(tf32_ops if tf32 else cuda)
    numbers, scratch = torch.zeros(2, 2), torch.zeros(1)
    forward(numbers, numbers, numbers, scratch=scratch)
    backward(numbers, numbers, numbers, numbers, numbers, scratch=scratch)
    assert seen == [tf32] * 3
    assert added_products(reference)[0] is lora_reference.add_linear_forward
