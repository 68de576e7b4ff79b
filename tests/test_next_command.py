"""The command that `handgrad prepare` recommends works, however short the text; so do those of the others."""

import io
import json
import re
import shlex
from pathlib import Path

import pytest

from handgrad.api.actions import evaluate
from handgrad.cli import main
from handgrad.commands.prepare import PlainProgress
from handgrad.data.prepare import Progress
from handgrad.data.shards import open_dataset
from handgrad.data.tokenizer_loading import of_folder
from handgrad.errors import DataError
from tests.conftest import write_text
from tests.data.chats import CHATML, made_tokenizer, write_folder
from tests.interop.models import TOKENIZERS, make_checkpoint

LLAMA = {"sizes": (2, 2, 32, 256), "architecture": "llama", "llama": "kv_heads=1,tied"}
QUICK = ["--steps", "2", "--device", "cpu", "--sample-tokens", "2", "--eval-tokens", "64"]


def recommended(capsys: pytest.CaptureFixture, text: Path, tokenizer: str, out: str) -> list[str]:
    capsys.readouterr()
    assert main(["prepare", text.name, "--tokenizer", tokenizer, "--out", out, "--workers", "1"]) == 0
    words = shlex.split(capsys.readouterr().out.splitlines()[-1])
    assert words[:3] == ["next", "handgrad", "train"]
    return words[2:]


