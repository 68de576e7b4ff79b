"""The report of fp8 runs: what is quantised, what it lost, and runs in other precisions beside them."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure

from handgrad.errors import DataError
from handgrad.joins.fp8.scaling import Finding, saturation_line, summary
from handgrad.reports.plots import draw_fp8, light
from handgrad.reports.reading import read_run, read_runs
from handgrad.reports.results import fraction_text, scales_text
from tests.test_report import Page, make_run, report, run_lines, start_line

CLASSES = ("ln1", "dqkv", "atty", "dresidual_mid", "ln2", "gelu", "dhidden", "dresidual_out", "qkv_weight")


def watched(name: str, **changes: Any) -> Finding:
    values: dict[str, Any] = {
        "part": "",
        "amax": 3.0,
        "limit": 7.0,
        "scale": 64.0,
        "saturated_steps": 0,
        "clipped": 0.0,
        "vanished": 0.0,
    }
    return Finding(name, **{**values, **changes})


def fp8_line(step: int, **of_dqkv: Any) -> dict[str, Any]:
    """As a run writes it, of two layers; `of_dqkv` is what the second one's gradient met."""
    layers = [watched(f"blocks.{layer}.{name}") for layer in range(2) for name in CLASSES if name != "dqkv"]
    gradients = [watched("blocks.0.dqkv", scale=2.0**25), watched("blocks.1.dqkv", **of_dqkv)]
    return {"kind": "fp8", "step": step, "tensors": summary([*layers, *gradients, watched("lnf")])}


def fp8_lines(*more: dict[str, Any]) -> list[dict[str, Any]]:
    counted = [
        fp8_line(20, vanished=0.5, clipped=1e-7, scale=2.0**27),
        fp8_line(40, vanished=0.0321, clipped=0.00125, scale=2.0**27, amax=4e-5),
    ]
    return [start_line(precision="fp8"), *run_lines()[1:], *counted, *more]


