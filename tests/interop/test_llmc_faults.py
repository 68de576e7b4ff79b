"""Files of llm.c that are cut, changed, foreign or of other sizes: one line, and nothing half written."""

import struct
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings, strategies as st

from handgrad.cli import main
from handgrad.data.tokenizer_loading import load_tokenizer
from handgrad.errors import DataError, StorageError
from handgrad.interop import export
from handgrad.interop.llmc import read_model, read_tokens, tokenizer_bytes, write_model
from handgrad.memory.rows import ParameterRow
from handgrad.models import parameter_table
from handgrad.settings.config import ModelShape
from handgrad.storage import checkpoint
from tests.interop.models import make_checkpoint, weights
from tests.test_commands import refused

TINY = ModelShape(vocab_size=5, sequence_length=3, num_layers=2, num_heads=1, channels=2)
NAN = struct.pack("<f", float("nan"))
FIRST_PADDING = 1024 + 4 * 257 * 32  # of the bytes model's embedding


def tiny_files(folder: Path) -> tuple[bytes, bytes]:
    """Content of a model and a tokenizer file of a few kilobytes."""

    def value(row: ParameterRow) -> torch.Tensor:
        return torch.arange(row.elements).view(row.shape)[: row.stored_rows].float()

    write_model(folder / "model.bin", TINY, value, torch.float32)
    return (folder / "model.bin").read_bytes(), tokenizer_bytes(load_tokenizer("bytes"))


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """An exported folder of the bytes model."""
    run, _ = make_checkpoint(tmp_path / "run", "bytes")
    assert main(["export", str(run), "--to", "llmc", str(tmp_path / "c")]) == 0
    return tmp_path / "c"


def words(content: bytes, **changed: int) -> bytes:
    """A header with words changed: w3=5 is the fourth."""
    found = bytearray(content)
    for name, value in changed.items():
        place = 4 * int(name[1:])
        found[place : place + 4] = struct.pack("<i", value)
    return bytes(found)


MODELS = {
    "empty": (lambda c: b"", "found 0; the file was cut"),
    "a cut header": (lambda c: c[:1023], "found 1023"),
    "cut": (lambda c: c[:-2], "expected 164352 bytes for 2 layers of 32 channels and 384 rows of vocabulary"),
    "longer": (lambda c: c + b"\0\0", "make it again"),
    "tokens": (lambda c: words(c, w0=20240520), "found 20240520, GPT-2 tokens"),
    "Llama": (lambda c: words(c, w0=20240803), "found 20240803, a Llama 3 model"),
    "foreign": (lambda c: b"PK\3\4" + c[4:], "which is no llm.c file's"),
    "an old version": (lambda c: words(c, w1=2), "expected version 3 or 5 of a GPT-2 model"),
    "half the width": (lambda c: words(c, w1=5), "expected 82688 bytes"),
    "no layers": (lambda c: words(c, w4=0), "num_layers must be at least 1, found 0"),
    "negative": (lambda c: words(c, w6=-32), "channels must be at least 1, found -32"),
    "too many layers": (lambda c: words(c, w4=(1 << 31) - 1), "num_layers must be at most 1000"),
    "sizes beyond memory": (lambda c: words(c, w4=999, w6=65536), "expected 205955802596352 bytes"),
    "heads that do not divide": (lambda c: words(c, w5=3), "channels must be a multiple of num_heads"),
    "no vocabulary": (lambda c: words(c, w3=0), "found 0 and 384"),
    "fewer rows than tokens": (lambda c: words(c, w7=256), "found 257 and 256"),
    "a wide vocabulary": (lambda c: words(c, w3=1 << 20, w7=1 << 20), "expected a vocabulary of 1 to 65536"),
    "more tokens than its tokenizer": (
        lambda c: words(c, w3=258),
        "found 258; name the model's tokenizer with --tokenizer",
    ),
    "NaN": (lambda c: c[:-4] + NAN, "expected finite numbers in lnf_bias"),
    "padding in use": (
        lambda c: c[:FIRST_PADDING] + struct.pack("<f", 1.0) + c[FIRST_PADDING + 4 :],
        "zeros in the padded rows",
    ),
}


@pytest.mark.parametrize("damage", MODELS)
def test_wrong_models(damage: str, files: Path, capsys: pytest.CaptureFixture) -> None:
    change, told = MODELS[damage]
    path = files / "model.bin"
    path.write_bytes(change(path.read_bytes()))
    capsys.readouterr()
    line = refused(capsys, 65, "import", str(path), "--out", str(files / "run"))
    assert told in line and str(path) in line, line
    assert not [p for p in files.iterdir() if p.name.startswith("run")], "nothing is left behind"


