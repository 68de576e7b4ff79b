"""Draws plots as PNG, and as SVG for a page. Leaves matplotlib's global state alone; equal runs give equal bytes."""

import io
import json
import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from html import escape
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.text import Annotation

from handgrad.errors import UsageError, storage_errors
from handgrad.files import write_bytes_durably
from handgrad.reports.plots import FEW_RUNS, LEADER, NAME, PALETTE, RUN_LINE, Plot, Style, light, shortened, tick_sparsely
from handgrad.reports.results import Run

# Inches at 72 points. The page shows a figure at about 1.4 times its points, so 8 points become 11 pixels.
LARGE, SMALL = (8.6, 3.5), (4.3, 2.6)
PNG_DOTS_PER_INCH = 200
NAME_POINTS, NAME_GAP = 7.5, 1.2  # the size of a curve's name, and the distance of two in sizes

SETTINGS = {
    "svg.fonttype": "none",  # text stays text: it can be selected, and takes the page's font
    "font.size": 8.0,
    "axes.titlesize": 9.0,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlecolor": light("ink"),
    "axes.labelsize": 8.0,
    "axes.labelcolor": light("faint"),
    "axes.edgecolor": light("line"),
    "axes.facecolor": "none",
    **dict.fromkeys(("axes.spines.top", "axes.spines.right", "axes.spines.left"), False),
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "axes.xmargin": 0.015,
    "grid.linewidth": 0.6,
    **dict.fromkeys(("grid.color", "xtick.color", "ytick.color"), light("line")),
    **dict.fromkeys(("xtick.labelcolor", "ytick.labelcolor"), light("faint")),
    **dict.fromkeys(("ytick.major.size", "ytick.minor.size"), 0.0),
    "lines.solid_capstyle": "round",
}


def figure(plot: Plot, runs: Sequence[Run], size: tuple[float, float]) -> Figure:
    drawn = Figure(figsize=size, layout="constrained", facecolor=light("page"))
    axes = drawn.add_subplot()
    plot.draw(axes, runs)
    axes.set_title(plot.title)
    if not axes.get_xlabel():
        axes.set_xlabel("step")
    axes.xaxis.label.set_gid("xlabel")
    tick_sparsely(axes, 8 if size is LARGE else 5)
    for name in [text for text in axes.texts if str(text.get_gid()).startswith(NAME)] if size is SMALL else []:
        if len(runs) > FEW_RUNS:
            name.remove()
        name.set_text(shortened(name.get_text(), 21))
    engine = drawn.get_layout_engine()
    assert engine is not None
    engine.execute(drawn)
    spread_names(axes)
    return drawn


def spread_names(axes: Axes) -> None:
    """Moves the names of curves apart, as little as it takes, and joins each to its curve's end by a thin line."""
    names = [text for text in axes.texts if isinstance(text, Annotation) and str(text.get_gid()).startswith(NAME)]
    if not names:
        return
    height = axes.get_window_extent().height / axes.figure.dpi * 72
    size = min(NAME_POINTS, height / NAME_GAP / len(names))
    ends = np.clip((axes.transData - axes.transAxes).transform([text.xy for text in names]), 0, 1)
    order = np.argsort(ends[:, 1], kind="stable")
    for top, index in zip(apart(ends[order, 1], NAME_GAP * size / height), order, strict=True):
        names[index].set(y=top, fontsize=size)
        mark = str(names[index].get_gid()).replace(NAME, LEADER)
        style: Style = {"color": names[index].get_color(), "linewidth": 0.5, "clip_on": False, "gid": mark}
        leader = Line2D([ends[index, 0], 1.012], [ends[index, 1], top], transform=axes.transAxes, **style)
        leader.set_in_layout(False)
        axes.add_line(leader)


def apart(wanted: np.ndarray, gap: float) -> np.ndarray:
    """Places from 0 to 1, `gap` apart, near the ascending ones `wanted`: halfway between pushing up and pushing down."""
    steps = gap * np.arange(len(wanted))
    up = np.maximum.accumulate(wanted - steps)
    down = np.minimum.accumulate((wanted - steps)[::-1])[::-1]
    return np.clip((up + down) / 2, 0, max(0, 1 - steps[-1])) + steps


@contextmanager
def own_settings(salt: str = "") -> Iterator[None]:
    """Makes matplotlib draw in the report's style within the block."""
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update({**SETTINGS, "svg.hashsalt": salt})
        yield


def render(plot: Plot, runs: Sequence[Run], size: tuple[float, float], file_format: str) -> tuple[Figure, bytes]:
    """`plot` as a figure and as the bytes of a file, independent of the reader's own matplotlibrc."""
    # Ids in an SVG are hashes; a salt per plot and size keeps them distinct on a page with several plots.
    with own_settings(salt=f"{plot.name} {size}"):
        buffer = io.BytesIO()
        # Neither a date nor a version: equal runs give equal files.
        metadata = {"Date": None, "Creator": None} if file_format == "svg" else {"Software": None}
        drawn = figure(plot, runs, size)
        drawn.savefig(buffer, format=file_format, dpi=PNG_DOTS_PER_INCH, metadata=metadata)
    return drawn, buffer.getvalue()


