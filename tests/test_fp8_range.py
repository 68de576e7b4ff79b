"""The study of the gradients in fp8: its rounding is handgrad's, and it sees every gradient with the right weight."""

import json
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from benchmarks import fp8_range
from benchmarks.fp8_range import BLOCK, ROUNDINGS, Rounding, rounded, study
from handgrad.joins.fp8 import formats, reference
from handgrad.joins.fp8.formats import E4M3, Quantized
from tests.kernels.fp8_checks import make

pytestmark = pytest.mark.nightly  # of a measuring script: nothing that the package promises rests on it


def through_fp8(x: Tensor, kind: torch.dtype, margin: int) -> Tensor:
    """x (N, C) as the reference quantises it at a scale of its own, in float32."""
    made = make(*x.shape, 1, kind, "cpu")
    made.scaling[formats.MARGIN] = margin
    made = Quantized(made.rows, None, made.scaling, made.statistics, current=True)
    reference.quantize(made, x)
    assert made.rows is not None
    return made.rows.float() * made.inverse_scale


def wide(N: int, C: int) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(N, C, generator=generator)
    return x * torch.exp2(torch.randint(-30, 1, (N, C), generator=generator).float())


@pytest.mark.parametrize("name", ROUNDINGS)
def test_a_group_of_numbers_is_rounded_as_a_tensor_of_its_own(name: str) -> None:
    x, rounding = wide(5, 3 * 2 * BLOCK // 4), ROUNDINGS[name]
    x[3] = 0.0  # a token without a gradient
    along, across = {
        "tensor": (5, x.shape[1]),
        "parts": (5, x.shape[1] // 3),
        "rows": (1, x.shape[1]),
        "columns": (5, 1),
        "blocks": (1, BLOCK),
    }[rounding.scales]
    expected = torch.empty_like(x)
    for row in range(0, 5, along):
        for column in range(0, x.shape[1], across):
            place = slice(row, row + along), slice(column, column + across)
            expected[place] = through_fp8(x[place].contiguous(), rounding.format, rounding.margin)
    assert torch.equal(rounded(x, rounding), expected)


def test_errors_and_shares() -> None:
    """A gradient whose keys are 2^-25 of its values: at one scale they vanish, and with them their rows of dW."""
    generator = torch.Generator().manual_seed(1)
    dy, x, weight = (torch.randn(*shape, generator=generator) for shape in ((64, 48), (64, 24), (48, 24)))
    dy[:, 16:32] *= 2.0**-25
    found = study(dy, x, weight, parts=True)
    assert found["e4m3"]["vanished"] == pytest.approx(1 / 3, abs=0.01)
    assert found["e4m3"]["dw_error_k"] == 1.0 and found["e4m3"]["dw_error_q"] < 0.04
    assert found["e4m3"]["dw_error_mean_row"] == pytest.approx(1 / 3, abs=0.04)
    own = found["e4m3, a scale for each of q, k, v"]
    assert own["vanished"] == 0 and own["dw_error_k"] < 0.04 and own["dx_error"] == pytest.approx(found["e4m3"]["dx_error"])
    assert found["e5m2"]["dw_error_k"] < 0.1 and found["e5m2"]["dx_error"] > 1.5 * own["dx_error"]
    exact = fp8_range.error(rounded(dy, Rounding(E4M3)) @ weight, dy @ weight)
    assert found["e4m3"]["dx_error"] == pytest.approx(exact)
    assert "e4m3, a scale for each of q, k, v" not in study(dy, x, weight, parts=False)


def test_every_gradient_is_seen_with_its_weight(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """dy^T x is the gradient that the backward adds to the weight of that name and layer."""
    seen: list[tuple[Tensor, Tensor]] = []

    def noting(dy: Tensor, x: Tensor, weight: Tensor, *, parts: bool) -> dict:
        seen.append((weight, dy.float().t() @ x.float()))
        return study(dy, x, weight, parts=parts)

    runs = []
    watch = fp8_range.watch

    def watching(run: fp8_range.HandgradRun, first_sample: int) -> dict:
        runs.append(run)
        run.state.gradients.zero_()
        return watch(run, first_sample)

    monkeypatch.setattr(fp8_range, "study", noting)
    monkeypatch.setattr(fp8_range, "watch", watching)
    out = tmp_path / "range.json"
    arguments = ["--models", "tiny:4:1:3", "--sequence-length", "32", "--device", "cpu", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["fp8_range", *arguments])
    fp8_range.main()
    state = runs[0].state
    gradients = {
        getattr(w, f"{name}_weight").data_ptr(): getattr(g, f"{name}_weight")
        for w, g in zip(state.weights.blocks, state.weight_gradients.blocks, strict=True)
        for name in ("qkv", "proj", "fc", "fcproj")
    }
    assert len(seen) == len(gradients) == 4 * 2
    for weight, expected in seen:
        found = gradients[weight.data_ptr()].float()
        assert (found - expected).norm() <= 1e-2 * expected.norm(), "bf16's rounding, at most"
    (row,) = json.loads(out.read_text())["rows"]
    assert row["tokens"] == 3 * 4 * 32 and row["tensors"].keys() == {"dqkv", "dresidual_mid", "dhidden", "dresidual_out"}
    worst = row["tensors"]["dqkv"]["e4m3"]["dw_error"]
    assert worst["worst"] >= worst["median"] > 0 and worst["worst_layer"] in ("0", "1", 0, 1)
