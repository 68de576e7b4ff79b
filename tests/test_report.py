"""The report: what the page says, that it stands alone and hides nothing, and that broken runs are refused by name."""

import base64
import hashlib
import json
import math
import re
import time
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from handgrad.errors import DataError, StorageError, UsageError
from handgrad.reports import page as pages, results
from handgrad.reports.page import write_report
from handgrad.reports.reading import read_run, read_runs
from handgrad.reports.results import bits_per_byte, bytes_text, duration_text, perplexity, short_text

VOID = {"wbr", "meta", "link", "br", "hr", "img", "input"}
SAMPLE = 'Tom said: <script>alert("1 & 2")</script>\n\x00 the end'


def start_line(**changes: Any) -> dict[str, Any]:
    line = {
        "kind": "run",
        "handgrad": "0.1.0",
        "torch": "2.13.0",
        "device": "cpu: two cores",
        "precision": "fp32",
        "parameters": 961536,
        "tokens_per_step": 8192,
        "steps": 60,
        "vocab_size": 1024,
        "memory_bytes": {"parameters": 3 << 20, "gradients": 1 << 20},
        "data": {
            "folder": "shards/stories",
            "identity": "ab" * 32,
            "tokenizer": "bpe",
            "train_tokens": 491520,
            "validation_tokens": 45000,
            "validation_text_bytes": 180000,
        },
        "floor_nats_per_token": 1.6,
        "flops_per_token": 6e6,
    }
    return {**line, **changes}


def step_line(step: int, /, **changes: Any) -> dict[str, Any]:
    line = {
        "kind": "step",
        "step": step,
        "loss": 2 + 5 * math.exp(-step / 20) + 0.05 * math.sin(7 * step),
        "learning_rate": 1e-3,
        "norm": 1.5,
        "loss_z": None,
        "norm_z": None,
        "skipped": None,
        "step_ms": 200.0,
        "tokens_per_second": 40960.0,
        "tokens": 8192,
    }
    return {**line, **changes}


def run_lines(steps: int = 60) -> list[dict[str, Any]]:
    middle = steps // 2
    return [
        start_line(),
        *(step_line(s) for s in range(1, middle + 1)),
        {"kind": "validation", "step": middle, "loss": 2.5},
        {"kind": "sample", "step": middle, "text": SAMPLE},
        {"kind": "event", "step": middle, "text": f"saved step_{middle:08d}"},
        *(step_line(s) for s in range(middle + 1, steps + 1)),
        {"kind": "validation", "step": steps, "loss": 2.0},
    ]


def make_run(folder: Path, lines: list[dict[str, Any]] | None = None, tail: str = "", **config: Any) -> Path:
    folder.mkdir(parents=True)
    settings = {"num_layers": 4, "num_heads": 4, "channels": 128, "clip_norm": 1.0, "seed": 1, "out": str(folder), **config}
    (folder / "config.toml").write_text("".join(f"{key} = {json.dumps(value)}\n" for key, value in settings.items()))
    text = "".join(json.dumps(line) + "\n" for line in (run_lines() if lines is None else lines))
    (folder / "metrics.jsonl").write_text(text + tail)
    return folder


