"""The climb's pages and its command: every page is whole and its number is true; the folder, the way, a run."""

import contextlib
import io
import re
import shutil
from pathlib import Path

import pytest

from handgrad.cli import main
from handgrad.ops import reference
from handgrad.reports.reading import read_runs
from handgrad.tools import climb, climb_run
from tests.test_commands import refused

ROOT = Path(__file__).parents[2]
SOLUTIONS = Path(__file__).parent / "solutions"
PAGES = sorted((ROOT / "climb" / "steps").glob("[0-9]*.md"))
NUMBER = re.compile(r"^```python\n(.*?)^```\n\n```text\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_is_whole_and_its_number_is_true(page: Path) -> None:
    text = page.read_text()
    assert text.startswith("# ") and text.count("\n# ") == 0 and "**In a run of a week**" in text
    assert re.findall(r"^(\d)\. .*", text.split("**Three questions**")[1], re.MULTILINE) == ["1", "2", "3"]
    assert re.findall(r"<summary>Hint (\d): [^<]+</summary>\n\n", text) == ["1", "2", "3"] and text.count("</details>") == 3
    assert text.count("```text\n") == 2 and re.search(r"^Sources?: ", text, re.MULTILINE), (
        "a figure, what the number prints"
    )
    ((code, printed),) = NUMBER.findall(text)
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(compile(code, page.name, "exec"), {})
    assert out.getvalue() == printed
    assert not re.search(r"\]\(https?:", text), "no page needs another site"


def test_pages_steps_and_tables_belong_together() -> None:
    assert [page.stem for page in PAGES] == climb.STEPS
    readme = (ROOT / "climb" / "steps" / "README.md").read_text()
    assert re.findall(r"\((\d\d_\w+)\.md\)", readme) == climb.STEPS
    for step in climb.STEPS:
        assert (ROOT / "climb" / "grading" / f"{step}.py").is_file()


def test_the_climb_keeps_its_budget() -> None:
    files = [path for path in (ROOT / "climb").rglob("*") if path.suffix in (".py", ".md")]
    assert sum(len(path.read_text().splitlines()) for path in files) <= 3000
    package = "commands/climb.py", "tools/climb.py", "tools/climb_run.py"
    assert sum(len((ROOT / "handgrad" / path).read_text().splitlines()) for path in package) <= 339  # 11 more are flags


def test_the_folder_and_the_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    assert "`handgrad climb start DIR`" in refused(capsys, 64, "climb", "--dir", str(tmp_path))
    assert "start needs a folder" in refused(capsys, 64, "climb", "start")
    assert main(["climb", "start", str(tmp_path / "mine")]) == 0
    assert "18 steps lie in" in capsys.readouterr().out
    assert "new or empty folder" in refused(capsys, 64, "climb", "start", str(tmp_path / "mine"))
    monkeypatch.chdir(tmp_path / "mine")
    names = {path.name for path in Path().iterdir()}
    assert names == {"README.md", "AGENTS.md", "progress.json"} | {f"{s}.{e}" for s in climb.STEPS for e in ("md", "py")}
    assert "step 1: softmax_and_loss is not written yet" in refused(capsys, 64, "climb", "check")
    assert "did you mean" in refused(capsys, 64, "climb", "check", "layer_nrm")
    shutil.copy(SOLUTIONS / "01_softmax_and_loss.py", ".")
    assert main(["climb", "check"]) == 0
    assert capsys.readouterr().out.endswith("dlogits: right\nright; next is 02_linear.md\n")
    source = (SOLUTIONS / "02_linear.py").read_text()
    Path("02_linear.py").write_text(source.replace("dy.sum(0)", "dy.mean(0)"))
    assert "step 2: dbias is a mean over the tokens" in refused(capsys, 76, "climb", "check")
    Path("02_linear.py").write_text(source)
    assert main(["climb", "check", "linear"]) == 0 and main(["climb"]) == 0
    lines = capsys.readouterr().out.splitlines()[-19:]
    assert re.fullmatch(r"\[x\]  1 softmax and loss +0\.\d min +1 x checked", lines[0])
    assert re.fullmatch(r"\[x\]  2 linear +0\.\d min +2 x checked", lines[1]) and lines[2] == "[ ]  3 gelu"
    assert lines[-1].startswith("2 right; ")
    Path("progress.json").write_text("{")
    assert "expected a climb in" in refused(capsys, 64, "climb")


def test_a_run_trains_with_every_written_step(shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """All solutions train as the reference does; a wrong one trains otherwise; the reference trains once."""
    mine = tmp_path / "mine"
    assert main(["climb", "start", str(mine)]) == 0
    shutil.copytree(shards, mine / "shards")
    for solution in SOLUTIONS.glob("*.py"):
        shutil.copy(solution, mine)
    assert main(["climb", "run", "--dir", str(mine), "--steps", "2"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[-2].startswith("yours: softmax_and_loss, linear, gelu, layer_norm, embedding, attention_forward,")
    replaced = {name for each in climb_run.written(mine).values() for name in each}
    assert {n for n in vars(reference) if n in replaced} | {"block_backward"} == replaced and len(replaced) == 15
    assert float(shown[-1].split()[-2]) < 1e-5
    runs = read_runs([mine / "runs" / name for name in ("reference-2", "mine")])
    assert [len(run.steps.loss) for run in runs] == [2, 2]
    weight = mine / "02_linear.py"
    weight.write_text(weight.read_text().replace("dy.sum(0)", "-dy.sum(0)"))
    assert main(["climb", "run", "--dir", str(mine), "--steps", "2"]) == 0
    shown = capsys.readouterr().out
    assert "reference-2 is finished" in shown and float(shown.splitlines()[-1].split()[-2]) > 1e-5


@pytest.mark.parametrize("step", [step for step in climb.STEPS if hasattr(climb.table_of(step), "operations")])
def test_a_step_of_the_run_is_the_readers(step: str, shards: Path, tmp_path: Path) -> None:
    """A step that raises ends the run with its own words."""
    mine = tmp_path / "mine"
    climb.start(mine)
    shutil.copytree(shards, mine / "shards")
    stub = mine / f"{step}.py"
    stub.write_text(stub.read_text().replace(climb.UNWRITTEN, 'raise ArithmeticError("the reader\'s")'))
    with pytest.raises(ArithmeticError, match="the reader's"), climb_run.training_by(climb_run.written(mine)[step]):
        config = climb_run.SETTINGS | {
            "data": str(mine / "shards"),
            "out": str(mine / "run"),
            "steps": 1,
            "sample_tokens": 0,
        }
        climb_run.train(climb_run.run_config("demo", "", "", config))
