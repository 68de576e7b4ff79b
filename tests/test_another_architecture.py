"""An architecture takes a file and a name: GPT-2's file under another name does all that GPT-2 does, with its bits."""

import copy
import importlib.util
import json
import sys
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import pytest

from handgrad.cli import main
from handgrad.config import ARCHITECTURES, FIELDS, RunConfig
from handgrad.models import gpt2
from handgrad.run.open import open_run, train

NUMBERS = ("kind", "step", "loss", "norm", "lr", "nats", "text", "size_bytes")


@pytest.fixture
def another(monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of `handgrad/models/another.py`, a copy of GPT-2's file, entered among the architectures."""
    spec = importlib.util.spec_from_file_location("handgrad.models.another", gpt2.__file__)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    field = copy.copy(FIELDS["architecture"])
    field.metadata = MappingProxyType({**field.metadata, "choices": (*ARCHITECTURES, "another")})  # type: ignore[misc]
    monkeypatch.setitem(FIELDS, "architecture", field)
    return "another"


def numbers_of(config: RunConfig, capsys: pytest.CaptureFixture) -> list[object]:
    """The numbers of a run that was interrupted, then those of the commands that read it."""
    with open_run(config) as run:
        run.begin()
        run.advance(2)
    train(config)
    capsys.readouterr()
    records = [json.loads(line) for line in (Path(config.out) / "metrics.jsonl").read_text().splitlines()]
    found: list[object] = [{name: record.get(name) for name in NUMBERS} for record in records]
    for line in (
        ["sample", config.out, "--prompt", "the", "--max-tokens", "9"],
        ["evaluate", config.out, "--precision", "fp32"],
    ):
        assert main(line) == 0, line
        found.append(capsys.readouterr().out.replace(config.out, "RUN"))
    return found


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_an_architecture_is_a_file_and_a_name(
    another: str, config: RunConfig, precision: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    config = replace(config, precision=precision, steps=4, eval_every=2, save_every=2, sample_every=2, sample_tokens=8)
    runs = [replace(config, architecture=name, out=str(tmp_path / name)) for name in ("gpt2", another)]
    theirs, ours = (numbers_of(run, capsys) for run in runs)
    assert ours == theirs
