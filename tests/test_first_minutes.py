"""The page of a new user's first minutes: made from its record, and its commands still parse; and the tokenizers' table."""

import re
import shlex
from pathlib import Path

import pytest

from benchmarks import first_minutes, small_text
from handgrad.commands.arguments import parse
from handgrad.data.prepare import SMALL_TEXT_TOKENIZER
from handgrad.settings.config import RunConfig
from tests.figure_values import RECORDS

ROOT = Path(__file__).parents[1]
PAGE = first_minutes.PAGE.read_text()
COMMANDS = re.findall(r"^\$ (.*)$", PAGE, re.MULTILINE)


def test_the_transcript_is_the_record() -> None:
    """`python -m benchmarks.first_minutes` writes it anew."""
    assert "\n".join(first_minutes.transcript(RECORDS["cpu-first-minutes"])) in PAGE


def test_every_command_was_played() -> None:
    played = [command for _, command, *_ in first_minutes.COMMANDS]
    assert len(COMMANDS) == len(played)
    for shown, command in zip(COMMANDS, played, strict=True):
        assert shown == command or command is first_minutes.NEXT


@pytest.mark.parametrize("command", [command for command in COMMANDS if command.startswith("handgrad ")])
def test_the_commands_still_parse(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("handgrad.run.autosize.chosen_settings", lambda settings: {})  # the data is not here
    _, name, *arguments = shlex.split(command)
    parsed = parse(name, arguments)
    assert not hasattr(parsed, "run_config") or isinstance(parsed.run_config, RunConfig)


def test_the_other_commands_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in (command.split()[1] for command in COMMANDS if command.startswith("make ")):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE)
    (text,) = (command for command in COMMANDS if command.startswith("python "))
    compile(shlex.split(text)[2], "the text", "exec")


def test_the_tokenizers_of_a_small_text_are_those_of_the_record() -> None:
    """The default is the one with the fewest bits per byte, or within three percent of it."""
    record = RECORDS["cpu-small-text"]
    lines = (ROOT / "docs" / "data.md").read_text().split("\n")
    assert [line for line in lines if re.match(r"\| `[\w:]+` \| [\d.]+ M \|", line)] == small_text.rows(record)
    bits = {tokenizer: row["bits_per_byte"] for tokenizer, row in record["figures"].items()}
    assert bits[SMALL_TEXT_TOKENIZER] <= 1.03 * min(bits.values()) < bits["gpt2"]


def test_long_outputs_are_shortened() -> None:
    lines = [str(number) for number in range(9)]
    assert first_minutes.shortened(lines, 2, 3) == ["0", "1", "…", "6", "7", "8"]
    assert first_minutes.shortened(lines, 2, 0) == ["0", "1", "…"]
    assert first_minutes.shortened(lines, 5, 3) == lines
