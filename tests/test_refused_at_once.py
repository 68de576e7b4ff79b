"""A command that cannot write its result, or cannot listen, refuses before it reads a model, downloads or measures."""

import socket
from pathlib import Path

import pytest

from handgrad.run.open import train
from handgrad.settings.config import RunConfig
from tests.test_commands import refused

DEMO = "handgrad.commands.demo.prepare_with_progress"
SAMPLE, EVALUATE = "handgrad.commands.sample.open_weights", "handgrad.commands.evaluate.open_weights"
EXPORT, IMPORT = "handgrad.interop.export.load_model", "handgrad.interop.sources.folder_of"
PROFILE, BENCH = "handgrad.commands.profile.profile_run", "handgrad.commands.bench.module"
VERIFY = "handgrad.commands.verify.open_record"
TASKS = ["--tasks", "arc={root}/arc.jsonl"]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A file, a folder with a file in it, an empty folder."""
    (tmp_path / "file").write_text("text")
    for name in ("full", "empty"):
        (tmp_path / name).mkdir()
    (tmp_path / "full" / "notes.txt").write_text("text")
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a"}\n')
    return tmp_path


@pytest.mark.parametrize(
    ("work", "code", "line", "told"),
    [
        (DEMO, 64, ["demo", "--out", "{root}/file"], "{root}/file is a file; give a folder for the run"),
        (DEMO, 64, ["demo", "--out", "{root}/file/below"], "{root}/file/below cannot be made: {root}/file is a file"),
        (DEMO, 64, ["demo", "--out", "{root}/full"], "{root}/full has files in it but is no run folder"),
        (SAMPLE, 64, ["sample", "m", "--in", "{root}/prompts.jsonl", "--out", "{root}/file"], "already exists"),
        (SAMPLE, 74, ["sample", "m", "--in", "{root}/prompts.jsonl", "--out", "{root}/empty"], "expected a file to write"),
        (SAMPLE, 74, ["sample", "m", "--in", "{root}/prompts.jsonl", "--out", "{root}/no/x"], "in an existing folder"),
        (EVALUATE, 64, ["evaluate", "m", *TASKS, "--out", "{root}/file"], "already exists; give --out another name"),
        (EVALUATE, 74, ["evaluate", "m", *TASKS, "--out", "{root}/no/x"], "in an existing folder; give --out another name"),
        (EVALUATE, 64, ["evaluate", "m", *TASKS, "--precision", "fp8"], "tasks are scored in 16 bits"),
        (EVALUATE, 64, ["evaluate", "m", *TASKS], "{root}/arc.jsonl"),
        (IMPORT, 64, ["import", "owner/name", "--out", "{root}/file/below"], "cannot be made: {root}/file is a file"),
        (PROFILE, 64, ["profile", "tiny", "--device", "cpu", "--trace", "{root}/empty"], "empty is a folder; name a file"),
        (BENCH, 64, ["bench", "step", "--device", "cpu", "--out", "{root}/full"], "--out {root}/full is a folder"),
        (PROFILE, 64, ["profile", "tiny", "--device", "cpu", "--trace", "{root}/no/trace"], "there is no folder {root}/no"),
        (VERIFY, 64, ["verify", "{root}/run", "--scratch", "{root}/full"], "{root}/full already exists"),
    ],
)
def test_a_place_that_takes_no_result(
    work: str,
    code: int,
    line: list[str],
    told: str,
    root: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    monkeypatch.setattr(work, begun)
    found = refused(capsys, code, *(word.format(root=root) for word in line))
    assert told.format(root=root) in found, found
    assert sorted(path.name for path in root.rglob("*")) == ["empty", "file", "full", "notes.txt", "prompts.jsonl"]


@pytest.mark.parametrize(
    ("line", "told"),
    [
        (["--to", "hf", "{root}/file/below"], "{root}/file/below cannot be made: {root}/file is a file"),
        (["--to", "gguf", "{root}/empty"], "--to gguf writes one file, found the folder {root}/empty"),
    ],
)
def test_an_export_that_cannot_be_written(
    line: list[str],
    told: str,
    config: RunConfig,
    root: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    if "gguf" in line:
        pytest.importorskip("gguf")
    train(config)
    monkeypatch.setattr(EXPORT, begun)
    monkeypatch.setattr("handgrad.interop.gguf_file.load_to_check", begun)
    capsys.readouterr()
    found = refused(capsys, 64, "export", config.out, *(word.format(root=root) for word in line))
    assert told.format(root=root) in found, found
    assert not (root / "new").exists()


def test_windows_that_skip_tokens(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    train(config)
    monkeypatch.setattr("handgrad.commands.evaluate.load_model", begun)
    capsys.readouterr()
    assert "eval_stride must be at most context" in refused(capsys, 64, "evaluate", config.out, "--eval-stride", "99")


def test_a_port_that_is_taken(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setattr("handgrad.commands.serve.open_talking_model", begun)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert f"cannot listen on 127.0.0.1, port {port}" in refused(capsys, 64, "serve", "model", "--port", port)
    assert "name another --host" in refused(capsys, 64, "serve", "model", "--host", "no such host")


def begun(*_: object, **__: object) -> None:
    raise AssertionError("the work began")