class Page(HTMLParser):
    """Checks that tags nest, and collects ids, references, scripts and the text outside <style> and <script>."""

    def __init__(self, source: str):
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.loads: list[str] = []
        self.words: list[str] = []
        self.scripts: list[str] = []
        self.tags: set[str] = set()
        self.feed(source)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        if tag not in VOID:
            self.open.append(tag)
        for name, value in attrs:
            if name == "id":
                self.ids.append(value or "")
            if name in ("src", "href", "xlink:href", "srcset", "action", "data"):
                self.loads.append(value or "")
            self.loads += re.findall(r"url\(([^)]*)\)", value or "")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag, f"</{tag}> closes another element"

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            self.scripts.append(data)
        elif not self.open or self.open[-1] != "style":
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def report(tmp_path: Path, *runs: Path, plots: bool = True) -> Page:
    """The page; without `plots`, it has its words alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pages, "choose_plots", pages.choose_plots if plots else lambda runs: [])
        return Page(write_report(runs, tmp_path / "report" / "page.html").read_text(encoding="utf-8"))


@pytest.mark.report
def test_page_of_one_run(tmp_path):
    page = report(tmp_path, make_run(tmp_path / "demo"))
    assert "961,536 parameters" in page.text
    assert "60 of 60 steps of 8,192 tokens: 492k tokens, 1 times the training data, in 12.0 s" in page.text
    assert "2.0000" in page.text  # validation loss
    assert f"{math.exp(2.0):.2f}" in page.text  # perplexity
    assert f"{2.0 * 45000 / 180000 / math.log(2):.4f}" in page.text  # bits per byte
    assert "+25.0 %" in page.text  # 2.0 over a floor of 1.6
    assert "40,960" in page.text  # tokens per second
    assert "source entropy, 1.600" in page.text and "4 MiB" in page.text  # planned memory
    assert "saved step_00000030" in page.text
    assert "handgrad sample" in page.text and "handgrad evaluate" in page.text and "handgrad train" in page.text
    names = ["loss", "loss_close_up", "gradient_norm", "learning_rate", "tokens_per_second", "step_time"]
    pngs = sorted((tmp_path / "report").glob("*.png"))
    assert pngs == sorted(tmp_path / "report" / f"page_{name}.png" for name in names)
    assert all(png.read_bytes().startswith(b"\x89PNG") for png in pngs)


def test_page_stands_alone(tmp_path):
    page = report(tmp_path, make_run(tmp_path / "a"), make_run(tmp_path / "b"))
    source = (tmp_path / "report" / "page.html").read_text(encoding="utf-8")
    assert not page.tags & {"link", "img", "iframe", "object", "embed", "base"}
    digest = base64.b64encode(hashlib.sha256("".join(page.scripts).encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    assert f'<meta http-equiv="Content-Security-Policy" content="{policy}">' in source
    assert page.loads and all(load.startswith("#") for load in page.loads)
    assert {load[1:] for load in page.loads} <= set(page.ids)
    assert len(page.ids) == len(set(page.ids)), "an id stands twice in the page"
    assert "http:" not in source and "https:" not in source and "@import" not in source and "url(h" not in source


def test_sample_and_names_are_escaped(tmp_path):
    page = report(tmp_path, make_run(tmp_path / "_a <b>$x$&"), make_run(tmp_path / "plain"))
    assert 'Tom said: <script>alert("1 & 2")</script>' in page.text  # as text: the parser saw no such tag
    assert len(page.scripts) == 1 and "alert" not in page.scripts[0]
    assert "␀ the end" in page.text
    assert "_a <b>$x$&" in page.text


def test_half_a_surrogate_pair_in_a_sample(tmp_path):
    lines = [*run_lines(), {"kind": "sample", "step": 60, "text": "broken \ud83d emoji"}]
    assert "broken ? emoji" in report(tmp_path, make_run(tmp_path / "run", lines), plots=False).text


def test_two_runs_are_overlaid_and_compared(tmp_path):
    wide = [start_line(tokens_per_step=16384), *run_lines()[1:]]
    page = report(tmp_path, make_run(tmp_path / "narrow"), make_run(tmp_path / "wide", wide, seed=2))
    differing = page.text[page.text.index("Settings that differ") : page.text.index("Curves")]
    assert "seed" in differing
    assert "channels" not in differing and "out" not in differing.replace("without", "")
    assert "Loss against tokens seen" in page.text
    assert (tmp_path / "report" / "page_loss_by_tokens.png").exists()
    svg = " ".join((tmp_path / "report" / "page.html").read_text().split('<svg class="large')[1:3])
    assert ">narrow</text>" in svg and ">wide</text>" in svg
    assert "var(--run0)" in svg and "var(--run1)" in svg


def test_other_data_is_pointed_out(tmp_path):
    other = [start_line(data={**start_line()["data"], "identity": "cd" * 32}), *run_lines()[1:]]
    page = report(tmp_path, make_run(tmp_path / "a"), make_run(tmp_path / "b", other), plots=False)
    assert "not trained on the same shards" in page.text


@pytest.mark.report
def test_same_runs_same_bytes(tmp_path):
    runs = [make_run(tmp_path / "a"), make_run(tmp_path / "b")]
    for name in ("one", "two"):
        write_report(runs, tmp_path / name / "page.html")
    files = sorted(path.name for path in (tmp_path / "one").iterdir())
    assert files == sorted(path.name for path in (tmp_path / "two").iterdir())
    for name in files:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes(), name


@pytest.mark.parametrize("tail", ['{"kind":"step","st', '{"kind":"sample","step":60,"text":"\\u00', "\x00\x00"])
def test_cut_last_line_is_left_out(tmp_path, tail):
    page = report(tmp_path, make_run(tmp_path / "run", tail=tail), plots=False)
    assert "60 of 60 steps" in page.text
    assert "cut in half" in page.text


def test_last_line_without_newline_counts(tmp_path):
    run = read_run(make_run(tmp_path / "run", tail=json.dumps(step_line(61))), "run")
    assert run.steps.step[-1] == 61 and not run.last_line_cut


@pytest.mark.parametrize(
    "broken",
    [
        '{"kind":"step","st',
        "[1, 2]",
        '{"step": 3}',
        '{"kind": 3}',
        json.dumps(step_line(61, loss="high")),
        json.dumps(step_line(61, norm=True)),
        json.dumps(step_line(-1)),
        json.dumps(step_line(61, step="61")),
        json.dumps({"kind": "step", "step": 61}),
        json.dumps({"kind": "sample", "step": 61, "text": None}),
        json.dumps(start_line(memory_bytes=3)),
        json.dumps(start_line(data={})),
        json.dumps(step_line(61))[:-1] + ', "loss": 1' + "0" * 400 + "}",
        "[" * 100_000,
    ],
)
def test_broken_line_is_refused_by_number(tmp_path, broken):
    run = make_run(tmp_path / "run", tail=broken + "\n" + json.dumps(step_line(62)) + "\n")
    with pytest.raises(DataError, match=rf"line {len(run_lines()) + 1} of .*metrics\.jsonl") as caught:
        report(tmp_path, run)
    assert len(str(caught.value)) < 400 + len(str(tmp_path))
    assert not (tmp_path / "report").exists()


@pytest.mark.nightly(but=["nan"])
@pytest.mark.parametrize("value", [math.nan, math.inf, "NaN", None])
def test_values_that_are_not_finite(tmp_path, value):
    lines = run_lines()
    for line in lines[40:]:
        if line["kind"] == "step":
            line.update(loss=value, norm=value, skipped="loss is not finite")
    lines[-1]["loss"] = value
    page = report(tmp_path, make_run(tmp_path / "run", lines))
    assert "The loss was not finite in" in page.text
    assert "updates were skipped" in page.text


def test_nothing_is_finite_and_nothing_is_known(tmp_path):
    lines = [start_line(memory_bytes={}, floor_nats_per_token=None, flops_per_token=None)]
    lines[0]["data"] |= {"train_tokens": None, "validation_tokens": None, "validation_text_bytes": None}
    lines.append(step_line(1, loss=math.nan, norm=0.0, step_ms=math.nan, tokens_per_second=math.nan, learning_rate=0.0))
    page = report(tmp_path, make_run(tmp_path / "run", lines))
    assert "no validation yet" in page.text
    assert "Memory" not in page.text and "Bits per byte" not in page.text and "floor" not in page.text


def test_resumed_run(tmp_path):
    again = [start_line(device="cpu: other"), *(step_line(s, loss=1.0) for s in range(41, 71))]
    lines = run_lines()
    skipped = next(line for line in lines if line.get("step") == 50)
    skipped["skipped"] = "loss z 7.1 > 5"
    run = read_run(make_run(tmp_path / "run", [*lines, *again]), "run")
    assert run.steps.step.tolist() == list(range(1, 71))
    assert run.steps.loss[40:].tolist() == [1.0] * 30
    assert run.skipped == {}
    assert run.first_steps == [1, 41]
    assert "cpu: other" in report(tmp_path, run.folder, plots=False).text


@pytest.mark.nightly  # of speed
def test_long_run_is_quick_and_small(tmp_path):
    lines = [start_line(steps=20_000), *(step_line(s) for s in range(1, 20_001))]
    lines += [{"kind": "validation", "step": s, "loss": 2.0 + 1 / s} for s in range(1, 20_001)]
    lines += [{"kind": "sample", "step": s, "text": "word " * 5000} for s in range(1, 20_001, 400)]
    lines += [{"kind": "event", "step": s, "text": "saved"} for s in range(1, 20_001)]
    run = make_run(tmp_path / "run", lines)
    began = time.process_time()
    report(tmp_path, run)
    assert time.process_time() - began < 20  # 3 s on two quiet cores
    assert (tmp_path / "report" / "page.html").stat().st_size < 1_000_000


@pytest.mark.nightly  # of size
def test_many_runs_stay_small(tmp_path):
    runs = [make_run(tmp_path / f"run{i}", run_lines(1500), seed=i) for i in range(14)]
    page = report(tmp_path, *runs)
    assert "14 runs compared" in page.text
    assert (tmp_path / "report" / "page.html").stat().st_size < 2_000_000


def test_what_is_missing_is_named(tmp_path):
    with pytest.raises(DataError, match=r"there is no run .*nowhere; `handgrad runs"):
        report(tmp_path, tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"empty holds no metrics\.jsonl"):
        report(tmp_path, tmp_path / "empty")
    with pytest.raises(DataError, match="no finished step yet"):
        report(tmp_path, make_run(tmp_path / "new", [start_line()]))
    with pytest.raises(DataError, match="no 'run' line"):
        report(tmp_path, make_run(tmp_path / "headless", [step_line(1)]))
    bad = make_run(tmp_path / "bad")
    (bad / "config.toml").write_text("a = = 1")
    with pytest.raises(DataError, match=r"config\.toml is not valid TOML"):
        report(tmp_path, bad)
    (bad / "config.toml").unlink()
    with pytest.raises(DataError, match=r"bad holds no config\.toml"):
        report(tmp_path, bad)


def test_wrong_calls(tmp_path):
    with pytest.raises(UsageError, match="at least one run"):
        write_report([], tmp_path / "page.html")
    with pytest.raises(UsageError, match=r"try --out .*report\.html"):
        write_report([make_run(tmp_path / "run")], tmp_path / "page")


def test_write_failure_is_one_line(tmp_path):
    (tmp_path / "report").write_text("a file where the folder should be")
    with pytest.raises(StorageError, match=r"writing .* failed"):
        report(tmp_path, make_run(tmp_path / "run"))


def test_names_tell_the_runs_apart(tmp_path):
    folders = [make_run(tmp_path / parent / "run") for parent in ("a", "b")]
    assert [run.name for run in read_runs([*folders, folders[0]])] == ["a/run", "b/run"]


def test_envelope_keeps_every_peak():
    x = np.arange(10_000.0)
    y = np.sin(x)
    y[1234], y[4321], y[7000:7100] = 50.0, -50.0, np.nan
    thin_x, thin_y = results.envelope(x, y, 200)
    assert len(thin_x) <= 400 and np.all(np.diff(thin_x) > 0)
    assert np.nanmax(thin_y) == 50.0 and np.nanmin(thin_y) == -50.0
    assert np.isnan(thin_y).any()
    assert results.envelope(x[:300], y[:300], 200)[0] is not None and len(results.envelope(x[:300], y[:300], 200)[0]) == 300


def test_smooth_does_not_lag_and_does_not_bridge():
    line = np.arange(100.0)
    places = np.arange(100)
    smoothed = results.smooth(line, 5, places)
    np.testing.assert_allclose(smoothed[:95], line[:95])  # a straight line is its own centred mean
    line[50] = np.nan
    smoothed = results.smooth(line, 5, places)
    assert np.isnan(smoothed[50]) and np.isfinite(np.delete(smoothed, 50)).all()


def test_thin_keeps_both_ends():
    assert results.thin(0, 5).tolist() == []
    assert results.thin(1, 5).tolist() == [0]
    assert results.thin(3, 5).tolist() == [0, 1, 2]
    picked = results.thin(1000, 5).tolist()
    assert len(picked) == 5 and picked[0] == 0 and picked[-1] == 999


def test_numbers_as_text(tmp_path):
    assert [short_text(v) for v in (0, 600, 8192, 999_999, 4.915e6, math.nan)] == ["0", "600", "8.19k", "1M", "4.92M", "–"]
    assert [bytes_text(v) for v in (512, 1023 * 1024, 3 << 30)] == ["512 B", "1023 KiB", "3 GiB"]
    assert [duration_text(v) for v in (1.25, 59.96, 61, 7200, 200_000)] == [
        "1.2 s",
        "1 min 00 s",
        "1 min 01 s",
        "2 h 00 min",
        "2 d 7 h",
    ]
    assert perplexity(1e6) == math.inf
    read = read_run(make_run(tmp_path / "run"), "run")  # 1 token is 4 bytes here, each worth one bit
    assert bits_per_byte(read, 4 * math.log(2)) == pytest.approx(1.0)


def test_the_rank_that_others_wait_for(tmp_path: Path) -> None:
    paces = [(10, 1, 120.0, 100.0), (20, 1, 130.0, 100.0), (30, 0, 101.0, 100.0), (40, 1, 110.0, 100.0)]
    names = ("step", "slowest", "slowest_ms", "median_ms")
    lines = ({"kind": "ranks", **dict(zip(names, pace, strict=True))} for pace in paces)
    text = report(tmp_path, make_run(tmp_path / "run", [*run_lines(), *lines]), plots=False).text
    assert "rank 1 75 % 20.0 % 130.0 ms" in text and "rank 0 25 % 1.0 % 101.0 ms" in text
    assert "rank 1" not in report(tmp_path, make_run(tmp_path / "alone"), plots=False).text
