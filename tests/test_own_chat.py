"""The page of a chat model of one's own: made from its records, with commands that still parse."""

import json
import re
import shlex
from pathlib import Path

import pytest

from benchmarks import own_chat
from handgrad.commands.arguments import parse
from handgrad.settings.config import RunConfig

PAGE = own_chat.PAGE.read_text()
COMMANDS = [command for commands in own_chat.COMMANDS.values() for command in commands]
COMMANDS += re.findall(r"^handgrad .*$", PAGE, re.MULTILINE)


@pytest.mark.parametrize("size", own_chat.COMMANDS)
def test_the_page_is_made_from_the_record(size: str) -> None:
    """`python -m benchmarks.own_chat page` writes it anew."""
    assert "\n".join(own_chat.transcript(size)) in PAGE


def test_the_plan_is_the_plans() -> None:
    assert "\n".join(own_chat.planned()) in PAGE


@pytest.mark.parametrize("command", [command for command in COMMANDS if command.startswith("handgrad ")])
def test_the_commands_still_parse(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("handgrad.run.autosize.chosen_finetuning", lambda *arguments: {})  # the weights are not here
    monkeypatch.setattr("handgrad.run.folder.weights_sizes", lambda *arguments: {}, raising=False)
    _, name, *arguments = shlex.split(command)
    if "--init-from" in arguments:
        return
    parsed = parse(name, arguments)
    assert not hasattr(parsed, "run_config") or isinstance(parsed.run_config, RunConfig)


def test_someone_types_in_a_terminal(tmp_path: Path) -> None:
    """A line is typed at each prompt, and the transcript has the lines and the answers."""
    program = "import sys\nwhile (line := input('> ')) != '/quit': print(line.upper())"
    found = own_chat.play(f"python -c {shlex.quote(program)}", tmp_path, ("one", "two", "/quit"))
    assert found["output"] == ["> one", "ONE", "> two", "TWO", "> /quit"]


def test_dialogues_become_rows(tmp_path: Path) -> None:
    turns = [{"speaker": "USER", "utterance": "A table, please."}, {"speaker": "SYSTEM", "utterance": "For how many?"}]
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "dialogues_001.json").write_text(json.dumps([{"turns": turns}]))
    (row,) = own_chat.dialogues(tmp_path)
    assert [message["role"] for message in json.loads(row)["messages"]] == ["user", "assistant"]


def test_books_with_talk_come_first(tmp_path: Path) -> None:
    for name, text in (("talk", "You and I. " * 100), ("essay", "Of the sublime. " * 100)):
        (tmp_path / "a").mkdir(exist_ok=True)
        (tmp_path / "a" / f"{name}.md").write_text(text)
    assert [path.stem for path in own_chat.talkative(tmp_path, 0.0015)] == ["talk"]
