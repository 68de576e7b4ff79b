"""The benchmarks: contenders that compute the same thing, fair turns, figures that follow from what was measured."""

import dataclasses
import io
import itertools
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from benchmarks import gpu_loss, gpu_step, ladder, same_bits
from benchmarks.contenders import HandgradRun, Settings, tokens_of
from benchmarks.turns import Peer, PeerFailed, contend, timed_turn
from benchmarks.twin_switches import ATTENTIONS, OPTIONS, Switches, switches_of
from handgrad.cli import main
from handgrad.errors import DataError, UsageError
from handgrad.optimizers.adamw import AdamW
from handgrad.optimizers.muon import Muon
from handgrad.settings.config import PRECISIONS

pytestmark = pytest.mark.nightly  # of a measuring script: nothing that the package promises rests on it

CPU = torch.device("cpu")
SMALL = Settings(
    model="tiny", micro_batch=2, sequence_length=16, micro_steps=2, precision="fp32", device="cpu", vocab_size=301
)
EAGER = Switches(attention="flash", compiled=False, autocast=False)

# A contender without a model: three steps a second, by its own account; what else it does, its arguments say.
DUMMY = """
import json, os, sys
name, log, behaviour = sys.argv[1:]
print(json.dumps({"loss": 9.0}), flush=True)
for number, line in enumerate(sys.stdin):
    seconds = float(line.split()[1])
    with open(log, "a") as file:
        file.write(f"{name} {seconds:g} {os.environ.get('TRITON_CACHE_DIR', '')}\\n")
    if behaviour == "dies" and number == 1:
        sys.exit(3)
    if behaviour == "gives up" and number == 1:
        print(json.dumps({"failed": "out of memory"}), flush=True)
        break
    speed = 3 if behaviour == "fast" else 2
    answer = {"steps": int(speed * seconds), "seconds": seconds, "loss": 8.5, "power": None}
    print(json.dumps({**answer, "allocated_bytes": 2 << 30, "reserved_bytes": 3 << 30}), flush=True)
"""


def dummy(name: str, log: Path, behaviour: str = "slow") -> list[str]:
    return [sys.executable, "-c", DUMMY, name, str(log), behaviour]


def seconds_by_reading() -> Callable[[], float]:
    """A clock of which each reading takes a second."""
    ticks = itertools.count(100.0)
    return lambda: next(ticks)


# The turns.


def test_a_contender_answers_lines() -> None:
    class Run:
        completed = 0

        def turn(self, more: Any) -> list[float]:
            losses = [1.0]
            while more(len(losses)):
                losses.append(losses[-1] / 2)
            return losses

    pipe = io.StringIO()
    contend(Run, CPU, ["go 4\n", "go 0\n"], pipe, seconds_by_reading())
    first, turn, short = map(json.loads, pipe.getvalue().splitlines())
    assert first["loss"] == 1.0
    assert turn["steps"] > 1 and turn["seconds"] >= 0.05 and turn["power"] is None
    assert short["steps"] == 1

    def refuses() -> Run:
        raise UsageError("expected a GPU")

    pipe = io.StringIO()
    contend(refuses, CPU, [], pipe)
    assert json.loads(pipe.getvalue()) == {"failed": "expected a GPU"}


def test_what_a_contender_prints_is_no_answer(capfd: pytest.CaptureFixture) -> None:
    code = (
        "import os; from benchmarks.turns import answers, say; pipe = answers();"
        "print('chatter', flush=True); os.system('echo more'); say(pipe, {'loss': 4.0})"
    )
    peer = Peer("chatty", [sys.executable, "-c", code])
    assert peer.answer() == {"loss": 4.0}
    with pytest.raises(PeerFailed, match="exit code 0"):
        peer.answer()
    peer.close()
    captured = capfd.readouterr()
    assert "chatter" in captured.err and "more" in captured.err and captured.out == ""


