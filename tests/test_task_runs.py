"""Tasks in a run's life: evaluated while it trains and afterwards, in its record, its report and its card."""

import dataclasses
import fcntl
import json
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from handgrad.cli import main
from handgrad.errors import DataError, StorageError, UsageError
from handgrad.interop.model_card import evaluation_lines
from handgrad.reports.page import write_report
from handgrad.run.open import train
from handgrad.settings.config import RunConfig
from handgrad.storage import checkpoint
from tests.conftest import small_run
from tests.test_runs import records, same_bits, tensors
from tests.test_tasks import hellaswag_row

WORDS = ["river", "stone", "old", "bright", "walks", "sings", "over", "under", "the", "a", "and", "hill", "crow"]


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Thirty rows of HellaSwag's shape and twenty last words, as a `--tasks`."""
    folder, draw = tmp_path_factory.mktemp("tasks"), random.Random(1)
    rows = [hellaswag_row(draw, words=2) for _ in range(30)]
    (folder / "h.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    lines = [" ".join(draw.choices(WORDS, k=draw.randint(2, 5))) for _ in range(20)]
    (folder / "l.txt").write_text("\n".join(lines) + "\n")
    return f"hellaswag={folder / 'h.jsonl'},lambada={folder / 'l.txt'}"


def evaluations(run: Path | str) -> list[dict[str, Any]]:
    return records(run, ("evaluation",))


def trained_alike(a: Path | str, b: Path | str) -> None:
    """The same bits of weights and moments, and the same losses on the way."""
    first, second = tensors(a, 12), tensors(b, 12)
    assert all(torch.equal(first[name], second[name]) for name in first) and len(first) > 20
    assert records(a) == records(b)


@pytest.fixture(scope="module")
def watched(shards: Path, tasks: str, tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    """A finished run that was evaluated on tasks at steps 6 and 12."""
    out = tmp_path_factory.mktemp("watched") / "run"
    made = dataclasses.replace(small_run(shards, out), sequence_length=64, eval_tasks=tasks, eval_task_examples=10)
    train(made)
    return made


@pytest.fixture
def config(shards: Path, tmp_path: Path) -> RunConfig:
    """The same run without tasks."""
    return dataclasses.replace(small_run(shards, tmp_path / "run"), sequence_length=64)


def test_a_run_records_its_tasks_and_trains_as_without(watched: RunConfig, config: RunConfig) -> None:
    train(config)
    trained_alike(config.out, watched.out)
    found = evaluations(watched.out)
    assert [(r["step"], r["task"], r["examples"]) for r in found] == [
        (step, task, 10) for step in (6, 12) for task in ("hellaswag", "lambada")
    ]
    assert list(found[0]["metrics"]) == ["acc", "acc_norm", "acc_bytes", "acc_norm_llmc"]
    assert list(found[1]["metrics"]) == ["acc", "perplexity"]
    assert found[1]["metrics"]["perplexity"][0] > found[3]["metrics"]["perplexity"][0], "it learns"
    llmc = found[2]["metrics"]["acc_norm_llmc"][0]
    assert f"s:12 eval:{llmc:.4f}" in (Path(watched.out) / "main.log").read_text().splitlines()
    for record in records(watched.out, ("validation",)):
        assert record["perplexity"] == pytest.approx(np.exp(record["loss"]))
        assert 0 < record["bits_per_byte"] < 12


def test_afterwards_the_same_figures(watched: RunConfig, tasks: str, tmp_path: Path, capsys) -> None:
    """`evaluate` on the last checkpoint, whatever the batches, within float32's rounding; with a line per example."""
    run = tmp_path / "run"
    shutil.copytree(watched.out, run)
    arguments = ["evaluate", str(run), "--tasks", tasks, "--limit", "10", "--out", str(tmp_path / "o"), "--device", "cpu"]
    assert main([*arguments, "--micro-batch", "4"]) == 0
    first, again = evaluations(run)[2:4], evaluations(run)[4:]
    assert [r["metrics"] for r in first] == [r["metrics"] for r in again]
    assert [r["by"] for r in evaluations(run)] == ["train"] * 4 + ["evaluate"] * 2
    assert main([*arguments, "--micro-batch", "1"]) == 64, "what is there is not overwritten"
    (tmp_path / "o").unlink()
    assert main([*arguments, "--micro-batch", "1"]) == 0
    rows = [json.loads(line) for line in (tmp_path / "o").read_text().splitlines()]
    assert len(rows) == 20 and rows[0]["where"].startswith("line 1 of ")
    assert np.mean([row["acc_norm"] for row in rows[:10]]) == first[0]["metrics"]["acc_norm"][0]
    for one, other in zip(first, evaluations(run)[6:], strict=True):
        for metric, (value, _) in one["metrics"].items():
            assert other["metrics"][metric][0] == pytest.approx(value, rel=1e-4)
    told = capsys.readouterr().out
    assert "acc_norm_llmc" in told and f"recorded in {run / 'metrics.jsonl'}" in told
    assert main(["evaluate", str(run), "--device", "cpu"]) == 0
    loss_alone = capsys.readouterr().out.splitlines()
    (tmp_path / "o").unlink()
    assert main([*arguments, "--data", watched.data]) == 0  # both, in turns in one memory
    both = capsys.readouterr().out.splitlines()
    assert both[: len(loss_alone)] == loss_alone and any(line.startswith("lambada") for line in both)
    for one, other in zip(first, evaluations(run)[8:], strict=True):
        assert other["metrics"].keys() == one["metrics"].keys()
        assert other["metrics"]["acc"][0] == one["metrics"]["acc"][0]
    train(dataclasses.replace(watched, out=str(run)))  # a finished run: the record is kept
    assert len(evaluations(run)) == 10


def test_a_resumed_run_does_what_is_missing(watched: RunConfig, tasks: str, tmp_path: Path) -> None:
    """Cut back to before the last evaluations, and, of another, to between the two: the same lines come again. One that was
    made afterwards is not the training's."""
    run = tmp_path / "run"
    for dropped in (1, 2):
        shutil.copytree(watched.out, run)
        path = run / "metrics.jsonl"
        lines = path.read_text().splitlines()
        mine = [n for n, line in enumerate(lines) if json.loads(line)["kind"] == "evaluation"]
        kept = [line for n, line in enumerate(lines) if n not in mine[-dropped:]]
        path.write_text("".join(line + "\n" for line in kept))
        if dropped == 2:
            assert main(["evaluate", str(run), "--tasks", tasks, "--limit", "3", "--device", "cpu"]) == 0
        train(dataclasses.replace(watched, out=str(run)))
        assert [record for record in evaluations(run) if record["by"] == "train"] == evaluations(watched.out)
        shutil.rmtree(run)


def test_an_earlier_checkpoint_resumed_ends_with_the_same_record(watched: RunConfig, tmp_path: Path, tasks: str) -> None:
    """Evaluated afterwards at step 12, resumed from step 8: that record goes, and comes back from the training alone."""
    run = tmp_path / "run"
    shutil.copytree(watched.out, run)
    assert main(["evaluate", str(run), "--tasks", tasks, "--device", "cpu"]) == 0
    shutil.rmtree(run / "checkpoints" / "step_00000012")
    train(dataclasses.replace(watched, out=str(run)))
    assert evaluations(run) == evaluations(watched.out)
    same_bits(run, Path(watched.out), 12)


def test_fp8_runs_are_evaluated_in_bf16_and_undisturbed(config: RunConfig, tasks: str, tmp_path: Path) -> None:
    """The tasks' activations overwrite the training's, fp8 forms and all: nothing of them may matter to the next step."""
    plain = dataclasses.replace(config, precision="fp8", fp8_head="forward,dgrad", recompute=1, eval_every=3)
    train(plain)
    watched = dataclasses.replace(plain, out=str(tmp_path / "watched"), eval_tasks=tasks, eval_task_examples=5)
    train(watched)
    trained_alike(plain.out, watched.out)
    afterwards = ["evaluate", watched.out, "--tasks", tasks, "--limit", "5", "--device", "cpu", "--precision", "bf16"]
    assert main([*afterwards, "--micro-batch", str(config.micro_batch)]) == 0
    *_, third, fourth, fifth, sixth = evaluations(watched.out)
    assert [third["metrics"], fourth["metrics"]] == [fifth["metrics"], sixth["metrics"]]


def test_a_broken_task_is_refused_before_the_run_begins(config: RunConfig, tmp_path: Path) -> None:
    (tmp_path / "own.jsonl").write_text('{"context": "a", "choices": ["b", "c"], "answer": 2}\n')
    with pytest.raises(DataError, match=r"line 1 of .*own.jsonl"):
        train(dataclasses.replace(config, eval_tasks=f"own={tmp_path / 'own.jsonl'}"))
    with pytest.raises(UsageError, match="did you mean hellaswag"):
        train(dataclasses.replace(config, eval_tasks="helaswag"))
    assert not Path(config.out).exists()


def test_a_trainer_at_work_keeps_its_record_to_itself(watched: RunConfig, tasks: str, tmp_path: Path, capsys) -> None:
    run = tmp_path / "run"
    shutil.copytree(watched.out, run)
    before = (run / "metrics.jsonl").read_bytes()
    with (run / ".lock").open("a") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert main(["evaluate", str(run), "--tasks", tasks, "--limit", "2", "--device", "cpu"]) == 0
    assert (
        run / "metrics.jsonl"
    ).read_bytes() == before and "not recorded: a trainer is at work" in capsys.readouterr().out
    # A line that a kill has cut is none; what is appended starts a line of its own.
    (run / "metrics.jsonl").write_bytes(before + b'{"kind": "step", "los": ' + b"1" * 2000)
    assert main(["evaluate", str(run), "--tasks", tasks, "--limit", "2", "--device", "cpu"]) == 0
    assert (run / "metrics.jsonl").read_bytes().startswith(before) and len(evaluations(run)) == 6


def test_a_folder_that_cannot_be_written_costs_no_result(
    watched: RunConfig, tasks: str, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    def full(checkpoint: object, records: object) -> str:
        raise StorageError("writing metrics.jsonl failed: Read-only file system")

    monkeypatch.setattr("handgrad.commands.evaluate.append_to_run", full)
    assert main(["evaluate", watched.out, "--tasks", tasks, "--limit", "2", "--device", "cpu"]) == 0
    said = capsys.readouterr().out
    assert "hellaswag" in said and "not recorded: writing metrics.jsonl failed: Read-only file system" in said


def test_flags_that_do_not_go_together(watched: RunConfig, tasks: str, tmp_path: Path) -> None:
    assert main(["evaluate", watched.out, "--limit", "3"]) == 64
    assert main(["evaluate", watched.out, "--tasks", "helaswag"]) == 64
    assert main(["evaluate", watched.out, "--tasks", tasks, "--out", str(tmp_path / "no" / "o")]) == 74


def test_the_report_and_the_card_show_the_tasks(watched: RunConfig, tmp_path: Path) -> None:
    page = write_report([Path(watched.out)], tmp_path / "report.html").read_text()
    last = {record["task"]: record["metrics"] for record in evaluations(watched.out)}
    for task, metric in (("hellaswag", "acc_norm"), ("lambada", "perplexity")):
        assert task in page and f"{last[task][metric][0]:.4f}" in page
    assert (tmp_path / "report_tasks.png").exists(), "two steps are a curve"
    card = "\n".join(evaluation_lines(checkpoint.find(watched.out)))
    assert f"| hellaswag | acc_norm | {last['hellaswag']['acc_norm'][0]:.4f} |" in card
    earlier = checkpoint.open_checkpoint(Path(watched.out) / "checkpoints" / "step_00000008")
    value, stderr = evaluations(watched.out)[0]["metrics"]["acc_norm"]
    row = f"| hellaswag | acc_norm | {value:.4f} | {stderr:.4f} | 10 | 6 |"
    assert row in evaluation_lines(earlier), "of no later step"