def test_wrong_tokenizers(files: Path, capsys: pytest.CaptureFixture) -> None:
    """One that lies beside the model holds its tokens, or it is another model's."""
    path = files / "gpt2_tokenizer.bin"
    whole = path.read_bytes()
    arguments = ["import", str(files / "model.bin"), "--out", str(files / "run")]
    for content, told in (
        (whole[:-1], "or none at 256"),
        (whole + b"x", "found 1551"),
        (whole[:1024] + b"\0" + whole[1025:], "or none at 0"),
        (whole[:1025] + b"!" + whole[1026:], "expected the tokens of bytes in"),
        (words(whole, w3=257), "found 257 and 257"),
        (words(whole, w2=1 << 30), "expected at most 65536 tokens"),
    ):
        path.write_bytes(content)
        line = refused(capsys, 65, *arguments)
        assert told in line and str(path) in line, line
    assert main([*arguments, "--tokenizer", "bytes"]) == 0, "a tokenizer that is named is taken"
    line = refused(capsys, 65, *arguments[:2], "--out", str(files / "other"), "--tokenizer", "gpt2")
    assert "expected a tokenizer of 257 tokens" in line


def test_wrong_arguments(files: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    run, out = str(tmp_path / "run"), str(tmp_path / "x")
    capsys.readouterr()
    assert "`hf upload OWNER/NAME DIR" in refused(capsys, 64, "export", run, "--to", "hf", out, "--push", "me/mine")
    assert "found no such file" in refused(capsys, 65, "import", "no/model.bin", "--out", out)
    assert "already exists" in refused(capsys, 64, "import", str(files / "model.bin"), "--out", str(files))
    assert "already exists" in refused(capsys, 64, "export", run, "--to", "llmc", str(files))
    assert not Path(out).exists()


def test_an_export_that_reads_back_otherwise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A writer that is wrong, or a disk that lies or is full, leaves no folder."""
    run, _ = make_checkpoint(tmp_path / "run", "bytes")
    found = checkpoint.find(str(run))

    def swapped(path: Path, shape: ModelShape, weight, dtype: torch.dtype) -> None:
        names = {"ln1_weight": "ln2_weight", "ln2_weight": "ln1_weight"}
        rows = {row.name: row for row in parameter_table(shape)}
        kept = weights(run)

        def other(row: ParameterRow) -> torch.Tensor:
            layer, _, last = row.name.rpartition(".")
            return kept[rows[f"{layer}.{names[last]}" if last in names else row.name].name]

        write_model(path, shape, other, dtype)

    def full(path: Path, *rest: object) -> None:
        raise OSError(28, "No space left on device")

    for writer, told in ((swapped, "gave other numbers"), (full, "free some space")):
        monkeypatch.setattr(export, "write_model", writer)
        with pytest.raises(StorageError, match=told):
            export.export_llmc(found, tmp_path / "deep" / "c")
    monkeypatch.setattr(export, "write_model", lambda path, *rest: path.write_bytes(b"no"))
    with pytest.raises(StorageError, match="do not read back"):
        export.export_llmc(found, tmp_path / "deep" / "c")
    assert not list((tmp_path / "deep").iterdir())


@pytest.mark.fault(26)
@settings(deadline=None, max_examples=250)
@given(st.sampled_from([0, 1]), st.floats(0, 1, exclude_max=True), st.binary(min_size=1, max_size=4), st.booleans())
def test_any_damage_is_data_error_or_other_numbers(
    tmp_path_factory: pytest.TempPathFactory, which: int, where: float, flips: bytes, cut: bool
) -> None:
    """Bytes flipped, in the header as often as behind it, or the end cut off: never a traceback, never much memory."""
    folder = tmp_path_factory.mktemp("fuzz")
    content = bytearray(tiny_files(folder)[which])
    place = int(where * 2 * 48) if where < 0.5 else 1024 + int((2 * where - 1) * (len(content) - 1024))
    for offset, flip in enumerate(flips):
        if place + offset < len(content):
            content[place + offset] ^= flip
    path = folder / "damaged.bin"
    path.write_bytes(content[:place] if cut else content)
    try:
        if which == 0:
            found = read_model(path)
            values = [found.weight(row) for row in parameter_table(found.shape)]
        else:
            read_tokens(path)
            values = []
    except DataError as error:
        assert str(path) in str(error) and "\n" not in str(error)
        return
    assert not cut and all(torch.isfinite(value).all() for value in values)