def test_turns_alternate_and_a_failure_stops_nobody_else(tmp_path: Path) -> None:
    log = tmp_path / "log"
    behaviours = {"a": "slow", "b": "dies", "c": "gives up", "d": "fast"}
    commands = {name: dummy(name, log, behaviour) for name, behaviour in behaviours.items()}
    commands["e"] = [sys.executable, "-c", "raise SystemExit(5)"]
    rows = gpu_step.measure(commands, seconds=20, turn_seconds=10, device=CPU)
    calls = [line.split() for line in log.read_text().splitlines()]
    assert [call[:2] for call in calls] == [
        *([name, "3"] for name in "abcd"),  # the warm-up
        *([name, "10"] for name in "abcd"),
        *([name, "10"] for name in "ad"),
    ]
    assert len({call[2] for call in calls}) == 4 and "" not in {call[2] for call in calls}, "caches are nobody else's"
    assert not any(Path(call[2]).exists() for call in calls), "and are removed"
    assert "exit code 3" in rows["b"]["failed"] and rows["c"]["failed"] == "out of memory"
    assert "exit code 5" in rows["e"]["failed"]
    assert [turn["steps"] for turn in rows["d"]["turns"]] == [30, 30]
    assert rows["a"]["first_loss"] == 9.0
    assert rows["a"]["first_step_warm_seconds"] > 0 and rows["a"]["first_step_cold_seconds"] > 0


def test_a_turn_has_an_end() -> None:
    run = HandgradRun(SMALL.config(), tokens_of(SMALL))
    turn = timed_turn(run, 4, CPU, seconds_by_reading())
    assert turn["steps"] == run.completed == 4 and turn["seconds"] == 5


# The figures.


def turn_of(steps: int, seconds: float, joules: float, megahertz: float) -> dict[str, Any]:
    power = {"joules": joules, "sm_megahertz": {"mean": megahertz}}
    return {
        "steps": steps,
        "seconds": seconds,
        "loss": 3.0,
        "power": power,
        "allocated_bytes": 1 << 30,
        "reserved_bytes": 0,
    }


def test_a_contender_ends_with_the_process_that_asked() -> None:
    """Without a traceback."""
    closed = "import os; read, write = os.pipe(); os.dup2(write, 1); os.close(write); os.close(read)"
    code = f"{closed}\nfrom benchmarks.turns import *\npipe = answers()\nwith excuses(pipe): say(pipe, {{}})"
    ended = subprocess.run([sys.executable, "-c", code], stderr=subprocess.PIPE, check=False)
    assert (ended.returncode, ended.stderr) == (1, b"")


def test_figures_follow_from_the_turns() -> None:
    row = {"turns": [turn_of(30, 10.0, 6000.0, 1400), turn_of(10, 6.0, 3600.0, 1500)], "driver_bytes": 5 << 30}
    found = gpu_step.figures(row, tokens_per_step=1000, flops=1e9, peak=1e13)
    assert found["tokens_per_second"] == 2500 and found["tokens_per_second_by_turn"] == [3000, 1000 / 0.6]
    assert found["milliseconds_per_step"] == 400 and found["steps"] == 40 and found["mfu"] == 0.25
    assert found["mean_watts"] == 600 and found["mean_sm_megahertz"] == 1450
    assert found["millijoules_per_token"] == pytest.approx(240)
    assert (found["allocated_gib"], found["reserved_gib"], found["driver_gib"]) == (1, 0, 5)
    rows = {"handgrad-fp32": found, "twin-flash": {"tokens_per_second": 3}, "twin-cudnn": {"tokens_per_second": 4}}
    assert gpu_step.best_twin(rows) == "twin-cudnn" and gpu_step.best_twin({"handgrad": found}) is None
    failed = gpu_step.figures({"turns": [], "failed": "out of memory"}, 1000, 1e9, None)
    assert failed == {"failed": "out of memory"}


def test_the_step_benchmark_prints_and_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    behaviour = {"handgrad": "fast", "twin-flash": "slow", "twin-cudnn": "gives up"}
    monkeypatch.setattr(gpu_step, "command", lambda name, settings: dummy(name, tmp_path / "log", behaviour[name]))
    out = tmp_path / "step.json"
    settings = dataclasses.replace(SMALL, micro_steps=1)
    gpu_step.compare(settings, "handgrad,twin-flash,twin-cudnn", seconds=2, turn_seconds=1, out=str(out))
    printed = capsys.readouterr().out
    assert "handgrad / best twin (twin-flash): 1.500" in printed and "failed: out of memory" in printed
    line = next(line for line in printed.splitlines() if line.startswith("twin-flash"))
    assert line.split()[1:4] == ["64", "-", "500.00"], "2 steps of 32 tokens a second; no MFU on a CPU"
    record = json.loads(out.read_text())
    assert {"machine", "versions", "commit", "date", "settings", "tokens", "libraries"} <= record.keys()
    assert record["settings"]["model"] == "tiny" and record["settings"]["turn_seconds"] == 1
    assert record["figures"]["handgrad"]["times_best_twin"] == 1.5
    assert record["figures"]["twin-cudnn"]["failed"] == "out of memory"
    precisions = {name: row["precision"] for name, row in record["figures"].items()}
    assert precisions == {"handgrad": "fp32", "twin-flash": "bf16", "twin-cudnn": "bf16"}


