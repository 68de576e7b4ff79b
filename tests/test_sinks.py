"""Trackers get every figure by the names of metrics.jsonl, and none of them can hurt a run: slow, down, full, or absent."""

import dataclasses
import importlib.util
import json
import math
import sys
import threading
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from handgrad.errors import UsageError
from handgrad.run import sinks
from handgrad.run.open import train
from handgrad.run.sinks import Sinks, chosen, figures
from handgrad.settings.config import RunConfig
from tests.test_runs import elsewhere, same_bits


class Fake:
    """Keeps what it gets; `act` runs before, and may raise or wait."""

    def __init__(self, act: Callable[[], object] = lambda: None):
        self.act, self.got, self.finished = act, [], False

    def send(self, step: int, figures: dict[str, float]) -> None:
        self.act()
        self.got.append((step, figures))

    def finish(self) -> None:
        self.finished = True


def fail(*_: object, **__: object) -> Any:
    raise ConnectionError("no route\nto host")


def step(number: int) -> dict[str, Any]:
    return {"kind": "step", "step": number, "loss": 2.5, "skipped": None, "time": 1e9}


def test_names_are_those_of_the_record() -> None:
    assert figures({**step(3), "norm": math.nan, "tokens": 7}) == {"step/loss": 2.5, "step/tokens": 7}
    task = {"kind": "evaluation", "step": 3, "task": "hellaswag", "examples": 10, "metrics": {"acc_norm": [0.3, 0.01]}}
    assert figures(task) == {"evaluation/hellaswag/acc_norm": 0.3}
    assert figures({"kind": "fp8", "step": 3, "tensors": {"qkv": {"clipped_fraction": 0.0}}}) == {
        "fp8/qkv/clipped_fraction": 0.0
    }
    assert figures({"kind": "event", "step": 3, "text": "saved"}) == {}


def test_every_figure_arrives_in_order() -> None:
    fake, said = Fake(), []
    all_sinks = Sinks({"wandb": lambda: fake}, said.append)
    for number in range(1, 501):
        all_sinks.record(step(number))
    all_sinks.close()
    assert [number for number, _ in fake.got] == list(range(1, 501)) and fake.finished and said == []


def test_steps_never_go_back() -> None:
    """Weights & Biases drops what does; a save is told when its checkpoint stands, some steps later."""
    fake = Fake()
    all_sinks = Sinks({"wandb": lambda: fake}, pytest.fail)
    for number in (1, 2, 3):
        all_sinks.record(step(number))
    all_sinks.record({"kind": "save", "step": 2, "seconds": 1.5})
    all_sinks.close()
    assert [number for number, _ in fake.got] == [1, 2, 3, 3] and fake.got[-1][1] == {"save/seconds": 1.5}


@pytest.mark.fault(40)
@pytest.mark.parametrize("opens", [lambda: Fake(fail), fail, lambda: sys.exit(1)], ids=["down", "refused", "exits"])
def test_one_that_fails_is_named_once(opens: Callable[[], Fake]) -> None:
    said: list[str] = []
    all_sinks = Sinks({"wandb": opens}, said.append)
    for number in range(1, 50):
        all_sinks.record(step(number))
    all_sinks.close()
    assert len(said) == 1 and said[0].startswith("log_to wandb ") and "\n" not in said[0]
    assert said[0].endswith("; training continues, and metrics.jsonl has every figure")


@pytest.mark.fault(40)
def test_one_that_hangs_keeps_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """A full queue drops its records, and the end of the run waits for so long and no longer."""
    monkeypatch.setattr(sinks, "LAST_SECONDS", 0.2)
    held, said, good = threading.Event(), [], Fake()
    all_sinks = Sinks({"wandb": lambda: Fake(held.wait), "trackio": lambda: good}, said.append, size=200)
    began = time.monotonic()
    for number in range(1, 100):
        all_sinks.record(step(number))
    assert said == []
    for number in range(100, 300):
        all_sinks.sinks[0].put(number, {"step/loss": 1.0})
    all_sinks.close()
    assert time.monotonic() - began < 5  # milliseconds on a quiet machine, beside the 0.2 s
    held.set()
    assert len(said) == 1 and said[0].startswith("log_to wandb falls behind and misses figures from step 2")
    assert len(good.got) == 99 and good.finished


def test_absent_and_unknown_ones_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sinks.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"log_to wandb needs the package wandb, .*`pip install wandb`"):
        chosen("wandb")
    with pytest.raises(UsageError, match=r"unknown tracker 'tensorbord' .*did you mean tensorboard"):
        chosen("wandb,tensorbord")
    assert chosen("") == [] and chosen(" , ") == []


def test_a_run_is_refused_before_anything_is_written(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sinks.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match="pip install trackio"):
        train(dataclasses.replace(config, log_to="trackio"))
    assert not Path(config.out).exists()


def fake_wandb(monkeypatch: pytest.MonkeyPatch, log: Callable[..., object]) -> list[dict[str, Any]]:
    """A module wandb in place of the real one; returns the arguments of every init."""
    inits: list[dict[str, Any]] = []
    run = types.SimpleNamespace(log=log, finish=lambda: None)
    module = types.ModuleType("wandb")
    module.__spec__ = importlib.util.spec_from_loader("wandb", None)
    module.Settings = dict  # type: ignore
    module.init = lambda **how: inits.append(how) or run  # type: ignore
    monkeypatch.setitem(sys.modules, "wandb", module)
    return inits


def losses(out: str) -> list[float]:
    lines = [json.loads(line) for line in (Path(out) / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if line["kind"] == "step"]


def test_a_run_sends_its_figures(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A resumed run goes on under the same identity."""
    got: list[tuple[int, dict[str, float]]] = []
    inits = fake_wandb(monkeypatch, lambda figures, step: got.append((step, figures)))
    config = dataclasses.replace(config, log_to="wandb")
    train(config)
    assert [values["step/loss"] for _, values in got if "step/loss" in values] == losses(config.out)
    assert any("validation/loss" in values for _, values in got)
    train(config)
    first, second = inits
    assert first["id"] == second["id"] and first["name"] == Path(config.out).name and first["config"]["seed"] == config.seed


@pytest.mark.fault(40)
def test_a_run_outlives_its_tracker(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    without = elsewhere(config, "without")
    train(without)
    fake_wandb(monkeypatch, fail)
    config = dataclasses.replace(config, log_to="wandb")
    train(config)
    same_bits(without.out, config.out, config.steps)
    assert len(losses(config.out)) == config.steps
    log = (Path(config.out) / "log.txt").read_text()
    assert log.count("log_to wandb") == 1 and "ConnectionError: no route to host" in log


@pytest.mark.parametrize("name", sinks.PACKAGES)
def test_with_the_real_package(name: str, config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Offline, where it is installed: it opens, takes every figure, and has nothing to complain of."""
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    config = dataclasses.replace(config, log_to=name)
    train(config)
    assert "log_to" not in (Path(config.out) / "log.txt").read_text()
    kept = {"wandb": config.out, "tensorboard": f"{config.out}/tensorboard", "trackio": str(tmp_path / "trackio")}
    assert any(path.stat().st_size > 100 for path in Path(kept[name]).rglob("*") if path.is_file())
