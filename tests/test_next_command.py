"""The command that `handgrad prepare` recommends works, however short the text."""

import shlex
from pathlib import Path

import pytest

from handgrad.cli import main
from tests.conftest import write_text

QUICK = ["--steps", "2", "--device", "cpu", "--sample-tokens", "2", "--eval-tokens", "64"]


def recommended(capsys: pytest.CaptureFixture, text: Path, tokenizer: str, out: str) -> list[str]:
    capsys.readouterr()
    assert main(["prepare", text.name, "--tokenizer", tokenizer, "--out", out, "--workers", "1"]) == 0
    words = shlex.split(capsys.readouterr().out.splitlines()[-1])
    assert words[:3] == ["next", "handgrad", "train"]
    return words[2:]


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe:300", "gpt2"])
@pytest.mark.parametrize("size_bytes", [3, 2000, 300_000])
def test_the_recommended_command_works(
    size_bytes: int, tokenizer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    text = write_text(tmp_path / "text.txt", 60_000)
    text.write_bytes(text.read_bytes()[:size_bytes])
    words = recommended(capsys, text, tokenizer, "my shards")
    assert main([*words, *QUICK]) == 0, capsys.readouterr().err
    # The folder of the first run is taken by now.
    assert recommended(capsys, text, tokenizer, "my shards")[-1] == "runs/b"
