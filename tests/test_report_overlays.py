"""Beside a run in its report: llm.c's main.log, its loss on FineWeb, dates and commands, rows of runs."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import handgrad
from handgrad.commands import report as report_command
from handgrad.commands.arguments import parse
from handgrad.errors import DataError
from handgrad.reports.drawing import inline_svg
from handgrad.reports.plots import choose_plots
from handgrad.reports.reading import read_main_log, read_run, read_runs
from handgrad.reports.results import date_text, wall_clock
from handgrad.reports.sections import description
from handgrad.run import header
from handgrad.run.open import train
from handgrad.settings.config import RunConfig
from tests.test_report import make_run, report, run_lines, start_line, step_line

LOG = """s:0 tel:10.9876
s:0 trl:10.9500 lr:0.000001 norm:12.34
s:1 trl:10.9000 lr:0.000002 norm:-nan
s:2 tel:9.5000
s:2 eval:0.2955
s:1 trl:10.8000 lr:0.000002 norm:11.00
s:2 trl:nan
"""


def write_log(folder: Path, content: str = LOG) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "main.log").write_text(content)
    return folder / "main.log"


def test_a_main_log_is_read(tmp_path: Path) -> None:
    """Its training lines count from 0, ours from 1; of a step done again the last line counts."""
    run = read_main_log(write_log(tmp_path, LOG + "s:3 tr"), "main.log")
    assert run.is_log and run.last_line_cut
    assert run.steps.step.tolist() == [1, 2, 3] and run.steps.loss[:2].tolist() == [10.95, 10.8]
    assert math.isnan(run.steps.loss[2]) and run.steps.norm[:2].tolist() == [12.34, 11.0]
    assert run.validations == [(0, 10.9876), (2, 9.5)]
    assert run.tasks["hellaswag", "acc_norm_llmc"][0][1].value == 0.2955


@pytest.mark.parametrize(
    "content",
    [
        "hello\nworld\n",
        "s:0 trl:1.0 lr:x norm:1\ns:1 trl:1.0\n",
        "s:0 tel:1.0\n",
        "s:0 trl:4.50474.4039\n\n",
        "s:0 trl:.\n\n",
        f"s:{'9' * 5000} trl:1.0\n\n",
        f"s:{'9' * 400} trl:1.0\n\n",
    ],
)
def test_another_file_is_refused(tmp_path: Path, content: str) -> None:
    with pytest.raises(DataError, match=r"line 1 of .*main\.log; repair|has no finished step"):
        read_main_log(write_log(tmp_path, content), "main.log")


def test_our_own_main_log_gives_the_same_curves(config: RunConfig) -> None:
    train(config)
    ours = read_run(Path(config.out), "run")
    log = read_run(Path(config.out) / "main.log", "main.log")
    assert log.steps.step.tolist() == ours.steps.step.tolist()
    np.testing.assert_allclose(log.steps.loss, ours.steps.loss, atol=1e-4)
    np.testing.assert_allclose(log.validations, ours.validations, atol=1e-4)


def test_a_main_log_beside_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = write_log(tmp_path / "llmc")
    page = report(tmp_path, make_run(tmp_path / "run"), log)
    assert "A log in llm.c's format, with steps of unknown size and data: main.log." in page.text
    assert "not trained on the same shards" not in page.text and "Loss against tokens seen" not in page.text
    assert "Settings that differ" not in page.text  # from a log's none
    source = (tmp_path / "report" / "page.html").read_text()
    assert ">main.log</text>" in source
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("handgrad.reports.page.choose_plots", lambda runs: [])
    assert report_command.run(parse("report", [str(log)])) == 0 and (tmp_path / "report.html").exists()


@pytest.mark.parametrize(
    ("source", "tokenizer", "shown"),
    [
        ("fineweb", "gpt2", True),
        ("HuggingFaceFW/fineweb:sample-10BT", "gpt2", True),
        ("fineweb", "bpe", False),
        ("fineweb-edu", "gpt2", False),
        ("HuggingFaceFW/fineweb-edu", "gpt2", False),
        ("my/fineweb", "gpt2", False),
        (None, "gpt2", False),
    ],
)
def test_llmc_s_loss_on_fineweb_alone(tmp_path: Path, source: str | None, tokenizer: str, shown: bool) -> None:
    known = {} if source is None else {"source": source}
    line = start_line(data={**start_line()["data"], "tokenizer": tokenizer, **known})
    runs = read_runs([make_run(tmp_path / "run", [line, *run_lines()[1:]])])
    loss = next(plot for plot in choose_plots(runs) if plot.name == "loss")
    assert ("llm.c's GPT-2 124M, 3.272" in inline_svg(loss, runs, (4.0, 3.0))[0]) is shown


def test_origin_of_a_run(config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Date, host, command, commit and source, in metrics.jsonl and on the page."""
    monkeypatch.setattr("sys.argv", ["/usr/lib/handgrad/__main__.py", "train", "a b"])
    monkeypatch.setattr("platform.node", lambda: "node7")
    monkeypatch.setattr(header, "commit", lambda: "0123456789ab+")
    monkeypatch.setattr("time.time", lambda: 1.8e9)
    train(config)
    line: dict[str, Any] = json.loads((Path(config.out) / "metrics.jsonl").read_text().splitlines()[0])
    origin = {"time": 1.8e9, "host": "node7", "command": "handgrad train 'a b'", "commit": "0123456789ab+"}
    assert origin.items() <= line.items() and line["data"]["source"].endswith(".txt")
    text = report(tmp_path, Path(config.out), plots=False).text
    assert "2027-01-15 08:00 UTC" in text and "node7" in text and "handgrad train 'a b'" in text and "0123456789ab+" in text


