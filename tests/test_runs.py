"""Whole runs: the same bits twice, after a kill, after a signal; checkpoints that are complete or do not exist."""

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import safetensors.torch
import torch

from handgrad.data.llmc_header import HEADER_BYTES, header
from handgrad.data.prepare import PrepareOptions, prepare
from handgrad.errors import ConfigError, DataError, NumericsError, Preempted
from handgrad.joins.parallel.ranks import Ranks
from handgrad.run import checkpointing, loop
from handgrad.run.folder import RunFolder
from handgrad.run.open import train
from handgrad.settings.config import RunConfig, to_toml
from handgrad.storage import checkpoint
from handgrad.training.step import TrainStep
from tests.conftest import write_text

if TYPE_CHECKING:  # it imports this module
    from tests.distributed.runs import Launcher

TIMES = ("step_ms", "tokens_per_second", "time")  # the only fields of a record that may differ between equal runs


def records(run: str | Path, kinds: tuple[str, ...] = ("step", "validation", "sample")) -> list[dict]:
    lines = [json.loads(line) for line in (Path(run) / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k not in TIMES} for line in lines if line["kind"] in kinds]


def tensors(run: str | Path, step: int) -> dict[str, torch.Tensor]:
    """Of a checkpoint's files, however many wrote them."""
    folder = Path(run) / "checkpoints" / f"step_{step:08d}"
    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        found |= {name: tensor.clone() for name, tensor in safetensors.torch.load_file(file).items()}  # no map
    return found


def same_bits(a: str | Path, b: str | Path, step: int) -> None:
    first, second = tensors(a, step), tensors(b, step)
    assert first.keys() == second.keys() and len(first) > 20
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert records(a) == records(b)
    states = [checkpoint.open_checkpoint(Path(run) / "checkpoints" / f"step_{step:08d}").manifest for run in (a, b)]
    for key in ("loss_window", "norm_window", "skips_in_a_row", "identity", "step"):
        assert states[0][key] == states[1][key], key
    assert (Path(a) / "main.log").read_text() == (Path(b) / "main.log").read_text()


def elsewhere(config: RunConfig, name: str, **settings: object) -> RunConfig:
    return replace(config, out=str(Path(config.out).with_name(name)), **settings)


def interrupt_at(patch: pytest.MonkeyPatch, step: int) -> None:
    original = TrainStep.begin

    def begin(training: TrainStep, now: int) -> None:
        if now == step:
            raise KeyboardInterrupt
        original(training, now)

    patch.setattr(TrainStep, "begin", begin)


