"""The help of every command: short first, all of it on request, with defaults and an example that parses."""

import argparse
import shlex
import sys
import types

import pytest

from handgrad.cli import main
from handgrad.commands.arguments import COMMAND_GROUPS, COMMANDS, EXAMPLES, command_line, parse
from handgrad.commands.parser import FIRST_SETTINGS, GROUPS, Parser, flag
from handgrad.settings.config import AUTO, FIELDS, PRECISIONS
from handgrad.settings.presets import PRESETS


def shown(capsys: pytest.CaptureFixture, *arguments: str) -> str:
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    assert ended.value.code == 0
    return capsys.readouterr().out


@pytest.fixture(autouse=True)
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")


@pytest.mark.parametrize("command", ["train", "plan", "profile"])
def test_ten_settings_first_the_others_on_request(command: str, capsys: pytest.CaptureFixture) -> None:
    short, full = shown(capsys, command, "--help"), shown(capsys, command, "--help-all")
    assert len(FIRST_SETTINGS) == 10 and len(short.splitlines()) < 60 < 100 < len(full.splitlines())
    for name in FIELDS:
        assert full.count(f"  {flag(name)} ") == 1, name
        assert (f"  {flag(name)} " in short) is (name in FIRST_SETTINGS), name
    headings = [line[:-1] for line in full.splitlines() if line.endswith(":") and not line.startswith(" ")]
    assert headings == ["positional arguments", "options", "settings", *(h for h in GROUPS.values())]


def test_a_left_out_setting_still_works() -> None:
    assert parse("train", ["tiny", "--beta2", "0.9"]).run_config.beta2 == 0.9


@pytest.mark.parametrize("command", COMMANDS)
def test_help_ends_with_an_example_that_parses(command: str, capsys: pytest.CaptureFixture) -> None:
    example = EXAMPLES[command]
    assert shown(capsys, command, "--help").endswith(f"\nexample: {example}\n")
    words = shlex.split(example)
    assert words[:2] == ["handgrad", command]
    parse(command, words[2:])


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_fits_a_terminal_of_80_columns(command: str, capsys: pytest.CaptureFixture) -> None:
    """All but the example, which stays a line that can be copied."""
    lines = shown(capsys, *([command] if command else []), "--help").partition("\nexample: ")[0].splitlines()
    assert [line for line in lines if len(line) > 80] == []


def test_the_first_screen(capsys: pytest.CaptureFixture) -> None:
    """`handgrad` alone: commands to begin with that parse, then all commands by their purpose."""
    assert main([]) == 64
    screen = capsys.readouterr().out
    begin, _, rest = screen.partition("\noptions:")
    for line in (line.partition("   ")[0] for line in begin.splitlines() if line.startswith("  handgrad ")):
        command, *words = shlex.split(line)[1:]
        parser = Parser(command)
        COMMANDS[command][1](parser)
        parser.parse(words)
    assert begin.count("\n  handgrad ") == 4
    assert [line.split()[0] for line in rest.splitlines() if line.startswith("  ") and "--" not in line[:14]] == list(
        COMMANDS
    )
    assert all(f"\n\n{heading}:\n  {first} " in rest for first, heading in COMMAND_GROUPS.items())
    assert shown(capsys, "--help") == shown(capsys, "help") == screen
    assert shown(capsys, "help", "plan") == shown(capsys, "plan", "--help")


@pytest.mark.parametrize("command", COMMANDS)
def test_a_missing_argument_is_shown_by_an_example(command: str, capsys: pytest.CaptureFixture) -> None:
    parser = Parser(command)
    COMMANDS[command][1](parser)
    if any(action.required for action in parser._actions):
        capsys.readouterr()
        assert main([command]) == 64
        assert f" is missing; for example `{EXAMPLES[command]}`; " in capsys.readouterr().err


@pytest.mark.parametrize("command", COMMANDS)
def test_defaults_are_shown(command: str, capsys: pytest.CaptureFixture) -> None:
    """Every option with a default that does something says which one."""
    parser = Parser("x")
    COMMANDS[command][1](parser)
    text = " ".join(shown(capsys, command, "--help").split()).partition(" example: ")[0]
    assert "(default: )" not in text and "default: None" not in text
    for action in parser._actions:
        default = action.default
        if action.option_strings and type(default) in (int, float, str) and default not in ("", argparse.SUPPRESS):
            entry = text.split(f" {action.option_strings[-1]} ")[-1].split(" --")[0]
            assert "default" in entry, (command, action.option_strings)


def test_completion_prints_a_script(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    """Of the whole command line, by shtab; without it, the command that installs it."""
    written = types.SimpleNamespace(complete=lambda parser, shell: f"{shell} of {parser.prog}")
    monkeypatch.setitem(sys.modules, "shtab", written)
    assert main(["completion", "zsh"]) == 0 and capsys.readouterr().out == "zsh of handgrad\n"
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert main(["completion", "bash"]) == 64 and "`pip install 'handgrad[completion]'`" in capsys.readouterr().err
    assert main(["completion", "fish"]) == 64 and "SHELL must be one of bash, zsh, tcsh" in capsys.readouterr().err


def test_completions_know_every_word() -> None:
    """`command_line`, from which shtab writes completions: settings, presets, choices, paths."""
    commands = next(action for action in command_line()._actions if action.dest == "command")
    assert isinstance(commands.choices, dict) and list(commands.choices) == list(COMMANDS)
    train = {action.dest: action for action in commands.choices["train"]._actions}
    assert set(FIELDS) <= {name for name, action in train.items() if action.help != argparse.SUPPRESS}
    assert train["preset"].choices == list(PRESETS) and train["precision"].choices == [AUTO, *PRECISIONS]
    paths = [name for name, action in train.items() if hasattr(action, "complete")]
    assert paths == ["config", "data", "out", "init_from", "teacher"]
    assert command_line().parse_args(["train", "d12", "--precision", "bf16"]).precision == "bf16"