def test_the_commit_is_handgrads_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package inside somebody else's repository does not take its commit."""
    monkeypatch.setenv("HANDGRAD_COMMIT", "cafe")
    monkeypatch.setattr(handgrad, "__file__", str(tmp_path / "venv" / "handgrad" / "__init__.py"))
    assert header.commit() == "cafe"
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "venv" / ".git").mkdir(parents=True)
    assert header.commit() == ""  # no git


def test_wall_clock_leaves_pauses_out(tmp_path: Path) -> None:
    """A validation between two steps counts, the time between two launches does not."""
    lines = [start_line(time=100.0), step_line(1, time=102.0), step_line(2, time=103.0), step_line(3, time=113.0)]
    lines += [start_line(time=5000.0), step_line(3, time=5004.0), step_line(4, time=5005.0)]
    run = read_run(make_run(tmp_path / "run", lines), "run")
    assert wall_clock(run).tolist() == [2, 3, 7, 8]
    old = read_run(make_run(tmp_path / "old", [start_line(), step_line(1), step_line(2)]), "old")
    assert wall_clock(old).tolist() == pytest.approx([0.2, 0.4])  # of its milliseconds
    assert date_text(1.8e9) == "2027-01-15 08:00 UTC" and date_text(math.nan) == "–"


def test_rows_of_runs_carry_their_order(tmp_path: Path) -> None:
    """Numbers sort as numbers, whatever their text; unknown ones are null; equal facts stand below."""
    runs = [
        make_run(tmp_path / name, [start_line(host=name), *run_lines(60 + 1000 * i)[1:]]) for i, name in enumerate("ab")
    ]
    log = write_log(tmp_path / "llmc")
    assert "The same in all runs of ours: bits per" in report(tmp_path, *runs, log, plots=False).text  # a log knows few
    assert "The same in all runs: " in report(tmp_path, *runs, plots=False).text
    source = (tmp_path / "report" / "page.html").read_text()
    assert (
        '<td class="number" data-key="60.0">60</td>' in source
        and '<td class="number" data-key="1060.0">1,060</td>' in source
    )
    report(tmp_path, *runs, log, plots=False)
    assert 'data-key="null">–</td>' in (tmp_path / "report" / "page.html").read_text()


def test_history_names_its_cells(tmp_path: Path) -> None:
    """A phone shows each launch as a card, its cells under their headings."""
    report(tmp_path, make_run(tmp_path / "run"), plots=False)
    source = (tmp_path / "report" / "page.html").read_text()
    assert '<table class="cards">' in source and 'data-label="first step"' in source


def test_the_network_has_its_name(tmp_path):
    for architecture, name in (("gpt2", "A GPT-2 of"), ("modern", "A modern network of"), ("llama", "A Llama of")):
        run = read_run(make_run(tmp_path / architecture, architecture=architecture), architecture)
        assert f"<p>{name} 4 layers" in description(run)
    assert "<p>A GPT-2 of 4 layers" in description(read_run(make_run(tmp_path / "of an older version"), "old"))
