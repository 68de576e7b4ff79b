"""The data of a run tell every command that asks if it was trained on conversations; its packing does not."""

import json
from pathlib import Path
from typing import Any

import pytest

from handgrad.cli import main
from handgrad.commands import serve
from handgrad.data.prepare import PrepareOptions, prepare
from handgrad.evaluation.load import trained_on_chats
from handgrad.run.open import train
from handgrad.settings.config import RunConfig
from handgrad.storage import checkpoint, manifest
from tests.conftest import small_run, write_text

ONE_STEP = {"steps": 1, "warmup_steps": 0, "eval_every": 0, "sample_tokens": 0}
KINDS = [("questions", "stream", True), ("questions", "auto", True), ("text", "whole", False), ("text", "auto", False)]


@pytest.fixture
def run(source: str, packing: str, tmp_path: Path) -> Path:
    """A run on the built-in conversations, or on text."""
    named = source if source == "questions" else str(write_text(tmp_path / "text.txt"))
    options = PrepareOptions(
        named, tmp_path / "shards", tokenizer="bytes", documents=200, validation_fraction=0.2, workers=1
    )
    prepare(options)
    train(RunConfig(**{**vars(small_run(tmp_path / "shards", tmp_path / "run")), **ONE_STEP, "packing": packing}))
    return tmp_path / "run"


def asked(run: Path, folder: Path, capsys: pytest.CaptureFixture) -> dict[str, bool]:
    """The answers of the commands that behave otherwise with a model that was taught to talk."""
    found = dict[str, bool]()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.stdin", None)
        capsys.readouterr()
        assert main(["chat", str(run), "--device", "cpu"]) == 0
        found["chat"] = "seldom answers" not in capsys.readouterr().err

        def page(about: dict[str, Any], *_: object) -> None:
            found["serve"] = about["talks"]
            raise KeyboardInterrupt

        patch.setattr(serve, "Served", page)
        assert main(["serve", str(run), "--device", "cpu"]) == 130
    assert main(["export", str(run), "--to", "hf", str(folder / "hf")]) == 0
    found["template"] = (folder / "hf" / "chat_template.jinja").exists()
    found["card"] = "apply_chat_template" in (folder / "hf" / "README.md").read_text()
    assert main(["import", str(run), "--out", str(folder / "imported")]) == 0
    found["next"] = "handgrad chat " in capsys.readouterr().out
    imported = checkpoint.find(str(folder / "imported"))
    found["imported"] = trained_on_chats(imported)
    return found


@pytest.mark.parametrize(("source", "packing", "talks"), KINDS)
def test_the_data_say_it(run: Path, talks: bool, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    found = asked(run, tmp_path, capsys)
    assert found == dict.fromkeys(found, talks)


@pytest.mark.parametrize(("source", "packing", "talks"), KINDS[1:2] + KINDS[3:])
def test_older_checkpoints_go_by_the_packing(run: Path, talks: bool, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """They do not say it, and keep their answers."""
    (path,) = run.glob(f"checkpoints/*/{manifest.MANIFEST}")
    content = json.loads(path.read_text())
    del content["chat"], content["sha256"]
    path.write_text(json.dumps({"sha256": manifest.content_sha256(content), **content}))
    found = asked(run, tmp_path, capsys)
    assert found == dict.fromkeys(found, talks)
