"""The table of whole steps beside peers: what it says of a record, and that a row which fails leaves the others."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import gpu_step, llama_speed, peers_table
from benchmarks.llama_twin import SHAPES
from handgrad.errors import UsageError

RECORD = {"commit": "0123abc", "figures": {}}
SPEEDS = {"handgrad": 150e3, "handgrad-fp8": 300e3, "llmc": 100e3}


def test_a_row_has_each_contender_and_handgrads_speed_over_a_peers(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    figures = {name: {"tokens_per_second": speed} for name, speed in SPEEDS.items()} | {"twin": {"failed": "out of memory"}}
    (tmp_path / "h100-step-124m-llmc.json").write_text(json.dumps({**RECORD, "figures": figures}))
    peers_table.main(["--folder", str(tmp_path), "--kind", "h100"])
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["GPT-2", "124M", "llmc", "100.0k", "1.500x,", "3.000x", "0123abc"] in lines
    assert ["GPT-2", "124M", "handgrad-fp8", "300.0k", "0123abc"] in lines and ["SmolLM2-135M", "no", "record"] in lines
    assert len(lines) == 1 + len(peers_table.STEPS) - 1 + len(SPEEDS)


def test_a_row_that_fails_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture) -> None:
    """A command fails, another outlasts its limit. The table refuses an unknown row before it runs any."""
    for name, arguments in (("wrong", "--no-such-flag"), ("slow", "--help")):
        monkeypatch.setitem(peers_table.STEPS, name, peers_table.Row(name, "handgrad", arguments))
    peers_table.measure("wrong", tmp_path, "h200")
    monkeypatch.setattr(peers_table, "LIMIT_SECONDS", 0.01)
    peers_table.measure("slow", tmp_path, "h200")
    assert capfd.readouterr().err.splitlines()[-2:] == ["wrong: ended with 64", "slow: ended with more than 0.01 s"]
    with pytest.raises(UsageError, match="unknown rows nothing; known: Qwen"):
        peers_table.main(["--run", "wrong,nothing", "--folder", str(tmp_path)])


def test_a_record_has_the_rows_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The benchmark of Llama's shapes chooses a name of its own."""

    def run(command: list[str], timeout: float) -> Any:
        out = Path(command[-1])
        (out / "a-name-of-its-own.json" if command[-2] == "--out-folder" else out).write_text(" ".join(command[1:-2]))
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(peers_table.subprocess, "run", run)
    for name in ("Qwen2.5-0.5B in fp8", "GPT-2 350M"):
        peers_table.measure(name, tmp_path, "h100")
    records = {path.name: path.read_text().split() for path in tmp_path.iterdir()}
    assert records.keys() == {"h100-llama-speed-fp8-1024-qwen2_5-0_5b.json", "h100-step-350m-llmc.json"}
    assert records["h100-step-350m-llmc.json"][:4] == ["-m", "handgrad", "bench", "step"]


def test_each_command_is_one_that_its_module_takes() -> None:
    rows = [row for row in peers_table.STEPS.values() if row.module == "benchmarks.llama_speed"]
    for options in (llama_speed.parse(row.arguments.split()) for row in rows):
        assert options.shapes in SHAPES and len(options.contenders.split(",")) == (1 if options.precision == "fp8" else 2)
        llama_speed.check_contenders(options.contenders, options.precision, chats=options.chats)
    others = [row.arguments.split() for row in peers_table.STEPS.values() if row not in rows]
    assert len(rows) == len(peers_table.ROWS) and len(others) == len(peers_table.NETWORKS)
    for arguments in others:
        gpu_step.check_contenders(arguments[arguments.index("--contenders") + 1])
