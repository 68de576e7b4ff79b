"""Runs in fp8: the same bits twice and after every kind of stop, changed settings, the record, the command line."""

import dataclasses
import json
import math
import os
import signal
from pathlib import Path

import pytest

from handgrad.cli import main
from handgrad.errors import Preempted
from handgrad.joins.fp8.formats import COUNTING, MARGIN, SCALE
from handgrad.joins.fp8.scaling import Scaling
from handgrad.run.open import train
from handgrad.settings.config import RunConfig
from handgrad.storage import checkpoint
from handgrad.training.step import TrainStep
from tests.conftest import small_run
from tests.test_commands import SMALL, refused
from tests.test_runs import elsewhere, launch_ahead, records, same_bits

STEPS = 8


@pytest.fixture(scope="module")
def whole(shards: Path, tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    """An unbroken run."""
    settings = {"steps": STEPS, "save_every": 3, "eval_every": 4, "keep_checkpoints": 0, "sample_tokens": 4}
    fp8 = {"precision": "fp8", "fp8_window": 3, "fp8_count_every": 3, "fp8_head": "forward,dgrad", "recompute": 1}
    config = dataclasses.replace(small_run(shards, tmp_path_factory.mktemp("whole") / "run"), **settings, **fp8)
    train(config)
    return config


@pytest.fixture
def again(whole: RunConfig, tmp_path: Path) -> RunConfig:
    """The same run in another folder."""
    return dataclasses.replace(whole, out=str(tmp_path / "again"))


def manifest(config: RunConfig, step: int) -> dict:
    return checkpoint.open_checkpoint(Path(config.out) / "checkpoints" / f"step_{step:08d}").manifest


def same(a: RunConfig, b: RunConfig) -> None:
    """The weights, the record, and what the checkpoints say of the scales."""
    same_bits(a.out, b.out, a.steps)
    for kind in ("fp8", "event"):
        assert records(a.out, (kind,)) == records(b.out, (kind,))
    assert manifest(a, a.steps).get("fp8") == manifest(b, b.steps).get("fp8")


def stop_before(step: int, patch: pytest.MonkeyPatch, *, crash: bool) -> None:
    """The process is gone before `step` begins, or asked to go and may save."""
    original = TrainStep.begin

    def begin(training: TrainStep, now: int) -> None:
        if now == step - (not crash):
            if crash:
                raise KeyboardInterrupt
            os.kill(os.getpid(), signal.SIGTERM)
        original(training, now)

    patch.setattr(TrainStep, "begin", begin)


def train_until(config: RunConfig, step: int, *, crash: bool) -> None:
    with pytest.MonkeyPatch.context() as patch:
        stop_before(step, patch, crash=crash)
        with pytest.raises(KeyboardInterrupt if crash else Preempted):
            train(config)


@pytest.mark.parametrize("ahead", [False, True])
def test_two_runs_give_the_same_bits(
    whole: RunConfig, again: RunConfig, ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Waiting for every step, as on a CPU, or launching the next one first, as on a GPU."""
    if ahead:
        launch_ahead(monkeypatch)
    train(again)
    same(whole, again)


def test_crashed_and_resumed_gives_the_same_bits(whole: RunConfig, again: RunConfig) -> None:
    """Before the first checkpoint, and twice after one."""
    for step in (2, 5, 7):
        train_until(again, step, crash=True)
    train(again)
    same(whole, again)


@pytest.mark.parametrize("step", [1, 4])
def test_stopped_by_a_signal_and_resumed_gives_the_same_bits(whole: RunConfig, again: RunConfig, step: int) -> None:
    train_until(again, step, crash=False)
    assert len(manifest(again, step)["fp8"]) == 12 * again.num_layers + 2
    train(again)
    same(whole, again)


def test_without_master_weights_and_with_current_scales(again: RunConfig) -> None:
    config = dataclasses.replace(again, master_weights=False, fp8_scaling="current")
    train(config)
    pieces = elsewhere(config, "pieces")
    train_until(pieces, 4, crash=False)
    train(pieces)
    same(config, pieces)


# Changed settings.


@pytest.fixture
def scales_at_the_start(monkeypatch: pytest.MonkeyPatch) -> list[tuple[bool, dict]]:
    """Of each run that is started: whether it calibrates, and the scales (by name) of its first step."""
    found = []
    made: list[Scaling] = []
    make, original = Scaling.__init__, TrainStep.run_before_step

    def noting_scaling(scaling: Scaling, *rest: object) -> None:
        make(scaling, *rest)
        made.append(scaling)

    def noting(training: TrainStep, step: int) -> None:
        calibrates = bool(made) and not made[-1].calibrated
        original(training, step)
        if made and (calibrates or not found):
            found.append((calibrates, made[-1].saved()))

    monkeypatch.setattr(Scaling, "__init__", noting_scaling)
    monkeypatch.setattr(TrainStep, "run_before_step", noting)
    return found


@pytest.mark.nightly(but=["{'fp8_window': 5}", "{'fp8_scaling': 'current'}"])
@pytest.mark.parametrize(
    "change",
    [{"fp8_window": 5}, {"fp8_margin": 2}, {"fp8_gradients": "e5m2"}, {"fp8_count_every": 5}, {"fp8_scaling": "current"}],
    ids=str,
)
def test_other_rules_for_scales_make_them_anew(again: RunConfig, scales_at_the_start: list, change: dict) -> None:
    train_until(again, 4, crash=False)
    saved = manifest(again, 4)["fp8"]
    scales_at_the_start.clear()
    changed = dataclasses.replace(again, **change)
    train(changed, allow_changes=True)
    ((calibrates, scales),) = scales_at_the_start
    assert calibrates and scales.keys() == saved.keys()
    for name, (scaling, history, _) in scales.items():
        assert scaling[MARGIN] == changed.fp8_margin and len(history) == changed.fp8_window, name
        assert max(history) == 0
        assert scaling[COUNTING] == float(changed.fp8_count_every == 5), "the fifth step is counted"
    if change == {"fp8_margin": 2}:
        weights = [name for name in scales if name.endswith("_weight")]
        assert all(scales[name][0][SCALE] <= saved[name][0][SCALE] / 2 for name in weights)
    lines = [line["step"] for line in records(changed.out, ("fp8",))]
    assert lines == [step for step in range(1, 5) if step % 3 == 0] + [
        step for step in range(5, STEPS + 1) if step % changed.fp8_count_every == 0
    ]


def test_fewer_products_in_fp8_keep_their_scales(again: RunConfig, scales_at_the_start: list) -> None:
    train_until(again, 4, crash=False)
    saved = manifest(again, 4)["fp8"]
    scales_at_the_start.clear()
    train(dataclasses.replace(again, fp8_keep_bf16="0.mlp,proj"), allow_changes=True)
    ((calibrates, scales),) = scales_at_the_start
    assert not calibrates and len(scales) == len(saved) - 6 - 2 * 3
    assert scales == {name: saved[name] for name in scales}


def test_more_products_in_fp8_begin_with_scales_of_their_own(again: RunConfig, scales_at_the_start: list) -> None:
    """All tensors do: those that were quantised before, too."""
    start = dataclasses.replace(again, fp8_keep_bf16="0.mlp", fp8_head="")
    train_until(start, 4, crash=False)
    scales_at_the_start.clear()
    train(again, allow_changes=True)
    ((calibrates, scales),) = scales_at_the_start
    assert calibrates and all(math.log2(scaling[SCALE]).is_integer() for scaling, _, _ in scales.values())
    assert all(math.isfinite(line["loss"]) for line in records(again.out, ("step",)))


@pytest.mark.parametrize(("first", "second"), [("bf16", "fp8"), ("fp8", "bf16")])
def test_a_run_goes_over_to_another_precision(again: RunConfig, first: str, second: str) -> None:
    train_until(dataclasses.replace(again, precision=first), 4, crash=False)
    train(dataclasses.replace(again, precision=second), allow_changes=True)
    assert ("fp8" in manifest(again, 4)) == (first == "fp8") and ("fp8" in manifest(again, STEPS)) == (second == "fp8")


# The record.


def test_the_record_has_a_line_of_what_was_counted(whole: RunConfig) -> None:
    lines = records(whole.out, ("fp8",))
    assert [line["step"] for line in lines] == [3, 6]
    classes = {"ln1", "atty", "ln2", "gelu", "dqkv", "dresidual_mid", "dhidden", "dresidual_out", "lnf", "wte"}
    classes |= {"qkv_weight", "proj_weight", "fc_weight", "fcproj_weight"}
    for line in lines:
        assert line["tensors"].keys() == classes
        for name, found in line["tensors"].items():
            assert 0 < found["largest_amax"] < math.inf, name
            assert found["smallest_scale"] <= found["largest_scale"]
            assert all(math.log2(found[scale]).is_integer() for scale in ("smallest_scale", "largest_scale"))
            assert 0 <= found["clipped_fraction"] < 0.01, "the scales follow the numbers"
            assert 0 <= found["vanished_fraction"] < 0.5
            assert found["most_vanished"].rpartition(".")[2] == name
    assert any(found["vanished_fraction"] > 0 for found in lines[0]["tensors"].values())


def test_a_run_in_another_precision_has_no_such_line(again: RunConfig) -> None:
    train(dataclasses.replace(again, precision="bf16", steps=3))
    assert records(again.out, ("fp8",)) == [] and "fp8" not in manifest(again, 3)


def test_the_header_names_the_products(whole: RunConfig) -> None:
    log = (Path(whole.out) / "log.txt").read_text()
    assert "fp8        qkv, proj, mlp, head.forward, head.dgrad; gradients e4m3, delayed scaling over 3 steps" in log


# The command line.


def test_from_data_to_text(shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """plan, train, evaluate, sample: the checkpoint is one like every other."""
    run, data = str(tmp_path / "run"), ["--data", str(shards)]
    fp8 = [*SMALL, "--precision", "fp8", "--fp8-keep-bf16", "0.mlp", "--fp8-head", "forward", "--fp8-count-every", "2"]
    assert main(["plan", *fp8, *data]) == 0
    assert "fp8 weights" in capsys.readouterr().out
    assert main(["train", *fp8, *data, "--out", run]) == 0
    shown = capsys.readouterr().out
    assert "mlp (but 0.mlp), head.forward" in shown and "step 4/4 | loss" in shown and "fp8 scales" in shown
    for command in (["evaluate", run], ["evaluate", run, "--precision", "bf16"]):
        assert main(command) == 0
        loss = float(capsys.readouterr().out.split("loss ")[1].split()[0])
        assert abs(loss - records(run, ("validation",))[-1]["loss"]) < 0.1
    assert main(["sample", run, "--prompt", "the river", "--max-tokens", "8"]) == 0
    assert capsys.readouterr().out.startswith("the river")
    lines = [json.loads(line) for line in (Path(run) / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line["kind"] == "fp8"] == [2, 4]
    assert main(["train", *fp8, *data, "--out", str(tmp_path / "warm"), "--init-from", run]) == 0
    first = records(tmp_path / "warm", ("step",))[0]
    assert first["loss"] < records(run, ("step",))[0]["loss"] - 0.01, "it starts where the other ended"


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--fp8-keep-bf16", "fc"], "fp8_keep_bf16 takes qkv, proj, mlp"),
        (["--fp8-keep-bf16", "qkv,2.mlp"], "(layers 0 to 1), found '2.mlp'"),
        (["--fp8-keep-bf16=-1.mlp"], "found '-1.mlp'"),
        (["--fp8-keep-bf16", "\N{SUPERSCRIPT ONE}.mlp"], "fp8_keep_bf16 takes"),
        (["--channels", "320"], "precision fp8 takes heads of up to 128 channels, found 160; --precision bf16"),
        (["--fp8-head", "wgrad"], "fp8_head wgrad needs dgrad, found 'wgrad'"),
        (["--fp8-head", "backward"], "fp8_head takes auto, none, forward, dgrad, wgrad, found 'backward'"),
        (["--channels", "40"], "channels must be a multiple of 16 for precision fp8, found 40"),
        (
            ["--sequence-length", "8", "--micro-batch", "1"],
            "must be a multiple of 16 for precision fp8, found 1 * 8 = 8; try --micro-batch 2",
        ),
        (["--dropout", "0.1"], "precision fp8 trains without dropout, found 0.1; --precision bf16"),
        (["--fp8-window", "0"], "fp8_window must be at least 1"),
        (["--fp8-count-every", "0"], "fp8_count_every must be at least 1"),
        (["--fp8-saturation-steps", "0"], "fp8_saturation_steps must be at least 1"),
        (["--fp8-margin", "9"], "fp8_margin must be 0 to 8 binades, found 9"),
        (["--fp8-gradients", "e3m4"], "fp8_gradients must be one of auto, e4m3, e5m2, mixed"),
        (["--fp8-on-saturation", "stop"], "fp8_on_saturation must be one of warn, widen"),
    ],
)
@pytest.mark.parametrize("command", ["train", "plan"])
def test_usage_errors(
    command: str, arguments: list[str], told: str, shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    out = tmp_path / "run"
    line = refused(capsys, 64, command, *SMALL, "--precision", "fp8", "--data", str(shards), "--out", str(out), *arguments)
    assert told in line
    assert not out.exists(), "a refused command writes nothing"


def test_no_text_is_written_in_fp8(whole: RunConfig, capsys: pytest.CaptureFixture) -> None:
    assert "--precision" in refused(capsys, 64, "sample", whole.out, "--precision", "fp8")
