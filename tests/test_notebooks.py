"""The notebooks are made from their sources, clean, and run from top to bottom on a CPU without a network."""

import json
import re
from pathlib import Path

import pytest

from notebooks.make import SOURCES, notebook
from tests.distributed.runs import Launcher

NAMES = ["finetune", "first_model", "the_climb"]


def test_every_notebook_is_here() -> None:
    assert [source.stem for source in SOURCES] == NAMES


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_it_is_made_from_its_source_and_clean(source: Path) -> None:
    """`python -m notebooks.make` writes it. It names no folder of a machine, and opens in Colab."""
    text = source.with_suffix(".ipynb").read_text()
    assert text == notebook(source)
    content = json.loads(text)
    assert (content["nbformat"], content["nbformat_minor"]) == (4, 5)
    cells = content["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert len({cell["id"] for cell in cells}) == len(cells) > len(code)
    assert all({"execution_count", "outputs"} <= cell.keys() for cell in code)
    assert not re.search(r"(?<![\w:/.])/(?!/)\w+/", "".join("".join(cell["source"]) for cell in code))
    assert f"blob/main/notebooks/{source.stem}.ipynb" in cells[0]["source"][0]


def played(name: str, folder: Path, launcher: Launcher, more: str = "", changes: dict[str, str] | None = None) -> str:
    """The output of the notebook's cells as one script, in `folder`, with `changes` of its text."""
    (source,) = (source for source in SOURCES if source.stem == name)
    cells = json.loads(source.with_suffix(".ipynb").read_text())["cells"]
    script = folder / f"{name}.py"
    code = "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    for old, new in (changes or {}).items():
        assert old in code, old
        code = code.replace(old, new)
    script.write_text(code + more)
    return launcher.run(1, [str(script)], cwds=[folder]).ranks[0].output


# In `make test` the notebooks run with a tenth of their steps, which teaches little.
FEWER = {
    "first_model": {'"steps": 500': '"steps": 50', "250": "25", "% 100": "% 25", "documents=4000": "documents=400"},
    "finetune": {'"steps": 400': '"steps": 10', '"steps": 40,': '"steps": 4,', "documents=4000": "documents=400"},
}


@pytest.mark.parametrize("name", FEWER)
def test_every_cell_runs(name: str, tmp_path: Path, launcher: Launcher) -> None:
    output = played(name, tmp_path, launcher, changes=FEWER[name])
    assert len(re.findall(r"^(?:step (?:25|50)   loss [\d.]+|\d of 6 right)$", output, re.MULTILINE)) == 2
    if name == "first_model":
        assert max(map(float, re.findall(r"^largest difference (\S+)$", output, re.MULTILINE))) < 1e-5


@pytest.mark.nightly  # test_every_cell_runs plays it with fewer steps
def test_the_first_model_learns(tmp_path: Path, launcher: Launcher) -> None:
    output = played("first_model", tmp_path, launcher, "\nprint(handgrad.compare(run.folder))\n")
    losses = [float(loss) for loss in re.findall(r"^step \d+   loss ([\d.]+)$", output, re.MULTILINE)]
    assert len(losses) == 5 and losses[-1] < losses[0] - 1, "it learns"
    differences = [float(largest) for largest in re.findall(r"^largest difference (\S+)$", output, re.MULTILINE)]
    assert len(differences) == 3 and max(differences) < 1e-5
    story, news = (float(loss) for loss in re.findall(r"^ *([\d.]+) nats per token", output, re.MULTILINE))
    assert story < news
    assert re.search(r"^notebook +\d\.\d+", output, re.MULTILINE)


@pytest.mark.nightly  # test_every_cell_runs plays it with fewer steps
def test_finetuning_teaches_the_facts(tmp_path: Path, launcher: Launcher) -> None:
    before, after = re.findall(r"^(\d) of 6 right$", played("finetune", tmp_path, launcher), re.MULTILINE)
    assert int(before) == 0 and int(after) >= 5


def test_the_climb_begins(tmp_path: Path, launcher: Launcher) -> None:
    """The stub waits, the mistake is named, the solution is right and trains the model as the reference does."""
    output = played("the_climb", tmp_path, launcher, changes={"100": "2"})
    assert "18 steps lie in climb" in output and "# Fifty thousand exponentials" in output
    assert output.count("softmax_and_loss is not written yet") == 1
    assert output.count("dlogits: lacks the one-hot of the target") == 1
    assert output.count("right; next is 02_linear.md") == 1 and "[x]  1 softmax and loss" in output
    assert "yours: softmax_and_loss;" in output
    assert float(re.findall(r"differ by at most (\S+) nats", output)[0]) < 1e-5
