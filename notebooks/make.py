"""Writes the notebooks from their sources: python -m notebooks.make

A source is Python: `# %% TITLE` begins a cell of code, `# %% [markdown]` one of text in comments, `# %% solution` one whose code
Colab and Jupyter fold. A notebook holds no outputs.
"""

import json
import re
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
SOURCES = sorted(set(FOLDER.glob("*.py")) - {Path(__file__)})
REPOSITORY = "handgrad/handgrad"
COLAB = "https://colab.research.google.com"
FOLDED = {"cellView": "form", "jupyter": {"source_hidden": True}}


def cell(number: int, kind: str, text: str, title: str) -> dict[str, Any]:
    lines = text.splitlines(keepends=True)
    every = {"cell_type": kind, "id": f"cell-{number}", "metadata": {}, "source": lines}
    if kind == "markdown":
        return every
    if title == "solution":
        return every | {
            "metadata": FOLDED,
            "source": ["# @title A solution\n", *lines],
            "execution_count": None,
            "outputs": [],
        }
    return every | {"source": [*([f"# {title}\n"] if title else []), *lines], "execution_count": None, "outputs": []}


def notebook(source: Path) -> str:
    """The text of the notebook that a source makes."""
    badge = f"[![Open in Colab]({COLAB}/assets/colab-badge.svg)]({COLAB}/github/{REPOSITORY}/blob/main/notebooks/{source.stem}.ipynb)"
    cells = [cell(0, "markdown", badge, "")]
    parts = re.split(r"^# %%(.*)\n", source.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    for title, text in zip(map(str.strip, parts[::2]), parts[1::2], strict=True):
        if title == "[markdown]":
            text, kind = re.sub(r"^# ?", "", text, flags=re.MULTILINE), "markdown"
        else:
            kind = "code"
        cells.append(cell(len(cells), kind, text.strip("\n"), title))
    about = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    about |= {"accelerator": "GPU", "colab": {"gpuType": "T4"}} if source.stem != "the_climb" else {}
    content = {"cells": cells, "metadata": about, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(content, indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    for source in SOURCES:
        source.with_suffix(".ipynb").write_text(notebook(source), encoding="utf-8")
