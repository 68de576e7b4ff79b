"""Folders that are damaged or foreign, names that are taken, disks that refuse: one line, and nothing half written."""

import json
import math
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from handgrad.cli import main
from handgrad.data.model_tokenizer import read_vocabulary
from handgrad.errors import DataError, StorageError
from handgrad.interop import export, huggingface, sources
from handgrad.storage import checkpoint
from tests.test_commands import refused


def change_config(folder: Path, **values: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def change_tensors(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(folder / huggingface.WEIGHTS_FILE)
    change(tensors)
    save_file({name: tensor.clone().contiguous() for name, tensor in tensors.items()}, folder / huggingface.WEIGHTS_FILE)


def cut(path: Path, size: int) -> None:
    path.write_bytes(path.read_bytes()[:size])


FC, WTE = "transformer.h.1.mlp.c_fc.weight", "transformer.wte.weight"
WRONG: dict[str, tuple[Callable[[Path], object], str]] = {
    "cut weights": (lambda f: cut(f / "model.safetensors", 9000), "expected a whole safetensors file at"),
    "empty weights": (lambda f: cut(f / "model.safetensors", 0), "model.safetensors"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "found neither"),
    "no config": (lambda f: (f / "config.json").unlink(), "found a folder without them"),
    "cut config": (lambda f: cut(f / "config.json", 40), "expected JSON in"),
    "no tokenizer": (lambda f: [(f / n).unlink() for n in ("tokenizer.json", "vocab.json")], "--tokenizer gpt2|bytes|FILE"),
    "missing tensor": (lambda f: change_tensors(f, lambda t: t.pop(FC)), f"expected a tensor {FC} of shape (32, 128) in"),
    "wrong shape": (
        lambda f: change_tensors(f, lambda t: t.update({FC: t[FC].t()})),
        f"expected {FC} of shape (32, 128) in",
    ),
    "padded vocabulary": (lambda f: change_tensors(f, lambda t: t.update({WTE: torch.zeros(384, 32)})), "(257, 32)"),
    "foreign tensor": (lambda f: change_tensors(f, lambda t: t.update({"score.weight": t[FC]})), "'score.weight'"),
    "integers": (lambda f: change_tensors(f, lambda t: t.update({FC: t[FC].to(torch.int8)})), "found I8"),
    "not finite": (lambda f: change_tensors(f, lambda t: t[FC].fill_(math.nan)), "found 4096 that are not"),
    "untied head": (
        lambda f: change_tensors(f, lambda t: t.update({"lm_head.weight": t[WTE] + 1})),
        "expected lm_head.weight equal to wte.weight",
    ),
    "other architecture": (lambda f: change_config(f, model_type="mixtral"), 'expected model_type "gpt2", '),
    "other activation": (lambda f: change_config(f, activation_function="relu"), "found 'relu'"),
    "other epsilon": (lambda f: change_config(f, layer_norm_epsilon=1e-6), "expected layer_norm_epsilon 1e-05"),
    "other scaling": (lambda f: change_config(f, scale_attn_by_inverse_layer_idx=True), "scale_attn_by_inverse_layer_idx"),
    "other width": (lambda f: change_config(f, n_inner=100), "expected n_inner null or 128"),
    "untied by config": (lambda f: change_config(f, tie_word_embeddings=False), "tie_word_embeddings"),
    "no layers": (lambda f: change_config(f, n_layer=None), "expected n_layer of 1 or more"),
    "more layers": (lambda f: change_config(f, n_layer=3), "transformer.h.2."),
    "fewer layers": (lambda f: change_config(f, n_layer=1), "found also 'transformer.h.1."),
    "heads that do not divide": (lambda f: change_config(f, n_head=3), "channels must be a multiple of num_heads"),
    "other vocabulary": (lambda f: change_config(f, vocab_size=300), "expected a tokenizer of 300 tokens"),
}


@pytest.mark.fault(26)
@pytest.mark.parametrize("damage", WRONG)
def test_wrong_folders(damage: str, exported: Callable, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    folder = shutil.copytree(exported("bytes")[1], tmp_path / "hf")
    change, told = WRONG[damage]
    change(folder)
    capsys.readouterr()
    line = refused(capsys, 65, "import", str(folder), "--out", str(tmp_path / "run"))
    assert told in line and str(folder) in line
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf"], "nothing is left behind"


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lambda f: (f / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../b"}}'), "weight_map"),
        (lambda f: next(f.glob("model-00002*")).unlink(), "model-00002"),
        (lambda f: cut(next(f.glob("model-00002*")), 100), "model-00002"),
    ],
    ids=["index", "missing shard", "cut shard"],
)
def test_wrong_shards(
    damage: Callable, told: str, tmp_path: Path, capsys: pytest.CaptureFixture, exported: Callable
) -> None:
    folder = shutil.copytree(exported("bytes")[1], tmp_path / "hf")
    (folder / "model.safetensors").unlink()
    model = transformers.GPT2LMHeadModel.from_pretrained(exported("bytes")[1])
    model.save_pretrained(folder, max_shard_size="30KB")
    damage(folder)
    capsys.readouterr()
    assert told in refused(capsys, 65, "import", str(folder), "--out", str(tmp_path / "run"))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_pipe_among_the_files(name: str, exported: Callable, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Nobody writes into it: reading would wait for ever."""
    folder = shutil.copytree(exported("bytes")[1], tmp_path / "hf")
    (folder / name).unlink()
    os.mkfifo(folder / name)
    assert name in refused(capsys, 65, "import", str(folder), "--out", str(tmp_path / "run"))


def test_a_pipe_among_the_shards(exported: Callable, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    folder = shutil.copytree(exported("bytes")[1], tmp_path / "hf")
    (folder / "model.safetensors").unlink()
    os.mkfifo(folder / "model-1.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {WTE: "model-1.safetensors"}}))
    line = refused(capsys, 65, "import", str(folder), "--out", str(tmp_path / "run"))
    assert "expected a plain file at" in line and "model-1.safetensors" in line


@pytest.mark.parametrize(
    ("name", "damage", "told"),
    [
        ("vocab.json", lambda content: content[:500], "expected JSON in"),
        ("vocab.json", lambda content: b"[" * 100_000, "nested more than 64 deep"),
        ("vocab.json", lambda content: content.replace(b": 33,", b": 4294967294,"), "found 34 instead of 33"),
        ("vocab.json", lambda content: content.replace(b'"!": 0', b'"!": 1000000000'), "found 1 instead of 0"),
        ("vocab.json", lambda content: content.replace(b": 33,", b": true,"), "each with its id"),
        ("vocab.json", lambda content: content.replace(b": 33,", b": " + b"3" * 5000 + b","), "more than 40 digits"),
        ("vocab.json", lambda content: content.replace(b": 33,", b": -33,"), "expected tokens in"),
        ("vocab.json", lambda content: content.replace(b"<|endoftext|>", b"end"), "expected <|endoftext|> in"),
        ("merges.txt", lambda content: content + b"a b c\n", "merges.txt"),
        ("merges.txt", lambda content: content + b"no where\n", "out of vocabulary"),
        ("merges.txt", lambda content: b"\xff\n", "merges.txt"),
    ],
)
def test_wrong_vocabularies(name: str, damage: Callable, told: str, exported: Callable, tmp_path: Path) -> None:
    """Of the two files that GPT-2 came with."""
    for each in ("vocab.json", "merges.txt"):
        content = (exported("bpe")[1] / each).read_bytes()
        (tmp_path / each).write_bytes(damage(content) if each == name else content)
    with pytest.raises(DataError, match=re.escape(told)):
        read_vocabulary(tmp_path)


def test_taken_targets_and_names(exported: Callable, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    run, folder, _ = exported("bytes")
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").write_text("mine")
    capsys.readouterr()
    assert "taken" in refused(capsys, 64, "export", str(run), "--to", "hf", str(tmp_path / "taken"))
    assert "taken" in refused(capsys, 64, "import", str(folder), "--out", str(tmp_path / "taken"))
    assert "taken" in refused(capsys, 64, "export", str(run), "--out", str(tmp_path / "taken"))
    line = refused(capsys, 64, "export", str(run), "--to", "onnx", str(tmp_path / "x"))
    assert "--to must be one of hf, peft, llmc, gguf; found 'onnx'" in line
    assert "holds no checkpoint" in refused(capsys, 65, "export", str(folder), "--to", "hf", str(tmp_path / "x"))
    line = refused(capsys, 65, "import", "somebody/some-gpt2", "--out", str(tmp_path / "x"))
    assert "expected a folder somebody/some-gpt2 or a model of that name on the Hub" in line
    assert "found nothing" in refused(capsys, 65, "import", "no/such/folder", "--out", str(tmp_path / "x"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["taken"]
    assert [path.name for path in (tmp_path / "taken").iterdir()] == ["file"]
    (tmp_path / "empty").mkdir()
    assert main(["import", str(folder), "--out", str(tmp_path / "empty")]) == 0, "an empty folder is as good as none"


def test_the_hub(exported: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name is downloaded by huggingface_hub."""
    import huggingface_hub

    _, folder, _ = exported("bytes")
    asked = []
    monkeypatch.setattr(
        huggingface_hub, "snapshot_download", lambda name, **rest: asked.append((name, rest)) or str(folder)
    )
    assert main(["import", "somebody/some-gpt2", "--out", str(tmp_path / "run")]) == 0
    assert [name for name, _ in asked] == ["somebody/some-gpt2"] * 2
    assert ["model*.safetensors" in rest["allow_patterns"] for _, rest in asked] == [False, True], "the weights last"


@pytest.mark.parametrize(
    ("changed", "more", "code", "told"),
    [
        ({"model_type": "gemma2"}, [], 65, "gemma2"),
        ({"vocab_size": 300}, [], 65, "expected a tokenizer of 300 tokens"),
        ({}, ["--tokenizer", "none.json"], 64, "none.json"),
    ],
    ids=["network", "vocabulary", "tokenizer"],
)
def test_weights_are_downloaded_for_a_known_model_alone(
    changed: dict,
    more: list[str],
    code: int,
    told: str,
    exported: Callable,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    _, folder, _ = exported("bytes")
    cache = shutil.copytree(folder, tmp_path / "cache", ignore=shutil.ignore_patterns("*.safetensors"))
    change_config(cache, **changed)

    def download(name: str, allow_patterns: list[str]) -> str:
        assert "model*.safetensors" not in allow_patterns, "the weights come last"
        return str(cache)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    capsys.readouterr()
    assert told in refused(capsys, code, "import", "owner/name", "--out", str(tmp_path / "run"), *more)
    if not more:
        assert told in refused(capsys, code, "sample", "owner/name")


def test_an_export_that_reads_back_otherwise(exported: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A writer that is wrong, or a disk that lies, leaves no folder."""
    run, _, _ = exported("bytes")
    original = export.write_weights

    def swapped(path: Path, *rest: object) -> None:
        original(path, *rest)
        names = ["transformer.h.0.ln_1.weight", "transformer.h.1.ln_1.weight"]
        change_tensors(path.parent, lambda t: t.update(dict(zip(names, (t[names[1]], t[names[0]]), strict=True))))

    monkeypatch.setattr(export, "write_weights", swapped)
    with pytest.raises(StorageError, match="gave other numbers"):
        export.export_model(checkpoint.find(str(run)), tmp_path / "deep" / "hf")
    monkeypatch.setattr(export, "write_weights", lambda path, *rest: path.write_bytes(b"no"))
    with pytest.raises(StorageError, match="do not read back"):
        export.export_model(checkpoint.find(str(run)), tmp_path / "deep" / "hf")
    assert not list((tmp_path / "deep").iterdir())


def test_a_full_disk_leaves_nothing(exported: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, folder, _ = exported("bytes")

    def full(path: Path, chunks: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "write_file", full)
    monkeypatch.setattr(export, "write_file", full)
    with pytest.raises(StorageError, match="free some space"):
        export.export_model(checkpoint.find(str(run)), tmp_path / "hf")
    with pytest.raises(StorageError, match="free some space"):
        sources.import_model(str(folder), tmp_path / "run")
    assert list(tmp_path.iterdir()) == []
