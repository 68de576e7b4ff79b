"""`sample` and `evaluate` take weights from wherever they are, and find in them what the run's own checkpoint holds."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from handgrad.cli import main
from handgrad.data.tokenizer_loading import load_tokenizer
from handgrad.errors import DataError
from handgrad.interop.sources import open_weights
from handgrad.settings.config import ModelShape
from tests.data.chats import TEMPLATES, made_tokenizer, write_folder
from tests.interop.models import make_checkpoint
from tests.test_commands import refused


def test_the_same_from_a_run_and_its_exports(
    exported: Callable[[str], tuple[Path, Path, ModelShape]], shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    run, folder, _ = exported("bytes")
    assert main(["export", str(run), "--to", "llmc", str(tmp_path / "c")]) == 0
    (tmp_path / "own.jsonl").write_text('{"context": "One and one", "choices": ["is two", "is three"], "answer": 0}\n')
    tasks = ["--tasks", f"own={tmp_path / 'own.jsonl'}", "--data", str(shards), "--device", "cpu"]
    found = []
    for source in (run, folder, tmp_path / "c" / "model.bin"):
        capsys.readouterr()
        assert main(["sample", str(source), "--max-tokens", "8", "--device", "cpu"]) == 0
        text = capsys.readouterr().out
        assert main(["evaluate", str(source), *tasks]) == 0
        first, *lines = capsys.readouterr().out.splitlines()
        assert first == f"checkpoint        {source}{' (step 40)' if source == run else ''}"
        found.append((text, lines))
    assert "own" in found[0][1][-1] or "own" in found[0][1][-3]
    assert found[0] == found[1] == found[2]


@pytest.mark.nightly(but=["bytes", "bpe"])
@pytest.mark.parametrize("kind", ["bytes", "bpe", "gpt2"])
def test_text_is_prepared_with_the_tokenizer_of_a_run_or_its_export(
    kind: str, exported: Callable[[str], tuple[Path, Path, ModelShape]]
) -> None:
    """By the name of either folder: the tokenizer that an import of the weights has, so that they train on the text."""
    run, folder, _ = exported(kind)
    own = open_weights(str(run)).tokenizer
    for source in (run, folder):
        found = load_tokenizer(str(source))
        assert (found.kind, found.sha256, found.vocab_size) == (kind, own.sha256, own.vocab_size)
    assert open_weights(str(folder)).tokenizer.sha256 == own.sha256


def test_that_of_an_exported_llama_as_well(tmp_path: Path) -> None:
    run, _ = make_checkpoint(tmp_path / "run", "bytes", sizes=(1, 2, 32, 64), architecture="llama", llama="kv_heads=1")
    assert main(["export", str(run), "--to", "hf", str(tmp_path / "hf")]) == 0
    assert load_tokenizer(str(tmp_path / "hf")).kind == "bytes"


@pytest.mark.parametrize("architecture", ["gpt2", "modern", "llama"])
def test_every_network_keeps_the_tokenizer_of_another_model(
    architecture: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """A run on data that `prepare --tokenizer FOLDER` made, with its special tokens, to transformers and back."""
    words = made_tokenizer(TEMPLATES["chatml"])
    run, _ = make_checkpoint(tmp_path / "run", words, sizes=(1, 2, 32, 64), architecture=architecture)
    assert main(["export", str(run), "--to", "hf", str(tmp_path / "hf")]) == 0
    again = open_weights(str(tmp_path / "hf")).tokenizer
    assert (again.kind, again.sha256) == ("model", words.sha256) and words.others.items() <= again.others.items()
    if architecture == "gpt2":  # llm.c's files have no place for it
        line = refused(capsys, 64, "export", str(run), "--to", "llmc", str(tmp_path / "c"))
        assert line.endswith("found another model's; `export --to hf` writes it\n") and not (tmp_path / "c").exists()


def test_a_loss_needs_data(exported: Callable[[str], tuple[Path, Path, ModelShape]], capsys: pytest.CaptureFixture) -> None:
    assert "give --data DIR" in refused(capsys, 64, "evaluate", str(exported("bytes")[1]), "--device", "cpu")


def test_a_run_may_be_named_like_a_file_of_llmc(
    exported: Callable[[str], tuple[Path, Path, ModelShape]], tmp_path: Path
) -> None:
    (tmp_path / "run.bin").symlink_to(exported("bytes")[0])
    assert main(["sample", str(tmp_path / "run.bin"), "--max-tokens", "2", "--device", "cpu"]) == 0


def test_a_folder_of_models_names_one(
    exported: Callable[[str], tuple[Path, Path, ModelShape]], tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """As the output folder of transformers' Trainer."""
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "checkpoint-500").symlink_to(exported("bytes")[1])
    capsys.readouterr()
    line = refused(capsys, 65, "import", str(tmp_path / "out"), "--out", str(tmp_path / "run"))
    assert line.rstrip().endswith(f"found a folder of models; name one of them, as {tmp_path / 'out' / 'checkpoint-500'}")


def test_a_folder_of_llmc_names_its_file(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """As `export --to llmc` writes it."""
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "model.bin").touch()
    line = refused(capsys, 65, "import", str(tmp_path / "out"), "--out", str(tmp_path / "run"))
    assert line.rstrip().endswith("found a folder of llm.c; name its model.bin")


def test_the_file_of_a_tokenizer_is_answered_with_its_folder(tmp_path: Path) -> None:
    folder = write_folder(made_tokenizer(None), tmp_path / "model")
    with pytest.raises(DataError, match=rf"found its file .*/tokenizer.json; give --tokenizer {folder}$"):
        load_tokenizer(str(folder / "tokenizer.json"))


def test_a_tokenizer_of_sentencepiece_is_named(tmp_path: Path) -> None:
    folder = write_folder(made_tokenizer(None), tmp_path / "model")
    tables = json.loads((folder / "tokenizer.json").read_text())
    steps = [{"type": "ByteFallback"}, {"type": "Fuse"}]
    (folder / "tokenizer.json").write_text(json.dumps(tables | {"decoder": {"type": "Sequence", "decoders": steps}}))
    with pytest.raises(DataError, match=r"found ByteFallback, Fuse; .* no SentencePiece as of Llama 2, TinyLlama"):
        load_tokenizer(str(folder))
