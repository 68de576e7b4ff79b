"""The benchmark of whole steps over long rows: a row per length and level, equal losses, a word where they differ."""

import json
from pathlib import Path

import pytest

from benchmarks import llama_context
from handgrad.errors import UsageError

pytestmark = pytest.mark.nightly  # of a measuring script: nothing that the package promises rests on it

SMALL = ["--shape=tiny-llama", "--device=cpu", "--precision=fp32", "--lengths=16,64", "--levels=0,2", "--seconds=0"]


def test_a_row_for_every_length_and_level(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert llama_context.main([*SMALL, f"--out={tmp_path / 'record.json'}"]) == 0
    rows = json.loads((tmp_path / "record.json").read_text())["figures"]
    assert [(row["length"], row["recompute"]) for row in rows] == [(16, 0), (16, 2), (64, 0), (64, 2)]
    for low, high in (rows[:2], rows[2:]):
        assert low["losses"] == high["losses"] and len(low["losses"]) == llama_context.WARM_UP_STEPS
        assert low["plan_gib"] > high["plan_gib"] and low["steps"] == 1
    assert rows[2]["flops_per_token"] > rows[0]["flops_per_token"], "attention's grow with the length"
    assert capsys.readouterr().err == ""


def test_other_losses_are_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    measure = llama_context.measure

    def wrong(settings, seconds, peak):
        row = measure(settings, seconds, peak)
        return row | {"losses": [*row["losses"][:-1], settings.recompute + settings.sequence_length // 64]}

    monkeypatch.setattr(llama_context, "measure", wrong)
    assert llama_context.main([*SMALL, "--lengths=64"]) == 1
    assert "found others at 64 tokens" in capsys.readouterr().err


def test_an_unknown_shape() -> None:
    with pytest.raises(UsageError, match="unknown shape 'Llama-9'"):
        llama_context.main(["--shape=Llama-9"])