def png(plot: Plot, runs: Sequence[Run]) -> bytes:
    return render(plot, runs, LARGE if plot.wide or len(runs) > FEW_RUNS else SMALL, "png")[1]


def write_png(path: Path, plot: Plot, runs: Sequence[Run]) -> None:
    """Writes `plot` of `runs`. Raises `UsageError` for a name of another format, `StorageError` if it cannot be written."""
    if path.suffix != ".png":
        raise UsageError(f"a plot writes PNG, found {path}; name a FILE.png")
    with storage_errors(f"writing {path}"):
        write_bytes_durably(path, png(plot, runs))


def inline_svg(plot: Plot, runs: Sequence[Run], size: tuple[float, float]) -> tuple[str, str]:
    """(`plot` as an <svg> element in the page's colours and font; its values as JSON for the page's script)."""
    drawn, content = render(plot, runs, size, "svg")
    svg = content.decode("utf-8")
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r"<!--.*?-->", "", svg, flags=re.DOTALL)
    # HTML knows SVG without namespaces; "href" has replaced "xlink:href" since SVG 2.
    svg = re.sub(r"""\sxmlns(:xlink)?="[^"]*\"""", "", svg).replace("xlink:href", "href")
    # Groups are named figure_1, axes_1, ... in every figure and a page must not repeat an id. The script needs some.
    svg = re.sub(rf'<g id="{RUN_LINE}(\d+)"', r'<g class="run" data-run="\1"', svg)
    svg = re.sub(rf'<g id="({NAME}|{LEADER})(\d*)"', lambda match: f'<g class="{match[1][:-1]}" data-run="{match[2]}"', svg)
    svg = re.sub(r'<g id="(xtick|xlabel)[_\d]*"', r'<g class="\1"', svg)
    svg = re.sub(r"""<g id="[^"]*\"""", "<g", svg)
    view_box = re.search(r'viewBox="[^"]*"', svg)
    assert view_box, "matplotlib writes a viewBox"
    kind = "large" if size is LARGE else "small"
    marks = f'{view_box.group()} data-frame="{frame(drawn)}"'
    head = f'<svg class="{kind}" {marks} role="img" aria-label="{escape(plot.title)}">'
    svg = re.sub(r"<svg\b[^>]*>", head, svg, count=1)
    svg = re.sub(r"<style\b.*?</style>", "", svg, flags=re.DOTALL)  # it would apply to the whole page
    svg = re.sub(r"<[^>]*>", lambda match: restyle(match.group()), svg)
    return re.sub(r"\n\s*", "\n", svg).strip(), series(drawn)


def frame(drawn: Figure) -> str:
    """JSON of the axes' edges in the SVG (left, right, top, bottom, in points) and of the range of x."""
    (axes,), (width, height) = drawn.axes, drawn.get_size_inches() * 72
    box = axes.get_position()
    edges = [box.x0 * width, box.x1 * width, (1 - box.y1) * height, (1 - box.y0) * height]
    return json.dumps([*(round(edge, 2) for edge in edges), *axes.get_xlim()])


def series(drawn: Figure) -> str:
    """The named curves of a figure as JSON: run, name, colour, points."""
    names = {colors[0]: name for name, colors in PALETTE.items()}
    curves = []
    for line in drawn.axes[0].lines:
        mark, label = str(line.get_gid()), str(line.get_label())
        if mark.startswith(RUN_LINE) and not label.startswith("_"):
            x, y = np.asarray(line.get_xdata()), np.asarray(line.get_ydata())
            curves.append(
                {
                    "run": int(mark[len(RUN_LINE) :]),
                    "name": label.strip().replace(r"\$", "$"),
                    "color": names[str(line.get_color())],
                    "x": [brief(float(value)) for value in x],
                    "y": [brief(float(value)) for value in y],
                }
            )
    return json.dumps(curves, ensure_ascii=False, separators=(",", ":"))


def brief(value: float) -> float | None:
    """Rounds a number to five digits; keeps a whole number in full. None if it is not finite."""
    if not math.isfinite(value):
        return None
    return int(value) if value.is_integer() else float(f"{value:.5g}")


def restyle(tag: str) -> str:
    """One SVG tag with the page's colours, and coordinates to a hundredth of a point instead of a millionth."""
    for name, (color, _) in PALETTE.items():
        tag = tag.replace(color, f"var(--{name})")
    return re.sub(r"(\d\.\d\d)\d+", r"\1", tag)
