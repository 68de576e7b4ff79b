"""plot, compare and report: the report's curves and figures from Python."""

import ast
import dataclasses
import math
import shutil
from pathlib import Path

import pytest

import handgrad
from handgrad.api.records import KINDS
from handgrad.cli import main
from handgrad.settings.config import RunConfig

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def runs(shards: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two runs that differ in their learning rate."""
    from tests.conftest import small_run

    folders = [tmp_path_factory.mktemp("compared") / name for name in ("slow", "fast")]
    for folder, rate in zip(folders, (1e-4, 3e-3), strict=True):
        config: RunConfig = dataclasses.replace(small_run(shards, folder), learning_rate=rate, sample_tokens=0)
        handgrad.train(config, quiet=True)
    return folders


def test_compare_gives_a_row_per_run(runs: list[Path]) -> None:
    slow, fast = table = handgrad.compare(*runs)
    assert (slow["run"], fast["run"]) == ("slow", "fast")
    for folder, row in zip(runs, table, strict=True):
        losses = [record["loss"] for record in handgrad.metrics(folder, "validation")]
        assert row["validation_loss"] == losses[-1] and row["best_validation_loss"] == min(losses)
        assert row["steps"] == 12 and row["tokens"] == 12 * 256 and row["tokens_per_second"] > 0
    assert fast["validation_loss"] < slow["validation_loss"]
    assert (slow["learning_rate"], fast["learning_rate"]) == (1e-4, 3e-3) and "channels" not in slow
    lines = repr(table).splitlines()
    assert lines[0].split()[:2] == ["run", "validation_loss"] and lines[2].split()[0] == "fast" and len(lines) == 3
    assert math.isclose(float(lines[1].split()[1]), slow["validation_loss"], rel_tol=1e-5)


@pytest.mark.report
def test_plots_are_the_reports(runs: list[Path], tmp_path: Path) -> None:
    """The same pixels, from a plot of its own and from the page's folder."""
    page = handgrad.report(*runs, out=tmp_path / "page.html")
    for curve in ("loss", "gradient_norm"):
        drawn = handgrad.plot(*runs, curve=curve)
        assert drawn.save(tmp_path / f"{curve}.png").read_bytes() == (tmp_path / f"page_{curve}.png").read_bytes()
        assert drawn._repr_png_().startswith(b"\x89PNG"), "by which a notebook shows it"
        assert drawn.figure.axes[0].get_title(loc="left") == drawn.plot.title
    assert page == tmp_path / "page.html" and "slow" in repr(handgrad.plot(*runs))


def test_a_run_plots_itself(shards: Path, tmp_path: Path) -> None:
    from tests.conftest import small_run

    with handgrad.Training(small_run(shards, tmp_path / "run"), quiet=True) as run:
        run.steps(6)
        assert run.plot("learning_rate")._repr_png_() == handgrad.plot(run.folder, curve="learning_rate")._repr_png_()


def test_a_run_without_a_step_is_left_out(runs: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """A run that failed at once does not hide the others in its folder."""
    for name, folder in zip(("done", "failed"), runs, strict=True):
        shutil.copytree(folder, tmp_path / name)
    metrics = tmp_path / "failed" / "metrics.jsonl"
    metrics.write_text(metrics.read_text().splitlines(keepends=True)[0])
    with pytest.warns(UserWarning, match=r"left out: .*failed has no finished step yet"):
        assert [row["run"] for row in handgrad.compare(tmp_path)] == ["done"]
    with pytest.warns(UserWarning, match=r"left out: .*failed has no finished step yet"):
        assert "of done>" in repr(handgrad.plot(tmp_path))
    assert main(["plot", str(tmp_path)]) == 0
    shown, told = capsys.readouterr()
    assert "* done, training" in shown and told.startswith(f"left out   {tmp_path / 'failed'} has no finished step")
    with pytest.raises(handgrad.HandgradError, match="no finished step"):
        handgrad.compare(tmp_path / "failed")


def test_mistakes_are_one_line(runs: list[Path], tmp_path: Path) -> None:
    with pytest.raises(handgrad.HandgradError, match="loss"):
        handgrad.plot(runs[0], curve="los")
    for call in (handgrad.plot, handgrad.compare, handgrad.report):
        with pytest.raises(handgrad.HandgradError, match="at least one run folder"):
            call()
        with pytest.raises(handgrad.HandgradError, match="nowhere"):
            call(tmp_path / "nowhere")
        with pytest.raises(handgrad.HandgradError, match=r"found \[.*; write \*runs for a list"):
            call(runs)  # type: ignore[arg-type]
    with pytest.raises(handgrad.HandgradError, match=r"a plot writes PNG, found .*loss\.jpg; name a FILE\.png"):
        handgrad.plot(runs[0]).save(tmp_path / "loss.jpg")
    assert [*tmp_path.iterdir()] == []


def test_every_kind_of_record_has_its_name(runs: list[Path]) -> None:
    """The kinds that the package writes are those that `metrics` takes and the chapter lists; a misspelt one is refused."""
    calls = (node for path in (ROOT / "handgrad").rglob("*.py") for node in ast.walk(ast.parse(path.read_text())))
    names = {
        argument.value
        for node in calls
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "record"
        for argument in node.args[:1]
        if isinstance(argument, ast.Constant)
    }
    assert names == set(KINDS)
    table = (ROOT / "docs" / "report.md").read_text().split("## Input")[1]
    assert all(f"`{kind}`" in table for kind in KINDS)
    with pytest.raises(
        handgrad.HandgradError, match=r"kind must be one of run, step, .*; found 'validations' \(did you mean"
    ):
        handgrad.metrics(runs[0], "validations")
