"""Starting a run is simple: what was asked becomes one configuration, which is checked once and resolved once."""

import ast
import dataclasses
import inspect
import sys
from collections.abc import Iterator
from types import CodeType
from typing import Any

import pytest

from handgrad.run.open import complete, open_run
from handgrad.run.resolve import resolve
from handgrad.settings.config import RunConfig, check


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


def test_the_configuration_is_bound_once() -> None:
    (function,) = ast.parse(inspect.getsource(open_run)).body
    assert isinstance(function, ast.FunctionDef)
    arguments = [*function.args.args, *function.args.kwonlyargs]
    bound: list[Any] = [argument for argument in arguments if argument.arg == "config"]
    names = (node for node in ast.walk(function) if isinstance(node, ast.Name) and node.id == "config")
    bound += [name for name in names if isinstance(name.ctx, ast.Store)]
    assert len(bound) == 1, f"open_run binds config {len(bound)} times"
