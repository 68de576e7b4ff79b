"""Checkpoints that an earlier version wrote: of two runs that commit 62c5d08 stopped after 4 of 6 steps.

Promises that every later version takes them up as they are, without `allow_changes`: it knows their files, tensors and
manifest, finds the configuration and the data to be the same, loads each weight bit for bit, and makes steps 5 and 6 as the
version that wrote them did, but for what another machine's arithmetic changes. Where torch or the device is another one
than the manifest says, the log tells so, and the run goes on.

`fp32` has two layers and a trained vocabulary, `fp8` the scales of a layer and of the head.

Until schema 3 the `v` of a matrix had its size with Muon, too: the moments of its rows, then zeros. The last test makes
such a checkpoint of a new one.
"""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import handgrad
from handgrad.run.open import train
from handgrad.settings.config import RunConfig
from handgrad.storage import checkpoint
from handgrad.storage.manifest import OPTIMIZER_FILE, WEIGHTS_FILE
from handgrad.storage.tensor_files import Stored

OLD = Path(__file__).parent / "checkpoints_of_62c5d08"
CHECKPOINT = Path("checkpoints", "step_00000004")
WORDS = ("river", "stone", "old", "bright", "walks", "under", "the", "hill", "crow")
# (loss, gradient norm) of steps 5 and 6 in the unbroken runs, and the tolerance. Step 6 shows that the moments were loaded:
# without the first or the second ones its loss is off by 0.8 % or more.
GOES_ON = {
    "fp32": (((5.236307546496391, 0.8993451716478306), (5.1749765276908875, 0.8542049600964949)), 1e-4),
    "fp8": (((4.876067392528057, 1.15941691361416), (4.7314164862036705, 1.2793700685019367)), 2e-3),
}
LEARNING_RATES = (0.0055, 0.0023180194846605367)


@pytest.fixture(params=list(GOES_ON))
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def run(kind: str, tmp_path: Path) -> Path:
    """A copy of the run's folder, with the data that it was trained on beside it."""
    text, tokenizer = tmp_path / "text.txt", OLD / kind / CHECKPOINT / "tokenizer.json"
    text.write_text(" ".join(WORDS[n * n * 7 % 83 % len(WORDS)] for n in range(900)))
    data = handgrad.prepare(text, tmp_path / "shards", tokenizer=str(tokenizer) if tokenizer.exists() else "bytes")
    assert data.identity == manifest_of(kind)["identity"]["data"], "the test prepares other data"
    return Path(shutil.copytree(OLD / kind, tmp_path / "run"))


def manifest_of(kind: str) -> dict[str, Any]:
    return json.loads((OLD / kind / CHECKPOINT / "manifest.json").read_text())


def stored_weights(kind: str) -> dict[str, torch.Tensor]:
    return load_file(OLD / kind / CHECKPOINT / "model.safetensors")


def named(model: handgrad.Model, name: str) -> torch.Tensor:
    """A model's tensor like `blocks.0.fc_weight`, without the padding of the vocabulary."""
    found: Any = model.weights
    for part in name.split("."):
        found = found[int(part)] if part.isdecimal() else getattr(found, part)
    return found[: model.shape.vocab_size] if name == "wte" else found


def test_a_run_goes_on(kind: str, run: Path) -> None:
    expected, tolerance = GOES_ON[kind]
    settings = {"config": str(run / "config.toml"), "data": run.parent / "shards", "out": run, "quiet": True}
    with handgrad.Training(**settings) as training:
        assert training.completed == 4
        model = training.model()
        for name, stored in stored_weights(kind).items():
            now = named(model, name)
            assert now.dtype == (torch.bfloat16 if kind == "fp8" else torch.float32)
            assert torch.equal(now, stored.to(now.dtype)), name
        steps = training.steps(2)
    assert [step.step for step in steps] == [5, 6] and not any(step.skipped for step in steps)
    assert [step.learning_rate for step in steps] == pytest.approx(LEARNING_RATES, rel=1e-12)
    for step, (loss, norm) in zip(steps, expected, strict=True):
        assert (step.loss, step.norm) == pytest.approx((loss, norm), rel=tolerance)
    events = [record["text"] for record in handgrad.metrics(run, "event")]
    assert all("the bits may differ from an unbroken run's" in event for event in events), events
    after = load_file(run / "checkpoints" / "step_00000006" / "model.safetensors")
    for name, stored in stored_weights(kind).items():
        assert after[name].shape == stored.shape and not torch.equal(after[name], stored), name


def test_its_weights_are_loaded(kind: str, run: Path) -> None:
    """By whatever names a model: the run, the checkpoint."""
    stored = stored_weights(kind)
    for source in (run, run / CHECKPOINT):
        model = handgrad.load(source, device="cpu")
        for name, values in stored.items():
            assert values.dtype == torch.float32 and torch.equal(named(model, name), values), name
    assert handgrad.evaluate(model, run.parent / "shards").loss == pytest.approx(GOES_ON[kind][0][0][0], rel=0.05)


def with_full_sized_state(folder: Path) -> None:
    """Turns a checkpoint of Muon into one as versions wrote it before schema 3."""
    source = checkpoint.open_checkpoint(folder)
    assert source.manifest["schema"] == 3
    weights, state = (
        {name: values for path in source.parts(file) for name, values in load_file(path).items()}
        for file in (WEIGHTS_FILE, OPTIMIZER_FILE)
    )
    for name, values in state.items():
        full = torch.zeros_like(weights[name.partition(".")[2]])
        full.view(-1)[: values.numel()] = values.view(-1)
        state[name] = full
    manifest = {key: value for key, value in source.manifest.items() if key not in ("schema", "step", "files")}
    tokenizer = {path.name: path.read_bytes() for path in folder.glob("tokenizer*")}
    shutil.rmtree(folder)
    stored = [Stored.of(name, values) for name, values in {**weights, **state}.items()]
    checkpoint.save(folder.parent, source.step, stored, manifest, tokenizer)
    assert checkpoint.open_checkpoint(folder).manifest["schema"] == 1


@pytest.mark.nightly(but=["4"])
@pytest.mark.parametrize("lanes", [1, 4])
def test_a_full_sized_state_of_muon_goes_on(lanes: int, config: RunConfig, tmp_path: Path) -> None:
    """With the bits of the unbroken run, whose own checkpoint is the smaller one."""
    config = dataclasses.replace(config, optimizer="muon", lanes=lanes, micro_batch=2, save_every=4, steps=8)
    train(config)
    resumed = Path(shutil.copytree(config.out, tmp_path / "resumed"))
    middle, last = (checkpoint.folder_of(Path("checkpoints"), step) for step in (4, 8))
    shutil.rmtree(resumed / last)
    with_full_sized_state(resumed / middle)
    train(dataclasses.replace(config, out=str(resumed)))
    for file in (WEIGHTS_FILE, OPTIMIZER_FILE):
        tensors, expected = load_file(resumed / last / file), load_file(Path(config.out) / last / file)
        assert tensors.keys() == expected.keys()
        assert all(torch.equal(tensors[name], expected[name]) for name in expected), file
