"""benchmarks/saves.py: its figures follow from what was measured, and it compares what the two ways have saved."""

import json
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import saves
from handgrad.storage import checkpoint
from handgrad.storage.checkpoint import Stored

pytestmark = pytest.mark.nightly  # of a measuring script: nothing that the package promises rests on it


def test_it_measures_both_ways(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    out = tmp_path / "saves.json"
    settings = ["--device", "cpu", "--channels", "8", "--micro-batch", "1", "--steps", "2"]
    monkeypatch.setattr(sys, "argv", ["saves", "tiny", *settings, "--folder", str(tmp_path), "--out", str(out)])
    assert saves.main() == 0
    record = json.loads(out.read_text())
    figures = record["figures"]
    assert {"machine", "versions", "commit", "date", "method", "settings"} <= record.keys() and record["ranks"] == 1
    assert figures["equal_tensors"] == 3 * 28 and figures["copy_bytes_per_rank"] >= 12 * figures["parameters"]
    assert figures["pause_ms"] > 0 and figures["pause_ms_waiting"] > 0 and figures["seconds_until_committed"] > 0
    assert figures["tokens_per_second"] > 0 and figures["loss_at_every_2_minutes_waiting"] == pytest.approx(
        figures["pause_ms_waiting"] / (120e3 + figures["pause_ms_waiting"])
    )
    assert "behind training" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == [out], "nothing stays on the disk"


@pytest.mark.parametrize("name", ["a", "m.a", "v.a"])
def test_a_difference_is_seen(name: str, tmp_path: Path) -> None:
    folders = []
    for parent, value in (("one", 0.0), ("other", -0.0)):
        state = {key: torch.zeros(3) for key in ("a", "m.a", "v.a")} | {name: torch.full((3,), value)}
        tensors = [Stored.of(key, tensor) for key, tensor in state.items()]
        folders.append(checkpoint.save(tmp_path / parent, 1, tensors, {"config": {}}, {}))
    assert saves.check_equal(folders[0], folders[0]) == 3
    with pytest.raises(AssertionError, match=f"^{name} of .* differ"):
        saves.check_equal(*folders)
