"""The names, signatures and types that an editor or a notebook shows."""

import ast
import dataclasses
import inspect
import os
import subprocess
import sys
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path

import pytest

import handgrad
from handgrad.api.training import Settings
from handgrad.settings.config import RunConfig

PATHS = {"data", "out", "init_from", "teacher"}  # which may be path objects


def test_the_keywords_are_the_fields_of_a_run() -> None:
    """In their order and with their types; after the steps the epochs, which set them."""
    fields = {f.name: f.type for f in dataclasses.fields(RunConfig)}
    fields = {
        key: kind
        for name in fields
        for key, kind in ((name, fields[name]), ("epochs", float))
        if key == name or name == "steps"
    }
    expected = {name: str | os.PathLike[str] if name in PATHS else kind for name, kind in fields.items()}
    expected["reward"] = str | Callable[..., float]
    assert list(Settings.__annotations__.items()) == list(expected.items())


@pytest.mark.parametrize("described", [handgrad.Training, handgrad.train, handgrad.preset, handgrad.plan])
def test_a_signature_shows_every_setting(described: object) -> None:
    parameters = inspect.signature(described).parameters
    settings = [name for name, parameter in parameters.items() if parameter.default is ...]
    assert settings == list(Settings.__annotations__) and "learning_rate" in settings
    assert not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())


def test_the_names_that_completion_offers() -> None:
    """Those of the interface, and none that serves the module itself."""
    assert [name for name in dir(handgrad) if not name.startswith("__")] == sorted(handgrad.__all__)
    assert {"__version__", "__doc__"} <= set(dir(handgrad))
    assert files("handgrad").joinpath("py.typed").is_file(), "type checkers read the annotations"


def test_type_checkers_see_the_public_names() -> None:
    """They read a literal `__all__`, without which each name is private to them, and imports from the homes; the look-up at
    run time, which would make any misspelt name pass, is hidden from them."""
    tree = ast.parse(Path(inspect.getsourcefile(handgrad) or "").read_text())
    given = [node for node in tree.body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"]
    assert [ast.literal_eval(node.value) for node in given] == [sorted(handgrad.HOMES)]
    branches = {ast.unparse(node.test): node.body for node in tree.body if isinstance(node, ast.If)}
    imports = [node for node in branches["TYPE_CHECKING"] if isinstance(node, ast.ImportFrom)]
    assert {alias.name: node.module for node in imports for alias in node.names} == handgrad.HOMES
    (hidden,) = branches["not TYPE_CHECKING"]
    assert isinstance(hidden, ast.FunctionDef) and hidden.name == "__getattr__"
    assert not any(isinstance(node, ast.FunctionDef) and node.name == "__getattr__" for node in tree.body)


def test_help_opens_with_what_to_do(tmp_path: Path) -> None:
    """And what it shows runs."""
    lines = (handgrad.__doc__ or "").split("\n\n")[1]
    assert "handgrad.prepare(" in lines and "handgrad.load(" in lines
    code = lines.replace('out="runs/mine"', 'out="runs/mine", steps=2, eval_tokens=512, quiet=True')
    code = "import handgrad\n" + "\n".join(line.strip() for line in code.splitlines())
    (tmp_path / "my_text.txt").write_text("Once upon a time there was a fox. " * 400)
    run = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip()


def test_a_misspelt_keyword_is_found(shards: Path, tmp_path: Path) -> None:
    with pytest.raises(handgrad.HandgradError, match="learning_rate"):
        handgrad.train("tiny", data=shards, out=tmp_path / "run", learning_rat=1e-3)
