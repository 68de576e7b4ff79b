"""The lines of a report: 16 runs that every reader tells apart, names on the curves, and tables that fit."""

import itertools
import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure

from handgrad.reports import page as pages
from handgrad.reports.drawing import LARGE, SMALL, apart, figure, inline_svg, own_settings
from handgrad.reports.page import write_report
from handgrad.reports.plots import PALETTE, Plot, choose_plots, draw_loss, run_style
from handgrad.reports.reading import read_runs
from handgrad.reports.results import Run
from tests.screenshots import ask, chromium
from tests.test_report import make_run, report, run_lines, start_line, step_line

# Linear RGB as people without the red, green or blue cones see it: Machado et al., 2009, table 1, severity 1.
VISIONS = np.array(
    [
        [[1, 0, 0], [0, 1, 0], [0, 0, 1]],
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
        [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
    ]
)
# Linear RGB to OKLab: Ottosson, 2020.
CONES = np.array([[0.41222, 0.53633, 0.05145], [0.21190, 0.68070, 0.10740], [0.08830, 0.28172, 0.62998]])
LAB = np.array([[0.21045, 0.79362, -0.00407], [1.97800, -2.42859, 0.45059], [0.02590, 0.78277, -0.80868]])


def linear(color: str) -> np.ndarray:
    value = np.array([int(color[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    return np.where(value <= 0.04045, value / 12.92, ((value + 0.055) / 1.055) ** 2.4)


def contrast(one: str, other: str) -> float:
    dark, bright = sorted(0.05 + np.array([0.2126, 0.7152, 0.0722]) @ linear(color) for color in (one, other))
    return bright / dark


def distance(one: str, other: str, vision: np.ndarray) -> float:
    one_seen, other_seen = (LAB @ np.cbrt(CONES @ np.clip(vision @ linear(color), 0, 1)) for color in (one, other))
    return float(np.linalg.norm(one_seen - other_seen))


@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
def test_everyone_tells_sixteen_runs_apart(scheme: int) -> None:
    """By colour and dash. Those of one dash differ to every eye, and each colour is legible as text."""
    styles = [run_style(index) for index in range(16)]
    assert len({str(style) for style in styles}) == 16
    dark = dict(PALETTE.values())
    colors = [(style["color"], dark[style["color"]])[scheme] for style in styles]
    assert all(contrast(color, PALETTE["page"][scheme]) >= 4.5 for color in colors)
    for first in range(0, 16, 4):
        assert len({str(style["linestyle"]) for style in styles[first : first + 4]}) == 1
        for one, other in itertools.combinations(colors[first : first + 4], 2):
            assert min(distance(one, other, vision) for vision in VISIONS) > 0.09, (one, other)
    for one, other in itertools.combinations(set(colors), 2):
        assert distance(one, other, VISIONS[0]) > 0.14, (one, other)


def sweep(tmp_path: Path, count: int = 16) -> list[Run]:
    """Runs whose losses end almost together."""
    folders = []
    for i in range(count):
        steps = [step_line(s, loss=2 + 5 * math.exp(-s / (18 + i / 8))) for s in range(1, 61)]
        lines = [start_line(), *steps, *({"kind": "validation", "step": s, "loss": 2.0 + i / 99} for s in (30, 60))]
        folders.append(make_run(tmp_path / f"sweep-{i}", lines, learning_rate=0.003 * math.sqrt(3) * (1 + i), seed=i))
    return read_runs(folders)


def loss_plot(runs: list[Run]) -> Plot:
    return next(plot for plot in choose_plots(runs) if plot.name == "loss")


def test_names_stand_on_the_curves_without_collision(tmp_path: Path) -> None:
    """Each ends a line that begins at its curve's end; all lie inside the picture, in the order of the curves."""
    runs = sweep(tmp_path)
    with own_settings():
        drawn = figure(loss_plot(runs), runs, LARGE)
        drawn.draw_without_rendering()
        names = [text for text in drawn.axes[0].texts if str(text.get_gid()).startswith("name-")]
        boxes = [name.get_window_extent() for name in names]
    assert [name.get_text() for name in names] == [*(f"sweep-{i}" for i in range(16)), "source entropy, 1.600"]
    assert drawn.axes[0].get_legend() is None
    width, height = drawn.get_size_inches() * drawn.dpi
    assert all(box.x0 > 0 and box.x1 <= width and box.y0 >= 0 and box.y1 <= height for box in boxes)
    middles = sorted((box.y0 + box.y1) / 2 for box in boxes)
    assert min(np.diff(middles)) >= 7 * drawn.dpi / 72  # points, of letters of 7.5
    order = [names[i].get_text() for i in np.argsort([box.y0 for box in boxes])]
    assert order[0].startswith("source") and order.index("sweep-0") < order.index("sweep-15")
    leaders = [line for line in drawn.axes[0].lines if str(line.get_gid()).startswith("leader-")]
    assert len(leaders) == 17
    assert len(figure(loss_plot(runs), runs, SMALL).axes[0].texts) == 0  # the tables name the lines


def test_places_move_as_little_as_they_must() -> None:
    np.testing.assert_allclose(apart(np.array([0.2, 0.5, 0.8]), 0.1), [0.2, 0.5, 0.8])
    np.testing.assert_allclose(apart(np.array([0.5, 0.5]), 0.1), [0.45, 0.55])
    np.testing.assert_allclose(apart(np.array([0.0, 0.0, 1.0]), 0.1), [0.0, 0.1, 1.0], atol=1e-9)
    np.testing.assert_allclose(apart(np.array([1.0, 1.0]), 0.1), [0.9, 1.0])


def test_validation_is_a_line_with_dots(tmp_path: Path) -> None:
    runs = sweep(tmp_path, 1)
    axes = Figure().add_subplot()
    draw_loss(axes, runs)
    (validation,) = (line for line in axes.lines if line.get_label() == "validation")
    assert validation.get_linestyle() == "-" and validation.get_marker() == "o"
    svg = inline_svg(loss_plot(runs), runs, LARGE)[0]
    assert ">validation</text>" in svg and ">training</text>" in svg


def test_settings_read_as_people_write_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without quotes, three digits where those tell the runs apart, a dash for an empty one."""
    monkeypatch.setattr(pages, "choose_plots", lambda runs: [])
    folders = [
        make_run(tmp_path / name, architecture=name, learning_rate=0.003 * math.sqrt(3) * factor, decay=decay, init_from=at)
        for name, factor, decay, at in (("gpt2", 1, 0.1, ""), ("modern", 2, 0.1 + 0.2, "runs/base"))
    ]
    folders.append(make_run(tmp_path / "close", learning_rate=0.003 * math.sqrt(3), decay=0.100001))
    text = report(tmp_path, *folders, plots=False).text
    table = text[text.index("Settings that differ") : text.index("Samples")]
    assert "gpt2 gpt2 0.1 – 0.0052 modern modern 0.3 runs/base 0.0104 close – 0.100001 – 0.0052" in table
    assert '"' not in table
    source = (tmp_path / "report" / "page.html").read_text()
    assert "<button>learning_<wbr>rate</button>" in source and 'data-key="0.0052"' in source


def test_many_runs_fold_their_parts(tmp_path: Path) -> None:
    """But not their warnings, and their tasks are one table."""
    lines = run_lines()
    lines[5]["skipped"] = "loss z 7.1 > 5"
    task = {"kind": "evaluation", "step": 60, "task": "arc", "examples": 10, "metrics": {"acc": [0.5, 0.1]}}
    page = report(tmp_path, *(make_run(tmp_path / f"r{i}", [*lines, task]) for i in range(7)), plots=False)
    source = (tmp_path / "report" / "page.html").read_text()
    assert source.count('</h3>\n<p class="warning">') == 7 and source.count("<h2>Tasks</h2>") == 1
    assert "arc acc r0 0.5000 ± 0.1000 10 60 arc acc r1" in page.text
    samples = source[source.index("<h2>Samples</h2>") : source.index("<h2>What to do next</h2>")]
    assert samples.count("<details><summary><svg") == 7


BESIDE = """
    const heads = [...page.document.querySelectorAll(".sortable thead tr")].map((row) =>
        [...row.querySelectorAll("button")].map((button) => button.getBoundingClientRect()));
    const shrunk = heads.flat().filter(({ width, height }) => height > 4 * width).length;
    const clash = heads.flatMap((row) => row.slice(1).map((box, i) => box.left - row[i].right)).filter((gap) => gap < 8);
    return JSON.stringify([clash, shrunk, page.document.documentElement.scrollWidth]);
"""


@pytest.mark.skipif(chromium() is None, reason="no chromium on PATH")
@pytest.mark.parametrize("width", [390, 800, 1200, 1920])
def test_headers_keep_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    """Long names of settings, at every width; and the page never scrolls sideways."""
    monkeypatch.setattr(pages, "choose_plots", lambda runs: [])
    keys = ("architecture", "channels", "embedding_learning_rate", "decay_fraction", "keep_every", "schedule", "optimizer")
    runs = [
        make_run(tmp_path / f"run-with-a-long-name-{i}", **dict.fromkeys(keys, f"a{i}"), hidden_dropout_probability=i)
        for i in range(3)
    ]
    written = write_report(runs, tmp_path / "page.html")
    shown, console = ask(written.absolute().as_uri(), BESIDE, width)
    assert (json.loads(shown), console) == ([[], 0, width], [])
    assert re.search(r'<div class="scroll broad"', written.read_text())