def test_losses_of_real_runs(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """Six steps, handgrad's in a process of their own: the curves of a run here, a table, a record and a picture."""
    in_a_process = gpu_loss.curve

    def curve(name: str, settings: Settings) -> list[float]:
        if name == "handgrad-fp32":
            return in_a_process(name, settings)
        return gpu_loss.make_run(name, settings).turn(lambda launched: launched < settings.steps)

    monkeypatch.setattr(gpu_loss, "curve", curve)
    settings = dataclasses.replace(SMALL, data=str(shards), learning_rate=1e-2, steps=6)
    out = tmp_path / "loss.json"
    curves = gpu_loss.compare(settings, "handgrad-fp32,twin-flash", str(out))
    config = settings.config()
    assert curves["handgrad-fp32"] == HandgradRun(config, tokens_of(settings), backend="reference").turn(
        lambda launched: launched < 6
    )
    record = json.loads(out.read_text())
    distances = [abs(a - b) for a, b in zip(curves["twin-flash"], curves["handgrad-fp32"], strict=True)]
    assert record["differences"]["twin-flash"]["largest"] == max(distances) and 0 < max(distances) < 0.1
    assert [len(curve) for curve in record["curves"].values()] == [6, 6]
    assert out.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    assert "from handgrad-fp32" in capsys.readouterr().out


def test_differences_of_curves() -> None:
    found = gpu_loss.differences([5.0, 4.0, 3.5], [5.5, 4.0, 3.25])
    assert found == {"first": 0.5, "largest": 0.5, "mean": 0.25, "late_mean": pytest.approx(-0.25 / 3)}


def test_the_ladder_adds_one_thing_a_row() -> None:
    before = ladder.switches_of(0, cuda=True)
    assert before == ladder.BOTTOM
    for rung, row in enumerate(ladder.RUNGS):
        if row.handgrad or rung == 0:
            continue
        switches = ladder.switches_of(rung, cuda=True)
        changed = {name for name, value in dataclasses.asdict(switches).items() if value != getattr(before, name)}
        assert changed == set(row.changes), row.title
        before = switches
    on_cpu = ladder.switches_of(6, cuda=False)
    assert not on_cpu.compiled and not on_cpu.tf32 and on_cpu.fused and on_cpu.attention == "flash"


def test_the_ladder_on_a_cpu(capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    """A row that is skipped, and one in a process of its own."""
    out = tmp_path / "ladder.json"
    rows = ladder.compare(SMALL, 0.2, str(out), rungs=[1, 5])
    assert rows[0] == {"title": "+ TF32", "skipped": "needs a CUDA GPU"}
    assert rows[1]["title"] == "+ vocabulary padded to 384"
    assert rows[1]["tokens_per_second"] == pytest.approx(32e3 / rows[1]["milliseconds_per_micro_batch"])
    printed = capsys.readouterr().out
    assert "skipped: needs a CUDA GPU" in printed and f"{rows[1]['tokens_per_second']:.0f}" in printed
    assert len(json.loads(out.read_text())["figures"]) == 2


def test_gains_are_over_the_measured_row_before() -> None:
    row = {"milliseconds_per_micro_batch": 1.0, "reserved_bytes": None, "first_step_seconds": 1.0}
    speeds = {"a": 100.0, "b": None, "c": 150.0, "d": None, "e": 600.0}
    rows = [{"title": t, "tokens_per_second": s, **row} if s else {"title": t, "failed": "no"} for t, s in speeds.items()]
    ladder.add_gains(rows, list(speeds))
    assert [(row.get("gain"), row.get("gain_from_the_bottom")) for row in rows] == [
        *((None, None), (None, None), (1.5, 1.5), (None, None), (4.0, 6.0))
    ]
    lines = ladder.table(rows)
    assert "x 4.00   x 6.00" in lines[5] and "no" in lines[2]
    ladder.add_gains(rows, ["a", "b", "b2", "c", "d", "e"])
    assert [row.get("gain") for row in rows] == [None, None, None, None, 4.0], "a row to come leaves no gain"


def test_a_climb_that_was_cut_short_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After every row there is a record; the rows to come join it, unless they would not compare."""
    out, speed = tmp_path / "ladder.json", {"tokens_per_second": 1.0, "milliseconds_per_micro_batch": 1.0}
    found = {**speed, "reserved_bytes": None, "first_step_seconds": 1.0}
    monkeypatch.setenv("HANDGRAD_COMMIT", "one")

    def climb(rung: int, settings: object, seconds: float) -> dict[str, object]:
        if rung == 5:
            raise KeyboardInterrupt
        return {**found, "tokens_per_second": 2.0 * (rung + 1)}

    monkeypatch.setattr(ladder, "climb", climb)
    with pytest.raises(KeyboardInterrupt):
        ladder.compare(SMALL, 0.2, str(out))
    assert [row.get("gain") for row in json.loads(out.read_text())["figures"]] == [None, None, 3.0, None, 1.6667]
    monkeypatch.setattr(ladder, "climb", lambda rung, settings, seconds: {**found, "tokens_per_second": 60.0})
    rows = ladder.compare(SMALL, 0.2, str(out), rungs=ladder.rungs_of("6-9"))
    assert len(rows) == len(ladder.RUNGS) and rows[5]["gain"] == 6.0 and rows[5]["gain_from_the_bottom"] == 30.0
    assert json.loads(out.read_text())["figures"][-2]["gain"] == 1.0
    with pytest.raises(DataError, match=r"has settings .* the figures do not compare; name another --out"):
        ladder.compare(SMALL, 0.3, str(out), rungs=[8])
    monkeypatch.setenv("HANDGRAD_COMMIT", "two")
    with pytest.raises(DataError, match="has commit 'one', here it is 'two'"):
        ladder.compare(SMALL, 0.2, str(out), rungs=[8])


def test_rows_of_a_ladder_as_people_count_them() -> None:
    assert ladder.rungs_of("6-9") == [5, 6, 7, 8] and ladder.rungs_of("9, 1,8-9") == [0, 7, 8]
    for wrong in ("0", "10", "9-6", "x", "1-", "3,", "-2"):
        with pytest.raises(UsageError, match="rows are numbers from 1 to 9"):
            ladder.rungs_of(wrong)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["step", "--device", "cpu", "--contenders", "handgrad"], "--contenders does nothing in `bench step on a CPU`"),
        (["ladder", "--rounds", "3"], "--rounds does nothing in `bench ladder`"),
        (["ladder", "--seconds", "0"], "--seconds must be above 0"),
        (["ladder", "--device", "cuda"], "device cuda"),
        (["ladder", "--rows", "6-9"], "--rows adds to a record: give its --out FILE"),
        (["ladder", "--rows", "6-10", "--out", "{shards}/x.json"], "rows are numbers from 1 to 9"),
        (["loss"], "give --data DIR"),
        (["loss", "--data", "{shards}", "--contenders", "twin-flsh,handgrad-bf16"], "did you mean twin-flash?"),
        (["loss", "--data", "{shards}", "--contenders", "twin-flash"], "two names"),
        (["loss", "--out", "{shards}/none/x.json"], "there is no folder"),
        (["kernels"], "needs a CUDA GPU"),
        (["fp8"], "needs a CUDA GPU"),
        (
            ["fp8", "--model", "m12"],
            "bench fp8 measures the kernels and GEMMs of GPT-2, found model m12; `handgrad bench step",
        ),
    ],
)
def test_usage(
    arguments: list[str], told: str, shards: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # what is refused without a GPU
    assert main(["bench", *(argument.replace("{shards}", str(shards)) for argument in arguments)]) == 64
    line = capsys.readouterr().err
    assert told in line and line.count("\n") == 1, line


def test_an_unknown_contender_of_steps() -> None:
    with pytest.raises(UsageError, match=r"did you mean twin-cudnn\?"):
        gpu_step.check_contenders("handgrad, twin-cudn+stream")
    with pytest.raises(UsageError, match=r"unknown contender 'twin-cudnn\+streams'.* \+stream \+graphs"):
        gpu_step.check_contenders("twin-cudnn+streams")
    assert gpu_step.check_contenders("handgrad, twin-cudnn,") == ["handgrad", "twin-cudnn"]
    twins = [f"twin-{attention}+{option}" for attention in ATTENTIONS for option in OPTIONS]
    names = ["handgrad", *(f"handgrad-{precision}" for precision in PRECISIONS), *twins]
    assert gpu_step.check_contenders(",".join(names)) == names


def test_the_fastest_twin_is_a_default_contender(monkeypatch: pytest.MonkeyPatch) -> None:
    for spec, liger in ((object(), True), (None, False)):
        monkeypatch.setattr("importlib.util.find_spec", lambda name, found=spec: found)
        handgrad, twin = gpu_step.check_contenders(gpu_step.default_contenders())
        switches = switches_of(twin)
        assert handgrad == "handgrad" and switches is not None and switches.regional and switches.bf16_stream
        assert (switches.head == "liger") == liger


def test_the_precision_of_a_contender() -> None:
    ours = ("handgrad", "handgrad-tf32", "handgrad-gpt2", "handgrad-adamw-fp8", "handgrad-fp8-blocks")
    twins = ("twin-cudnn", "twin-cudnn+torchao", "twin-flash+stream+torchao-filtered")
    assert gpu_step.check_contenders(",".join(ours + twins)) == [*ours, *twins]
    precisions = [gpu_step.precision_of(name, SMALL) for name in ours + twins]
    assert precisions == ["fp32", "tf32", "fp32", "fp8", "fp8", "bf16", "fp8", "fp8"]
    run = gpu_step.make_run("handgrad-bf16", SMALL)
    assert isinstance(run, HandgradRun) and run.state.parameters.dtype == torch.bfloat16
    heads = [gpu_step.make_run(name, SMALL) for name in ("handgrad-fp8", "handgrad-fp8-blocks")]
    assert [run.state.design.fp8.gemms.head for run in heads] == [{"forward", "dgrad", "wgrad"}, set()]


def test_the_modern_network_steps_in_fp8_beside_its_twin() -> None:
    """`bench step --model m4 --contenders handgrad-fp8,twin-...`"""
    settings = dataclasses.replace(SMALL, model="m4", learning_rate=1e-2)
    gpt2 = gpu_step.make_run("handgrad-gpt2-bf16", settings)
    assert isinstance(gpt2, HandgradRun) and gpt2.state.parameters.dtype == torch.bfloat16
    adamw, run, bf16 = (gpu_step.make_run(name, settings) for name in ("handgrad-adamw", "handgrad-fp8", "handgrad-bf16"))
    assert isinstance(adamw, HandgradRun) and isinstance(bf16, HandgradRun)
    assert isinstance(adamw.state.design.optimizer, AdamW) and isinstance(bf16.state.design.optimizer, Muon)
    assert adamw.state.design.shape == bf16.state.design.shape
    assert isinstance(run, HandgradRun) and run.stepper.design.fp8 is not None
    losses, others = (contender.turn(lambda launched: launched < 3) for contender in (run, bf16))
    assert losses != others and losses == pytest.approx(others, abs=0.05)


def test_bits_of_a_run_are_those_of_its_tensors_and_steps(tmp_path: Path) -> None:
    """However many files they lie in; one bit of a tensor or of a step's loss changes them."""

    def left(name: str, parts: list[dict[str, torch.Tensor]], loss: float) -> str:
        folder = tmp_path / name / "checkpoints" / "step_00000001"
        folder.mkdir(parents=True)
        for number, tensors in enumerate(parts):
            save_file(tensors, folder / f"part{number}.safetensors")
        line = {"kind": "step", "step": 1, "loss": loss, "norm": 1.0, "tokens_per_second": 5.0}
        (tmp_path / name / "metrics.jsonl").write_text(json.dumps(line) + "\n")
        found = same_bits.found_in(tmp_path / name)
        assert (found.tensors, found.numbers, found.tokens_per_second) == (2, 1, 5.0)
        return found.bits

    a, b = torch.arange(4.0), torch.ones(2, dtype=torch.bfloat16)
    other = a.clone()
    other.view(torch.int32)[3] ^= 1
    one = left("one", [{"a": a, "b": b}], 2.5)
    assert left("two", [{"b": b}, {"a": a}], 2.5) == one
    assert left("tensor", [{"a": other, "b": b}], 2.5) != one
    assert left("loss", [{"a": a, "b": b}], 2.5000000000000004) != one
