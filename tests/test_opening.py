"""Starting a run is simple: what was asked becomes one configuration, which is checked once and resolved once."""

import ast
import dataclasses
import inspect
import io
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from types import CodeType
from typing import Any

import pytest

from handgrad import cli
from handgrad.run.open import complete, open_run
from handgrad.run.resolve import resolve
from handgrad.settings.config import FIELDS, RunConfig, check, to_toml


@pytest.fixture
def calls() -> Iterator[list[CodeType]]:
    """The code of every function that this thread calls, in order."""
    called: list[CodeType] = []
    sys.setprofile(lambda frame, event, _: called.append(frame.f_code) if event == "call" else None)
    yield called
    sys.setprofile(None)


def test_a_run_is_checked_and_resolved_once(config: RunConfig, calls: list[CodeType]) -> None:
    with open_run(dataclasses.replace(config, steps=1, warmup_steps=0), console="nothing") as run:
        run.begin()
        run.advance(1)
    counts = {function.__name__: calls.count(function.__code__) for function in (check, complete, resolve)}
    assert counts == {"check": 1, "complete": 1, "resolve": 1}


def test_a_resumed_run_is_checked_and_resolved_once(config: RunConfig, calls: list[CodeType]) -> None:
    for stop in (1, 2):
        calls.clear()
        with open_run(dataclasses.replace(config, steps=2, warmup_steps=0), console="nothing") as run:
            run.begin()
            run.advance(stop)
        assert run.completed == stop
        assert (calls.count(check.__code__), calls.count(resolve.__code__)) == (1, 1)


def test_a_command_checks_and_resolves_once(config: RunConfig, calls: list[CodeType], tmp_path: Path) -> None:
    recipe = tmp_path / "run.toml"
    recipe.write_text(to_toml(dataclasses.replace(config, steps=1, warmup_steps=0, eval_every=0, sample_tokens=0)))
    calls.clear()
    assert cli.main(["train", "--config", str(recipe)]) == 0
    counts = {function.__name__: calls.count(function.__code__) for function in (check, complete, resolve)}
    assert counts == {"check": 1, "complete": 1, "resolve": 1}


def test_a_launcher_refuses_settings_before_it_starts_processes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr("handgrad.commands.train.supervise", lambda *_: pytest.fail("it started processes"))
    assert cli.main(["train", "tiny", "--ranks", "2", "--device", "cpu", "--keep-every", "7"]) == 64
    assert "keep_every must be a multiple of save_every" in capsys.readouterr().err


# Settings whose names are words for much else in the code.
WORDS = {"out", "device", "data", "seed"}
MOST_FILES_OF_A_SETTING = 25
BELOW_OPEN = ("run", "evaluation", "joins", "training", "generation", "models", "optimizers", "memory", "data", "ops")


def test_a_setting_is_used_in_few_files() -> None:
    """Files from `run.open` down to the operations that name a setting in their code."""
    package, files = Path(cli.__file__).parent, dict[str, list[str]]()
    for path in (path for folder in BELOW_OPEN for path in sorted((package / folder).rglob("*.py"))):
        tokens = tokenize.generate_tokens(io.StringIO(path.read_text()).readline)
        for name in {token.string for token in tokens if token.type == tokenize.NAME} & FIELDS.keys() - WORDS:
            files.setdefault(name, []).append(str(path.relative_to(package)))
    name, most = max(files.items(), key=lambda item: len(item[1]))
    assert len(most) <= MOST_FILES_OF_A_SETTING, f"{name} is named in {len(most)} files: {', '.join(most)}"


def test_the_configuration_is_bound_once() -> None:
    (function,) = ast.parse(inspect.getsource(open_run)).body
    assert isinstance(function, ast.FunctionDef)
    arguments = [*function.args.args, *function.args.kwonlyargs]
    bound: list[Any] = [argument for argument in arguments if argument.arg == "config"]
    names = (node for node in ast.walk(function) if isinstance(node, ast.Name) and node.id == "config")
    bound += [name for name in names if isinstance(name.ctx, ast.Store)]
    assert len(bound) == 1, f"open_run binds config {len(bound)} times"