def test_page_of_an_fp8_run(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", fp8_lines(), precision="fp8", fp8_keep_bf16="0.mlp, proj", fp8_head="forward")
    page = report(tmp_path, run)
    assert "in fp8 on cpu" in page.text
    words = "the products qkv, mlp (but 0.mlp), head.forward; gradients in e4m3, delayed scaling; the rest in bf16"
    assert words in page.text
    assert page.text.index(words) < page.text.index("Curves")
    shown = page.text[page.text.index("fp8 largest magnitude scale clipped vanished most in") :]
    assert "ln1 3 2^6 0 % 0 % – atty" in shown
    assert "– dqkv 3 2^25 to 2^27 0.125 % 3.21 % blocks.1 lnf" in shown  # of step 40, not 20
    assert "lnf 3 2^6 0 % 0 % –" in shown
    assert "In step 40" in shown and "50 %" not in shown
    svg = (tmp_path / "report" / "page.html").read_text()
    fp8 = svg[svg.index("<h2>fp8</h2>") : svg.index("<h2>Samples</h2>")]
    assert fp8.count("<svg") == 2 and ">dqkv</text>" in fp8 and ">ln1</text>" not in fp8  # which lost nothing
    for name in ("vanished", "clipped"):
        assert (tmp_path / "report" / f"page_fp8_{name}.png").read_bytes().startswith(b"\x89PNG")


def test_saturation_is_pointed_out(tmp_path: Path) -> None:
    line = watched("blocks.1.dqkv", part="1.qkv", amax=9.0, saturated_steps=8)
    events = [
        {"kind": "event", "step": step, "text": saturation_line(line, step, policy)}
        for step, policy in ((30, "warn"), (50, "widen"))
    ]
    page = report(tmp_path, make_run(tmp_path / "run", fp8_lines(*events)), plots=False)
    assert "Tensors in fp8 saturated 2 times, first in step 30; they are listed below." in page.text
    history = page.text[page.text.index("History") :]
    assert "blocks.1.dqkv clipped numbers in 8 steps in a row" in history and "one binade of margin more" in history
    once = report(tmp_path, make_run(tmp_path / "once", fp8_lines(events[0])), plots=False)
    assert "Tensors in fp8 saturated once in step 30;" in once.text
    assert "saturated" not in report(tmp_path, make_run(tmp_path / "none", fp8_lines()), plots=False).text


def test_only_some_runs_are_in_fp8(tmp_path: Path) -> None:
    page = report(tmp_path, make_run(tmp_path / "exact"), make_run(tmp_path / "short", fp8_lines(), precision="fp8"))
    source = (tmp_path / "report" / "page.html").read_text()
    fp8 = source[source.index("<h2>fp8</h2>") : source.index("<h2>Samples</h2>")]
    assert fp8.count("<table") == 1 and fp8.index("short</h3>") < fp8.index("<table") and "exact</h3>" not in fp8
    assert "var(--run1)" in fp8 and ">short</text>" in fp8 and ">dqkv</text>" not in fp8
    assert page.text.count("In fp8: the products qkv, proj, mlp, head; gradients") == 1


def test_each_run_draws_its_worst_class(tmp_path: Path) -> None:
    runs = read_runs([make_run(tmp_path / "exact"), make_run(tmp_path / "fp8", fp8_lines(fp8_line(60)))])
    axes = Figure().add_subplot()
    draw_fp8(axes, runs, quantity="vanished")
    (line,) = axes.get_lines()
    assert line.get_color() == light("run1")
    assert np.asarray(line.get_xydata()).tolist() == [[20, 50.0], [40, pytest.approx(3.21)], [60, 0.0]]
    axes = Figure().add_subplot()
    draw_fp8(axes, runs[1:], quantity="clipped")
    assert len(axes.get_lines()) == len(CLASSES) + 1  # lnf's
    assert [line.get_color() for line in axes.get_lines()].count(light("run0")) == 1


def test_runs_without_counts_have_no_section(tmp_path: Path) -> None:
    """Those in other precisions, and an fp8 run before its first count, or with nothing left in fp8."""
    assert read_run(make_run(tmp_path / "old"), "old").fp8 == []
    early = [start_line(precision="fp8"), *run_lines()[1:]]
    for name, lines in (("early", early), ("empty", [*early, {"kind": "fp8", "step": 10, "tensors": {}}])):
        page = report(tmp_path, tmp_path / "old", make_run(tmp_path / name, lines), plots=False)
        assert "largest magnitude" not in page.text
    report(tmp_path / "alone", tmp_path / "old")
    assert "<h2>fp8</h2>" not in (tmp_path / "alone" / "report" / "page.html").read_text()
    assert not list((tmp_path / "alone" / "report").glob("page_fp8*"))


def test_of_a_step_done_again_the_last_counts(tmp_path: Path) -> None:
    lines = fp8_lines(start_line(precision="fp8"), fp8_line(40, vanished=0.25), fp8_line(30))
    run = read_run(make_run(tmp_path / "run", lines), "run")
    assert [step for step, _ in run.fp8] == [20, 30, 40]
    assert run.fp8[-1][1]["dqkv"].vanished_fraction == 0.25


@pytest.mark.nightly(but=["nan"])
@pytest.mark.parametrize("value", [math.nan, math.inf, None])
def test_counts_that_are_not_finite(tmp_path: Path, value: float | None) -> None:
    """A step whose gradients were not."""
    line = fp8_line(40)
    for found in line["tensors"].values():
        found |= dict.fromkeys(("largest_amax", "smallest_scale", "clipped_fraction", "vanished_fraction"), value)
    page = report(tmp_path, make_run(tmp_path / "run", fp8_lines(line)))
    assert ("dqkv ∞ ∞ to 2^" if value == math.inf else "dqkv – – to 2^") in page.text
    only = make_run(tmp_path / "only", [start_line(precision="fp8"), *run_lines()[1:], line])
    assert "dqkv" in report(tmp_path, only).text


def damaged(**changes: Any) -> dict[str, Any]:
    line = fp8_line(50)
    return {**line, "tensors": {**line["tensors"], "dqkv": {**line["tensors"]["dqkv"], **changes}}}


@pytest.mark.parametrize(
    "broken",
    [
        {"kind": "fp8", "step": 50},
        {"kind": "fp8", "tensors": {}},
        {"kind": "fp8", "step": 50, "tensors": [1]},
        {"kind": "fp8", "step": 50, "tensors": {"dqkv": 3}},
        {"kind": "fp8", "step": 50, "tensors": {"dqkv": {}}},
        {"kind": "fp8", "step": 50, "tensors": {"x" * 9999: {}}},
        damaged(largest_amax="large"),
        damaged(vanished_fraction=True),
        damaged(clipped_fraction=[]),
        damaged(most_vanished=3),
    ],
    ids=lambda line: json.dumps(line)[:60],
)
def test_a_damaged_line_is_refused_by_number(tmp_path: Path, broken: dict[str, Any]) -> None:
    lines = fp8_lines(broken, fp8_line(60))
    with pytest.raises(DataError, match=rf"line {len(lines) - 1} of .*metrics\.jsonl") as caught:
        report(tmp_path, make_run(tmp_path / "run", lines))
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400 + len(str(tmp_path))
    assert not (tmp_path / "report").exists()


def test_a_configuration_that_cannot_be(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", fp8_lines(), fp8_keep_bf16="9.mlp")
    with pytest.raises(DataError, match=r"run/config\.toml: fp8_keep_bf16 takes .*found '9\.mlp'"):
        report(tmp_path, run)
    assert not (tmp_path / "report").exists()


def test_names_and_many_classes(tmp_path: Path) -> None:
    """Any text may stand in a line; a plot names the six classes that lose the most."""
    line = fp8_line(45)
    line["tensors"] |= {f"<{n}>": {**line["tensors"]["lnf"], "vanished_fraction": n / 100} for n in range(1, 9)}
    page = report(tmp_path, make_run(tmp_path / "run", fp8_lines(line)))
    assert isinstance(page, Page) and "<8> 3 2^6 0 % 8 % lnf" in page.text
    source = (tmp_path / "report" / "page.html").read_text()
    fp8 = source[source.index("<h2>fp8</h2>") : source.index("<h2>Samples</h2>")]
    named = [name for name in ("dqkv", *(f"&lt;{n}&gt;" for n in range(1, 9))) if f">{name}</text>" in fp8]
    assert named == ["dqkv", *(f"&lt;{n}&gt;" for n in range(4, 9))]


def test_fractions_and_scales_as_text() -> None:
    shown = [fraction_text(v) for v in (0.0, 1.0, 0.0321, 1e-6, 3.4e-8, math.nan)]
    assert shown == ["0 %", "100 %", "3.21 %", "0.0001 %", "3e-06 %", "–"]
    assert scales_text(64.0, 64.0) == "2^6" and scales_text(2.0**-3, 2.0**25) == "2^-3 to 2^25"
    assert scales_text(0.0, math.inf) == "0 to ∞"
