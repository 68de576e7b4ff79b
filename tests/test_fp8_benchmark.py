"""The benchmark of fp8's pieces: its byte table is the model's, and all of it runs, at a tiny size and interpreted."""

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

if torch.cuda.is_available():
    pytest.skip("a GPU runs the benchmark itself: handgrad bench fp8", allow_module_level=True)
os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported: it decides what @triton.jit makes of a kernel
pytest.importorskip("triton")
pytest.importorskip("nvmath")

from benchmarks import fp8_bytes, fp8_kernels, fp8_products, gpu_fp8
from benchmarks.fp8_kernels import Making, Size
from handgrad.joins.fp8.cuda import activations, linear
from handgrad.joins.fp8.tables import fp8_gemms
from handgrad.ops import cuda as kernels
from handgrad.ops.cuda import linear as plain_linear
from handgrad.ops.sizes import forward_tile
from handgrad.settings.config import ModelShape
from tests.conftest import make_model
from tests.kernels import fp8_stand_ins

pytestmark = pytest.mark.nightly  # of a measuring script: nothing that the package promises rests on it

SHAPE = ModelShape(vocab_size=301, sequence_length=32, num_layers=2, num_heads=2, channels=32)
TINY = Size("tiny", SHAPE, batch=2, device="cpu", dtype=torch.float16)  # the interpreter has no bf16


class Clock:
    """Launches once."""

    bandwidth = 4e12

    def back_to_back(self, step: fp8_kernels.Step, *, recorded: bool) -> float:
        step()
        return 2.0

    def cold(self, step: fp8_kernels.Step) -> float:
        step()
        return 3.0


def multiply(d: Tensor, a: Tensor, b: Tensor, *, scratch: Tensor, **options: Any) -> None:
    """cuBLASLt's products in float32; a GELU in the epilogue is left out."""
    left, right = (b.t() if options.get("transpose_b") else b), (a.t() if options.get("transpose_a") else a)
    product = left.float() @ right.float()
    for scale in options.get("inverse_scales") or ():
        product *= scale
    for term in (options.get("bias"), options.get("added")):
        if term is not None:
            product += term
    d.copy_(product)


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaces the parts that only a GPU has: fp8 conversions, PTX, cuBLASLt, a clock."""
    fp8_stand_ins.install(monkeypatch)
    for module in (linear, plain_linear):
        monkeypatch.setattr(module, "multiply", multiply)
    monkeypatch.setattr(gpu_fp8, "Clock", Clock)
    monkeypatch.setattr(fp8_kernels, "compile_all", lambda sizes: {})
    monkeypatch.setattr(kernels, "versions", lambda: {"products": "torch"})


@pytest.mark.parametrize("fp8", [False, True])
def test_bytes_are_those_of_a_models_tensors(fp8: bool) -> None:
    gemms = fp8_gemms("", "", SHAPE.num_layers, SHAPE.fp8_parts)
    model = make_model(SHAPE, 2, 32, torch.bfloat16, fp8=gemms if fp8 else None)
    for row in fp8_bytes.ROWS:
        operands, units = (row.fp8, row.fp8_units) if fp8 else (row.bf16, row.bf16_units)
        for side, expected in zip((operands or "->").split("->"), units, strict=True):
            views = [model.views[name if name in model.views else f"blocks.0.{name}"] for name in side.split()]
            assert sum(view.numel() * view.element_size() for view in views) == expected * 64 * SHAPE.channels, row.name
    fp8_bytes.check(SHAPE, 2)


def test_a_wrong_row_of_bytes_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = {row.name: row for row in fp8_bytes.ROWS}
    wrong = dataclasses.replace(rows["qkv"], fp8_units=(2, 6))
    monkeypatch.setattr(fp8_bytes, "ROWS", tuple({**rows, "qkv": wrong}.values()))
    with pytest.raises(AssertionError, match=r"is \(1, 6\), the table says \(2, 6\)"):
        fp8_bytes.check(SHAPE, 2)
    missing = rows.pop("fcproj, residual")
    monkeypatch.setattr(fp8_bytes, "ROWS", tuple(rows.values()))
    with pytest.raises(AssertionError, match="'residual_out'"):
        fp8_bytes.check(SHAPE, 2)
    assert "residual_out" in missing.fp8


@pytest.mark.usefixtures("interpreted")
def test_all_of_it_runs(tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """One kernel fails: its row says so, and the others are measured."""

    def breaks(*_: object, **__: object) -> None:
        raise RuntimeError("out of\nluck")

    monkeypatch.setattr(activations, "gelu_forward_fp8", breaks)
    out = tmp_path / "fp8.json"
    gpu_fp8.compare(str(out), [TINY])
    printed, record = capsys.readouterr().out, json.loads(out.read_text())
    assert {"machine", "versions", "commit", "date", "libraries"} <= record.keys()
    assert record["copy_terabytes_per_second"] == 4 and record["bytes_per_token_and_block"]["fp8_read_written"] == [103, 70]

    made = {row["kernel"]: row for row in record["kernels"]}
    assert list(made) == list(fp8_kernels.CASES)
    assert record["failed"] == [made["gelu_forward"]] and made["gelu_forward"]["failed"] == ["RuntimeError: out of luck"]
    assert "  tiny gelu_forward:  RuntimeError: out of luck" in printed.splitlines()
    norm = made["layernorm_forward"]
    parts = 64 // forward_tile(32)[1]
    assert norm["size_bytes"] == 5 * 64 * 32 + 2 * 4 * 64 + 2 * 2 * 32 + 3 * 4 * parts  # rows, statistics, weights, parts
    assert norm["microseconds"] == 2 and norm["share_of_copy"] == pytest.approx(norm["size_bytes"] / 2e-6 / 4e12, rel=1e-3)

    products = {(row["product"], row.get("direction"), row.get("gradients")): row for row in record["products"]}
    assert len(products) == len(record["products"]) == 5 * (1 + 2 + 2) + 2
    assert products["fcproj", "wgrad", "e5m2"]["m_n_k"] == [32, 128, 64]
    assert products["head", "forward", ""]["m_n_k"] == [64, 384, 32]
    for (_, direction, gradients), row in products.items():
        if direction:
            assert row["fast_sums"] == (direction != "wgrad") and row["sums_error"] < row["error"] < 0.08
            assert gradients != "e5m2" or row["error"] > products[row["product"], direction, "e4m3"]["error"]


@pytest.mark.usefixtures("interpreted")
def test_a_wrong_product_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums that are off by half."""
    product = fp8_products.make(Making(TINY), "qkv", "dgrad")
    variant, right = product.variants[0], fp8_products.exact(product)
    assert fp8_products.errors(product, variant, right)["failed"] == []

    def halved(d: Tensor, *tensors: Tensor, **options: Any) -> None:
        multiply(d, *tensors, **options)
        d.mul_(0.5 if options["fast_sums"] else 1.0)

    monkeypatch.setattr(linear, "multiply", halved)
    failed = fp8_products.errors(product, variant, right)["failed"]
    assert failed == ["sums off by 5.0e-01", "fp8 off by 5.0e-01"]
