"""The benchmark of attention over long rows: what it counts, that all contenders compute the same, and that it says so."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import attention_context as benchmark
from benchmarks.attention_context import NONE, ONE, SHORT, Case, Inputs
from handgrad.ops import cpu
from tests.documents import visible

pytestmark = pytest.mark.nightly  # of a measuring script: nothing that the package promises rests on it

CPU = torch.device("cpu")
CASE = Case(2048, 4, 2, 8, SHORT)
SMALL = ["--device=cpu", "--lengths=64,128", "--widths=8", "--heads=2/2,4/2", "--tokens=256"]


def test_flops_are_those_of_the_visible_pairs() -> None:
    inputs = Inputs(CASE, 2 * CASE.length, CPU, torch.float32)
    assert inputs.starts is not None and len(inputs.lengths) == 2 and inputs.lengths[0] != inputs.lengths[1]
    assert inputs.flops(2) == 2 * 2 * int(visible(inputs.starts).sum()) * CASE.heads * CASE.width
    alone = Inputs(replace(CASE, documents=ONE), 4096, CPU, torch.float32)
    assert alone.flops(5) == 5 * 2 * 2 * (2048 * 2049 // 2) * 32 > 3 * inputs.flops(5)


def test_every_contender_has_a_row(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """One without kernels for this device has its reason."""
    assert benchmark.main([*SMALL, f"--out={tmp_path / 'record.json'}"]) == 0
    record = json.loads((tmp_path / "record.json").read_text())
    rows = {(row["length"], row["kv_heads"], row["heads"], row["documents"], row["contender"]) for row in record["figures"]}
    assert len(rows) == len(record["figures"]) == 4 * (3 + 1 + 3)
    for row in record["figures"]:
        assert ("failed" in row) == row["contender"].startswith("torch varlen")
        if "failed" not in row:
            assert row["same_bits"] and row["difference"] < 1e-5 and row["tflop_per_second"] > 0
            assert row["taken"] == (row["contender"] == "handgrad cpu")
    told = capsys.readouterr().out
    assert "* handgrad cpu" in told and "torch math, deterministic" in told and "varlen_attn" not in told


def test_other_results_are_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    forward = cpu.attention_forward

    def scaled(out: torch.Tensor, *rest: torch.Tensor, **options: torch.Tensor) -> None:
        forward(out, *rest, **options)
        out *= 1.1

    monkeypatch.setattr(cpu, "attention_forward", scaled)
    assert benchmark.main([*SMALL, f"--documents={NONE}"]) == 1
    assert "other results:   torch math" in capsys.readouterr().err


@pytest.mark.parametrize("knows", [True, False], ids=["2.13", "2.11"])
def test_grouped_heads_of_either_torch(knows: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its documents' attention is told of them where it has a keyword, and has them as they are."""
    given = []

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, enable_gqa: bool) -> torch.Tensor:
        given.append((q.shape[1], k.shape[1], enable_gqa))
        shared = q.shape[1] // k.shape[1]
        return q + (k + v).repeat_interleave(shared, 1)

    def newer(q: Any, k: Any, v: Any, *_: Any, window_size: Any, enable_gqa: bool = False) -> torch.Tensor:
        return attend(q, k, v, enable_gqa)

    def older(q: Any, k: Any, v: Any, *_: Any, window_size: Any) -> torch.Tensor:
        return attend(q, k, v, False)

    monkeypatch.setitem(sys.modules, "torch.nn.attention.varlen", SimpleNamespace(varlen_attn=newer if knows else older))
    for case in (CASE, replace(CASE, kv_heads=4)):
        contender = benchmark.varlen(Inputs(case, 2 * case.length, CPU, torch.float32))
        contender.forward()
        contender.backward()
    assert given == [(4, 2, knows), (4, 4, False)]


def test_torchs_switch_is_set_back() -> None:
    with benchmark.deterministic(True):
        assert torch.are_deterministic_algorithms_enabled()
    assert not torch.are_deterministic_algorithms_enabled()
