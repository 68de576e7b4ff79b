"""benchmarks/small_cards.py: its turns, the comparison of bits, its caps and the record."""

import json
import sys
from pathlib import Path

import pytest

from benchmarks.small_cards import cap_of, main

pytestmark = pytest.mark.nightly  # of a measuring script: nothing that the package promises rests on it


def test_settings_beside_the_plain_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    """On a CPU, whose tensors stand in for a GPU's: what rounds nothing has the plain run's bits."""
    out = tmp_path / "small.json"
    chosen = ["--models", "tiny", "--settings", "plain;offload, recompute 3;moments bf16", "--precision", "bf16"]
    monkeypatch.setattr(sys, "argv", ["small_cards", *chosen, "--micro-batch", "1", "--rounds", "1", "--device", "cpu"])
    sys.argv += ["--out", str(out)]
    main()
    rows = json.loads(out.read_text())["figures"]["tiny"]
    assert {name: row["same_bits"] for name, row in rows.items()} == {
        "plain": True,
        "offload, recompute 3": True,
        "moments bf16": False,
    }
    assert rows["plain"]["ratio"] == 1 and rows["offload, recompute 3"]["host_bytes"] > 0
    assert len(capsys.readouterr().out.split("tiny  ")) == 4


def test_the_smallest_cap_that_holds_a_plan() -> None:
    """Beside the driver's context."""
    assert cap_of(5 << 30, "24,6,16") == "6" and cap_of(int(5.5 * 2**30), "6,16,24") == "16"
    assert cap_of(30 << 30, "6,16,24") == "" and cap_of(1, "") == ""