def launch(config: RunConfig, folder: Path) -> subprocess.Popen:
    recipe = folder / f"{Path(config.out).name}.toml"
    recipe.write_text(to_toml(config))
    command = [sys.executable, "-m", "handgrad", "train", "--config", str(recipe)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@pytest.mark.fault(45)
def test_two_runs_give_the_same_bits(finished: RunConfig, tmp_path: Path) -> None:
    """One in this process, one through the command line."""
    again = elsewhere(finished, "again")
    process = launch(again, tmp_path)
    output, _ = process.communicate()
    assert process.returncode == 0, output
    same_bits(finished.out, again.out, finished.steps)
    assert (Path(again.out) / "report.html").exists()


def test_another_seed_gives_other_bits(finished: RunConfig) -> None:
    other = elsewhere(finished, "other", seed=finished.seed + 1)
    train(other)
    assert records(other.out) != records(finished.out)


@pytest.mark.fault(17)
def test_killed_and_resumed_gives_the_same_bits(finished: RunConfig, launcher: "Launcher", tmp_path: Path) -> None:
    """SIGKILL after a checkpoint; then the same command again."""
    killed = elsewhere(finished, "killed", log_every=1, async_save=False)  # or a kill may come before the checkpoint stands
    (tmp_path / "recipe.toml").write_text(to_toml(killed))
    started = launcher.start(1, ["train", "--config", str(tmp_path / "recipe.toml")], "kill-step:0:5")
    assert started.wait() == [-signal.SIGKILL], started.errors
    train(killed)
    assert "resumed at step 4" in (Path(killed.out) / "log.txt").read_text()
    same_bits(finished.out, killed.out, finished.steps)


def launch_ahead(patch: pytest.MonkeyPatch) -> None:
    """Runs launch the next step before they read the last one's result, as on a GPU."""
    original = loop.Run.pauses_after

    def pauses_after(run: loop.Run, step: int) -> bool:
        here = run.design
        run.design = replace(here, device=torch.device("cuda"))
        try:
            return original(run, step)
        finally:
            run.design = here

    patch.setattr(loop.Run, "pauses_after", pauses_after)


@pytest.fixture(params=["serial", "ahead"])
def launching(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways of the loop: each step waited for, as on a CPU, and the next one launched first, as on a GPU."""
    if request.param == "ahead":
        launch_ahead(monkeypatch)


def test_launching_ahead_changes_nothing(finished: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    ahead = elsewhere(finished, "ahead", save_every=5)
    launch_ahead(monkeypatch)
    launched, original = [], TrainStep.result

    def noting(training, step):
        launched.append(step)
        return original(training, step)

    monkeypatch.setattr(TrainStep, "result", noting)
    train(ahead)
    assert launched == list(range(12))
    same_bits(finished.out, ahead.out, finished.steps)
    names = ("loss", "norm", "learning_rate", "tokens")
    serial, pipelined = ([[r[n] for n in names] for r in records(run.out, ("step",))] for run in (finished, ahead))
    assert serial == pipelined


@pytest.mark.nightly(but=["ahead-2", "serial-15", "serial-1"])
@pytest.mark.fault(15)
@pytest.mark.usefixtures("launching")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_saves_and_exits_75(finished: RunConfig, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    stopped = elsewhere(finished, f"stopped{number}")
    original = TrainStep.begin

    def with_signal(training, step):
        if step == 6:
            os.kill(os.getpid(), number)
        return original(training, step)

    monkeypatch.setattr(TrainStep, "begin", with_signal)
    with pytest.raises(Preempted, match="after step 7") as raised:
        train(stopped)
    assert raised.value.exit_code == 75
    monkeypatch.undo()
    train(stopped)
    same_bits(finished.out, stopped.out, finished.steps)


@pytest.mark.nightly(but=["bf16"])
@pytest.mark.fault(17)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_resume_of_a_resume(finished: RunConfig, precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"skip_loss_z": 4.0, "save_every": 3, "precision": precision}
    pieces, whole = (elsewhere(finished, name, **settings) for name in ("pieces", "whole"))
    train(whole)
    original = TrainStep.begin
    for last in (2, 6, 8):

        def stopping(training, step, last=last):
            if step == last:
                raise KeyboardInterrupt  # like a crash: nothing is saved
            return original(training, step)

        monkeypatch.setattr(TrainStep, "begin", stopping)
        with pytest.raises(KeyboardInterrupt):
            train(pieces)
    monkeypatch.undo()
    train(pieces)
    same_bits(whole.out, pieces.out, whole.steps)


@pytest.mark.parametrize("rounded", [{"master_weights": False}, {"moments": "bf16"}], ids=str)
def test_a_resumed_run_that_rounds_its_state(config: RunConfig, rounded: dict) -> None:
    config = replace(config, precision="bf16", **rounded)
    train(config)
    expected = tensors(config.out, 12)
    shutil.rmtree(Path(config.out) / "checkpoints" / "step_00000012")
    train(config)
    found, name = tensors(config.out, 12), "m.wte" if "moments" in rounded else "wte"
    assert found[name].dtype == torch.bfloat16 and all(torch.equal(found[n], tensor) for n, tensor in expected.items())


def test_a_finished_run_stays_as_it_is(finished: RunConfig) -> None:
    before = records(finished.out)
    assert train(finished) is None
    assert records(finished.out) == before


@pytest.mark.fault(20)
def test_another_configuration_is_refused_and_named(finished: RunConfig) -> None:
    with pytest.raises(ConfigError, match=r"learning_rate: 0\.003 -> 0\.1") as raised:
        train(replace(finished, learning_rate=0.1))
    assert raised.value.exit_code == 78
    train(replace(finished, steps=14), allow_changes=True)
    assert any("steps: 12 -> 14" in r["text"] for r in records(finished.out, ("event",)))
    # What does not touch the numbers may change freely.
    train(replace(finished, steps=14, log_every=1, save_every=5))


def test_a_checkpoint_of_an_older_version_goes_on(finished: RunConfig) -> None:
    """One that knew neither backends nor loss scales: its settings are the defaults of today's."""
    config = replace(finished, steps=14)
    for manifest in (Path(finished.out) / "checkpoints").glob("*/manifest.json"):
        content = json.loads(manifest.read_text())
        for name in ("backend", "master_weights", "gpu_every"):
            del content["config"][name]
        del content["loss_scale"], content["sha256"]
        digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
        manifest.write_text(json.dumps({"sha256": digest, **content}))
    train(config, allow_changes=True)
    changes = [r["text"] for r in records(config.out, ("event",))]
    assert changes == ["configuration changed: steps: 12 -> 14"]


@pytest.mark.fault(20)
def test_other_data_is_refused(finished: RunConfig, shards: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    for split, name in (("train", "x_train_000000.bin"), ("validation", "x_val_000000.bin")):
        tokens = (shards / f"{split}_000000.bin").read_bytes()[HEADER_BYTES:]
        tokens = (50256).to_bytes(2, "little") + tokens[2:]  # GPT-2's, or it would be refused as bytes
        (other / name).write_bytes(header(len(tokens) // 2) + tokens)
    shutil.rmtree(Path(finished.out) / "samples")
    for allow_changes in (False, True):  # of 50,257 words instead of 257, so no change that could be allowed
        with pytest.raises(ConfigError, match="trained with another tokenizer"):
            train(replace(finished, data=str(other)), allow_changes=allow_changes)


@pytest.mark.fault(12)
def test_two_trainers_in_one_folder(finished: RunConfig) -> None:
    held = RunFolder(
        replace(finished, lanes=1, precision="fp32", packing="stream", objective="tokens", teacher_divergence="forward"),
        Ranks(),
        allow_changes=False,
    )
    try:
        with pytest.raises(ConfigError, match="another process is training"):
            train(finished)
    finally:
        held.close()


@pytest.mark.usefixtures("launching")
def test_a_run_whose_last_step_is_not_finite_does_not_end_well(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    original = TrainStep.result

    def poisoned(training, step):
        result = original(training, step)
        last = step == training.design.schedule.steps - 1
        return replace(result, norm=float("inf"), skipped="norm is inf") if last else result

    monkeypatch.setattr(TrainStep, "result", poisoned)
    with pytest.raises(NumericsError, match="newest checkpoint is of step 8"):
        train(config)


@pytest.mark.usefixtures("launching")
def test_skips_are_counted_in_a_row_and_across_a_resume(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two skipped steps, a good one, then skips for ever, with a stop in between: the run ends at the third in a row."""
    original = TrainStep.result

    def skipping(training, step):
        result = original(training, step)
        return replace(result, skipped="said so") if step not in (2, 3) else result

    config = replace(config, max_skips=3, save_every=1)

    def stopping(training, step):
        if step == 6:
            raise KeyboardInterrupt
        return skipping(training, step)

    monkeypatch.setattr(TrainStep, "result", stopping)
    with pytest.raises(KeyboardInterrupt):
        train(config)
    monkeypatch.setattr(TrainStep, "result", skipping)
    with pytest.raises(NumericsError, match="the last at step 7"):
        train(config)


def test_a_model_that_diverged_does_not_write(config: RunConfig) -> None:
    """A learning rate of 1e30 without NaN in the losses yet: the sample finds the infinite weights."""
    with pytest.raises(NumericsError):
        train(replace(config, learning_rate=1e30, warmup_steps=0, steps=3))


def test_a_changed_library_is_said(finished: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "versions_of", lambda device, ops: {"torch": "9.9", "device": "abacus"})
    train(finished)
    told = " ".join(r["text"] for r in records(finished.out, ("event",)))
    assert "-> 9.9" in told and "-> abacus" in told


def test_a_deleted_config_does_not_hide_a_change(finished: RunConfig) -> None:
    (Path(finished.out) / "config.toml").unlink()
    with pytest.raises(ConfigError, match="seed"):
        train(replace(finished, seed=5))
    assert not (Path(finished.out) / "config.toml").exists(), "a refused command writes nothing"


def test_weights_of_another_tokenizer_are_refused(finished: RunConfig, tmp_path: Path) -> None:
    prepare(PrepareOptions(str(write_text(tmp_path / "t.txt")), tmp_path / "bpe", tokenizer="bpe:257", workers=1))
    with pytest.raises(DataError, match="another tokenizer"):
        train(elsewhere(finished, "warm", init_from=finished.out, data=str(tmp_path / "bpe")))


def test_overflows_of_fp16_are_no_skips_until_the_scale_cannot_fall(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = TrainStep.result

    def overflowing(training, step):
        result = original(training, step)
        scale = 2.0 if step < 5 else 1.0
        return replace(result, norm=float("inf"), skipped="gradient norm is inf", loss_scale=scale)

    monkeypatch.setattr(TrainStep, "result", overflowing)
    with pytest.raises(NumericsError, match="2 updates in a row were skipped, the last at step 7"):
        train(replace(config, max_skips=2))
    told = [r["text"] for r in records(config.out, ("event",))]
    assert sum("overflowed at loss scale 2" in text for text in told) == 5


def test_the_loss_scale_belongs_to_fp16(config: RunConfig) -> None:
    """A run resumed in another precision starts with that precision's own scale."""
    train(replace(config, steps=2, save_every=2))
    load_run, found = checkpointing.load_run, []

    def watching(source, config, training):
        load_run(source, config, training)
        found.append(training.state.loss_scale[1].item())

    changed = replace(config, steps=3, precision="fp16")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpointing, "load_run", watching)
        train(changed, allow_changes=True)
    assert found == [2.0**16]


def test_init_from_starts_from_the_weights(finished: RunConfig) -> None:
    run = elsewhere(finished, "warm", init_from=finished.out, steps=1, learning_rate=0.0)
    train(run)
    old, new = tensors(finished.out, 12), tensors(run.out, 1)
    assert all(torch.equal(old[n], new[n]) for n in old if not n.startswith(("m.", "v.")))


@pytest.mark.fault(36)
@pytest.mark.usefixtures("launching")
def test_non_finite_losses_are_skipped_then_end_the_run(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    original = TrainStep.begin

    def poisoned(training, step):
        if step >= 6:
            training.state.weights.lnf_bias[0] = float("nan")
        return original(training, step)

    monkeypatch.setattr(TrainStep, "begin", poisoned)
    with pytest.raises(NumericsError, match=r"3 updates in a row.*the last checkpoint is clean") as raised:
        train(replace(config, max_skips=3, save_every=2))
    assert raised.value.exit_code == 76
    events = [r["text"] for r in records(config.out, ("event",)) if "no update" in r["text"]]
    assert len(events) == 3 and "loss is nan" in events[0] and "non-finite gradients at wte" in events[0]
    newest = checkpoint.newest(Path(config.out) / "checkpoints")[0]
    stored = safetensors.torch.load_file(newest.folder / "model.safetensors")
    assert newest.step == 6 and all(torch.isfinite(t).all() for t in stored.values())