@pytest.mark.nightly(but=["300000-bpe:300", "2000-bytes", "2000-gpt2", "3-bytes"])
@pytest.mark.parametrize("tokenizer", ["bytes", "bpe:300", "gpt2"])
@pytest.mark.parametrize("size_bytes", [3, 2000, 300_000])
def test_the_recommended_command_works(
    size_bytes: int, tokenizer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    text = write_text(tmp_path / "text.txt", 60_000)
    text.write_bytes(text.read_bytes()[:size_bytes])
    words = recommended(capsys, text, tokenizer, "my shards")
    assert main([*words, *QUICK]) == 0, capsys.readouterr().err
    # The folder of the first run is taken by now.
    assert recommended(capsys, text, tokenizer, "my shards")[-1] == "runs/b"


def test_the_time_left_is_told_once_it_is_known(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    """Not from the first hundredth of the work, which the start of the workers makes slow."""
    seconds = iter([0.0, 20.0, 40.0])
    monkeypatch.setattr("handgrad.commands.prepare.time.monotonic", lambda: next(seconds))
    lines = PlainProgress()
    lines.show(Progress("tokenising", 20, 1000, "documents", 83_300))
    lines.show(Progress("tokenising", 500, 1000, "documents", 2_500_000))
    slow, known = capsys.readouterr().out.splitlines()
    assert slow == "tokenising: 20 documents, 83.3k tokens, 2%"
    assert known == "tokenising: 500 documents, 2.5M tokens, 50%, 40 s left"


@pytest.mark.parametrize("template", [True, False])
def test_every_command_names_the_next_one(
    template: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """From somebody's model to a talk with it, by what each command recommends."""
    monkeypatch.chdir(tmp_path)
    folder = write_folder(made_tokenizer(CHATML if template else None), tmp_path / "somebody")
    weights, _ = make_checkpoint(tmp_path / "random", of_folder(folder), **LLAMA)
    assert main(["export", str(weights), "--to", "hf", "their model"]) == 0
    talk = [{"role": "user", "content": "Hi!"}, {"role": "assistant", "content": "Hello."}]
    Path("talks.jsonl").write_text("".join(json.dumps({"messages": talk}) + "\n" for _ in range(100)))
    capsys.readouterr()
    assert main(["import", "their model", "--out", "my model"]) == 0
    words = shlex.split(capsys.readouterr().out.splitlines()[-1])
    assert words[1:4] == ["handgrad", "chat" if template else "sample", "my model"]
    prepare = words[words.index("prepare") :]
    prepare[prepare.index("FILE")] = "talks.jsonl"
    assert main([*prepare, "--chat", "--workers", "1"]) == 0
    words = shlex.split(capsys.readouterr().out.splitlines()[-1])
    assert words[1:5] == ["handgrad", "train", "--init-from", "my model"]
    assert main([*words[2:], *QUICK]) == 0
    words = shlex.split(capsys.readouterr().out.splitlines()[-1])
    assert words[1:4] == ["handgrad", "chat", "runs/a"]
    monkeypatch.setattr("sys.stdin", io.StringIO("Hi!\n"))
    assert main([*words[2:4], "--max-tokens", "3", "--device", "cpu"]) == 0
    assert capsys.readouterr().out.endswith("\n")


@pytest.mark.parametrize("kind", ["bytes", "bpe", "gpt2"])
def test_a_run_names_its_tokenizer(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Its folder, that of a checkpoint and RUN/best; the next command starts from its weights."""
    run, _ = make_checkpoint(tmp_path / "run", kind)
    text = write_text(tmp_path / "text.txt")
    for number, spec in enumerate((str(run), f"{run}/checkpoints/step_00000040", f"{run}/best")):
        out = str(tmp_path / f"{number}")
        assert main(["prepare", str(text), "--tokenizer", spec, "--out", out, "--workers", "1"]) == 0
        words = shlex.split(capsys.readouterr().out.splitlines()[-1])
        assert words[1:5] == ["handgrad", "train", "--init-from", spec]
        assert open_dataset(out).tokenizer.sha256 == TOKENIZERS[kind]().sha256


TALK = [{"role": "user", "content": "Hi!"}, {"role": "assistant", "content": "Hello."}]
RAW = {"talks": {"messages": TALK}, "both": {"messages": TALK, "text": "Hi!"}, "notes": {"text": "a few words " * 20}}
OPENING = ["train --init-from MODEL", "plan --init-from MODEL", "profile --init-from MODEL", "evaluate MODEL", "python"]
OPENING += ["train FILE --init-from MODEL", "train tiny --out MODEL"]


def suggested(line: str) -> list[list[str]]:
    """The commands in a message that are complete."""
    return [shlex.split(words)[1:] for words in re.findall("`(handgrad [^`]*)`", line) if not words.endswith("--data")]


@pytest.mark.parametrize("command", OPENING)
@pytest.mark.parametrize(("name", "talks"), [("talks", True), ("notes", True), ("both", True), ("both", False)])
def test_a_raw_file_in_the_place_of_shards_is_prepared_for_the_model(
    command: str, name: str, talks: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """With its tokenizer, and with --chat what the model learned from where rows have conversations beside a text."""
    monkeypatch.chdir(tmp_path)
    model, _ = make_checkpoint(Path("my model"), made_tokenizer(None), chat=talks, **LLAMA)
    Path(f"{name}.jsonl").write_text(f"{json.dumps(RAW[name])}\n" * 60)
    words = [{"MODEL": str(model), "FILE": f"{name}.jsonl"}.get(word, word) for word in command.split()]
    if command == "python":
        with pytest.raises(DataError) as raised:
            evaluate(model, f"{name}.jsonl", device="cpu")
        line = str(raised.value)
    else:
        assert main([*words, *(["--data", f"{name}.jsonl"] if "FILE" not in command else [])]) in (64, 65)
        line = capsys.readouterr().err
    (prepare,) = suggested(line)
    asks = name == "talks" or (name == "both" and talks and ("evaluate" in command or command == "python"))
    assert prepare[:1] == ["prepare"] and ("--chat" in prepare) == asks
    assert main([*prepare, "--workers", "1"]) == 0
    assert evaluate(model, f"shards/{name}", context=4, device="cpu").tokens > 0


def test_weights_whose_folder_is_no_tokenizer_are_imported_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    weights, _ = make_checkpoint(Path("weights"), "gpt2")
    assert main(["export", str(weights), "--to", "llmc", "llmc"]) == 0
    (model,) = Path("llmc").glob("model*.bin")
    text = write_text(tmp_path / "text.txt")
    capsys.readouterr()
    assert main(["train", "--init-from", str(model), "--data", str(text)]) == 65
    commands = suggested(capsys.readouterr().err)
    assert [words[0] for words in commands] == ["import", "prepare"]
    for words in commands:
        assert main([*words, *(["--workers", "1"] if words[0] == "prepare" else [])]) == 0
    assert open_dataset("shards/text").tokenizer.kind == "gpt2"
