"""docs/coming_from.md: its commands parse, its recipes exist; another trainer's flag is answered as the page says."""

import re
import shlex
from pathlib import Path

import pytest

from handgrad.commands.arguments import COMMANDS
from handgrad.commands.parser import Parser
from handgrad.names import nearest_name
from handgrad.settings.recipes import recipe_names

PAGE = (Path(__file__).parents[1] / "docs" / "coming_from.md").read_text()
ROWS = [[cell.strip() for cell in line.strip("|").split("|")] for line in PAGE.splitlines() if line.startswith("| `")]
COMMAND_LINES = sorted({found for found in re.findall(r"`(handgrad [^`]+)`", PAGE) if "NAME" not in found})
# Of the tables of settings, in nanoGPT's words and a finetuner's: (theirs, ours).
SETTINGS = [
    (theirs, ours)
    for there, here, *_ in ROWS
    if here.startswith("`--") and re.fullmatch(r"(`[a-z_]+`(, )?)+", there)
    for theirs, ours in zip(
        re.findall(r"`([a-z_]+)`", there),
        re.findall(r"`(--[a-z-]+)", here) * (1 if here.count("--") > 1 else there.count(",") + 1),
        strict=True,
    )
]


def parser_of(command: str) -> Parser:
    parser = Parser(f"handgrad {command}")
    COMMANDS[command][1](parser)
    return parser


@pytest.mark.parametrize("line", COMMAND_LINES)
def test_commands_parse(line: str) -> None:
    _, command, *words = shlex.split(line.partition(" > ")[0])
    if command == "train" and words == ["--n_layer", "4"]:
        assert "--num-layers" in nearest_name(words[0], flags())
        return
    parsed = parser_of(command).parse(words)
    recipe = getattr(parsed, "config", None) or (command == "recipes" and parsed.name)
    assert not recipe or recipe in recipe_names()


def test_the_page_has_what_these_tests_read() -> None:
    assert len(COMMAND_LINES) > 30 and len(SETTINGS) > 20 and len(ROWS) > 60


@pytest.mark.parametrize(("theirs", "ours"), SETTINGS)
def test_the_command_line_says_the_same(theirs: str, ours: str) -> None:
    assert nearest_name(f"--{theirs}", flags()) == f" (did you mean {ours}?)"


@pytest.mark.parametrize("name", ["learning_rate", "weight_decay", "beta1", "beta2", "dropout"])
def test_equal_names(name: str) -> None:
    assert f"`{name}`" in PAGE and f"--{name.replace('_', '-')}" in flags()


def test_llmc_flags_exist_here() -> None:
    section = PAGE.split("## llm.c")[1].split("\n## ")[0]
    assert set(re.findall(r"`(--[a-z-]+)", section)) <= set(flags()) and section.count("`--") > 20


def flags() -> list[str]:
    return [option for action in parser_of("train")._actions for option in action.option_strings]
