"""The README's picture: tokens per second of handgrad and its peers on one H200, from the results files.

python -m benchmarks.speed        draws docs/speed.png
"""

import hashlib
import json
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

RESULTS = Path(__file__).parent / "results"
PICTURE = Path(__file__).parents[1] / "docs" / "speed.png"
MODELS = ("124M", "350M", "774M", "1558M")
COLORS = {
    "handgrad, fp8": "#1f5fa8",
    "handgrad, bf16": "#5a97d8",
    "torch.compile, bf16": "#c98a3d",
    "llm.c, bf16": "#9a9a93",
}


def measured() -> dict[str, dict[str, float | None]]:
    """Tokens per second by model and contender; of several twins the fastest, None for one that was not measured."""
    speeds: dict[str, dict[str, float | None]] = {}
    for model in MODELS:
        rows = done(RESULTS / f"h200-step-{model.lower()}.json")
        bf16 = {name: row["tokens_per_second"] for name, row in rows.items() if row["precision"] == "bf16"}
        twin = max((speed for name, speed in bf16.items() if name.startswith("twin")), default=None)
        llmc = done(RESULTS / f"h200-step-{model.lower()}-llmc.json")["llmc"]["tokens_per_second"]
        fp8 = done(RESULTS / f"h200-fp8-head-step-{model.lower()}.json")["handgrad-fp8"]["tokens_per_second"]
        speeds[model] = dict(zip(COLORS, (fp8, bf16["handgrad"], twin, llmc), strict=True))
    return speeds


def done(path: Path) -> dict[str, dict[str, Any]]:
    """The contenders of a record that were measured."""
    rows = json.loads(path.read_text())["figures"]
    return {name: row for name, row in rows.items() if "tokens_per_second" in row}


def text(speed: float | None) -> str:
    return "–" if speed is None else f"{speed / 1e3:.1f}k"


def digest() -> str:
    """Identifies the figures; the picture carries it, so that a test sees an outdated one."""
    return hashlib.sha256(json.dumps(measured()).encode()).hexdigest()


def draw(path: Path) -> None:
    figure = Figure(figsize=(9, 2.1), layout="constrained")
    names = list(COLORS)[::-1]
    for index, (model, speeds) in enumerate(measured().items()):
        axes = figure.add_subplot(1, len(MODELS), index + 1)
        widths = [speeds[name] or 0.0 for name in names]
        axes.barh(names, widths, color=[COLORS[name] for name in names])
        for y, name in enumerate(names):
            axes.annotate(text(speeds[name]), (widths[y], y), (3, 0), textcoords="offset points", va="center", fontsize=7.5)
        axes.set_title(f"GPT-2 {model}", fontsize=9, loc="left", fontweight="bold")
        axes.set_xlim(0, 1.25 * max(widths))
        axes.set_xticks([])
        axes.tick_params(length=0, labelsize=8, labelleft=index == 0)
        axes.spines[["top", "right", "bottom", "left"]].set_visible(False)
    figure.savefig(path, dpi=160, metadata={"Software": None, "Figures": digest()})


if __name__ == "__main__":
    draw(PICTURE)
