"""benchmarks/audit_cost.py: its turns, its segment, and the record."""

import json
import sys
from pathlib import Path

import pytest

from benchmarks import audit_cost
from handgrad.joins.audit.chain import check_chain, read_chain
from handgrad.storage.run_files import AUDIT_FILE

pytestmark = pytest.mark.nightly  # of a measuring script: nothing that the package promises rests on it


def test_the_cost_of_an_audit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, kept = tmp_path / "cost.json", tmp_path / "kept"
    short = ["--rounds", "2", "--steps", "2", "--segment", "3", "--tokens-per-step", "512"]
    places = ["--folder", str(tmp_path), "--keep", str(kept), "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["audit_cost", "tiny", "--device", "cpu", *short, *places])
    assert audit_cost.main() == 0
    figures = json.loads(out.read_text())["figures"]
    assert (figures["first"], figures["last"], figures["equal_links"], figures["equal_checkpoints"]) == (11, 14, 3, 1)
    assert [len(figures["turns"][kind]) for kind in ("with", "without")] == [2, 2]
    check_chain(read_chain(kept / AUDIT_FILE), kept)
    audited = [line["step"] for line in read_chain(kept / AUDIT_FILE) if line["kind"] == "step"]
    assert audited == [1, 2, 3, 4, 5, 10, 11, 12, 13, 14]  # on off off on, then the segment
