"""Pictures that are refused: damaged, huge, of another kind, or gone."""

import gzip
import io
import os
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from handgrad.data import pictures
from handgrad.data.pictures import find_pictures, picture_count, read_pictures
from handgrad.errors import DataError, StorageError
from tests.data.picture_files import cifar, idx, mnist, noise, read, refusal, save


def written(format: str) -> bytes:
    file = io.BytesIO()
    Image.fromarray(noise(64, 64)).save(file, format)
    return file.getvalue()


def png(columns: int, rows: int, content: bytes = b"") -> bytes:
    """A PNG's signature, header and data, of any size that the header claims."""

    def chunk(name: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))

    header = struct.pack(">IIBBBBB", columns, rows, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", content) + chunk(b"IEND", b"")


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.png", b"", "first bytes b''"),
        ("a.png", b"<!DOCTYPE html><html>", "first bytes b'<!DOCTYP'"),
        ("a.jpg", written("GIF"), "first bytes b'GIF8"),
        ("a.png", written("BMP"), "first bytes b'BM"),
        ("a.jpg", written("JPEG")[:900], "truncated"),
        ("a.jpg", written("JPEG")[:30], ""),
        ("a.png", png(8, 8, zlib.compress(bytes(8 * 25)))[:-60], ""),
        ("a.png", png(8, 8, b"damaged"), ""),
        ("a.png", png(64, 64, zlib.compress(b"".join(b"\0" + row.tobytes() for row in noise(64, 64))))[:9000], "truncated"),
        ("a.png", png(0, 8), ""),
        ("a.webp", b"RIFF\x10\0\0\0WEBPVP8 damaged!", ""),
    ],
    ids=map(str, range(11)),
)
def test_damaged_pictures_are_refused(name: str, content: bytes, said: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    message = refusal(tmp_path / name)
    assert "expected a PNG, JPEG or WebP picture, found " in message and said in message
    assert f"in {tmp_path / name}; replace or remove it" in message


@pytest.mark.parametrize(("side", "said"), [(8193, "8192 x 8193"), (11000, "8192 x 11000"), (1 << 20, "far more")])
def test_huge_pictures_are_refused_before_they_are_decoded(
    side: int, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.png").write_bytes(png(side, 8192, zlib.compress(b"\0")))
    monkeypatch.setattr(pictures.Image.Image, "load", lambda image: pytest.fail("decoded"))
    message = f"expected a picture of at most 67108864 pixels, found {said} in {tmp_path}/a.png; make it smaller"
    assert refusal(tmp_path / "a.png") == message


def test_a_file_too_large_to_hold_is_refused(tmp_path: Path) -> None:
    with (tmp_path / "a.png").open("wb") as file:
        file.truncate(pictures.MOST_BYTES + 1)
    assert "and 268435456 bytes, found 268435457 bytes" in refusal(tmp_path / "a.png")


@pytest.mark.parametrize("size", [0, 1, 3072, 3074, 2 * 3073 - 1])
def test_a_truncated_file_of_cifar_is_refused(size: int, tmp_path: Path) -> None:
    (tmp_path / "data_batch_1.bin").write_bytes(bytes(size))
    assert f"records of 3073 bytes, found {size} bytes" in refusal(tmp_path / "data_batch_1.bin")


def test_labels_out_of_range_are_refused(tmp_path: Path) -> None:
    cifar(tmp_path / "data_batch_1.bin", [9, 10])
    assert "labels below 10, found 10 for picture 1" in refusal(tmp_path / "data_batch_1.bin")
    mnist(tmp_path)
    labels = tmp_path / "train-labels-idx1-ubyte.gz"
    labels.write_bytes(gzip.compress(idx(np.array([1, 2, 3, 255, 4], np.uint8))))
    with pytest.raises(DataError, match=r"labels below 10, found 255 for picture 3 in .*train-labels-idx1-ubyte.gz; "):
        read(tmp_path / "train-images-idx3-ubyte.gz")


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "found nothing"),
        (idx(np.zeros(5, np.uint8)) + bytes(9), "with 2051 first, found 00000801"),  # labels
        (idx(np.zeros((1, 2, 2), np.uint8), magic=0x903), "found 00000903"),
        (idx(np.zeros((1, 2, 2), np.uint8))[:15], "header of 16 bytes"),
        (idx(np.zeros((3, 2, 2), np.uint8))[:-1], "expected 28 bytes, as its header says, found 27"),
        (idx(np.zeros((3, 2, 2), np.uint8)) + b"!", "expected 28 bytes, as its header says, found 29"),
        (idx(np.zeros((0, 2, 2), np.uint8)), "dimensions 0 x 2 x 2"),
        (idx(np.zeros((3, 0, 2), np.uint8)), "dimensions 3 x 0 x 2"),
        (struct.pack(">4I", 0x803, 1, 1 << 14, 1 << 13), "dimensions 1 x 16384 x 8192"),
    ],
    ids=map(str, range(9)),
)
def test_damaged_idx_files_are_refused(packed: bool, content: bytes, said: str, tmp_path: Path) -> None:
    path = tmp_path / ("t10k-images-idx3-ubyte" + ".gz" * packed)
    path.write_bytes(gzip.compress(content) if packed else content)
    assert said in refusal(path)
    with pytest.raises(DataError):
        picture_count(find_pictures(str(path))[0])


def test_damaged_labels_are_refused(tmp_path: Path) -> None:
    mnist(tmp_path)
    labels, images = tmp_path / "train-labels-idx1-ubyte.gz", tmp_path / "train-images-idx3-ubyte.gz"
    for content, said in (
        (idx(np.zeros(6, np.uint8)), "expected 5 labels, found 6 in .*labels.*; fetch both"),
        (idx(np.zeros(5, np.uint8))[:-1], "expected 13 bytes, as its header says, found 12 in .*labels"),
        (idx(np.zeros((5, 1, 1), np.uint8)), "with 2049 first, found 00000803"),
    ):
        labels.write_bytes(gzip.compress(content))
        os.utime(labels, ns=(len(content), len(content)))
        with pytest.raises(DataError, match=said):
            read(images)


def test_damaged_gz_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "train-images-idx3-ubyte.gz"
    content = gzip.compress(idx(noise(28, 28)[None, ..., 0]))
    flipped = bytearray(content)
    flipped[-6] ^= 1  # of the checksum
    for n, damaged in enumerate((b"no gzip", content[:-20], bytes(flipped), content[:40] + b"\xff" * 40 + content[80:])):
        path.write_bytes(damaged)
        os.utime(path, ns=(n, n))
        assert "expected a gzip file, found " in refusal(path)


def test_a_gz_is_not_unpacked_beyond_its_header(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "train-images-idx3-ubyte.gz"
    path.write_bytes(gzip.compress(idx(np.zeros((1, 2, 2), np.uint8)) + bytes(50 << 20)))
    assert "expected 20 bytes, as its header says, found 21 or more" in refusal(path)
    path.write_bytes(gzip.compress(struct.pack(">4I", 0x803, 1 << 31, 28, 28)))
    os.utime(path, ns=(1, 1))
    monkeypatch.setattr(pictures.gzip.GzipFile, "seek", lambda *_: pytest.fail("unpacked"))
    message = refusal(path)
    assert "at most 1073741824 bytes in a .gz, found 1683627180048 by its header" in message and "gunzip" in message


def test_folders_without_pictures_are_refused(tmp_path: Path) -> None:
    message = refusal(tmp_path)
    assert message.startswith("expected PNG, JPEG or WebP files, CIFAR-10's ") and message.endswith("name another source")
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "a.gif").write_bytes(b"GIF89a")
    assert refusal(tmp_path).endswith(f"found none in {tmp_path}; for its text: `handgrad prepare {tmp_path}`")
    assert f"found none in {tmp_path}/a.gif; name another source" in refusal(tmp_path / "a.gif")
    assert f"`handgrad prepare {tmp_path}/a.txt`" in refusal(tmp_path / "a.txt")


def test_absent_sources_are_refused(tmp_path: Path) -> None:
    (tmp_path / "pictures").mkdir()
    message = refusal(tmp_path / "picturs")
    assert f"no file or folder '{tmp_path}/picturs' (did you mean {tmp_path}/pictures?); check" in message


def test_a_file_that_goes_away_or_shrinks_is_refused(tmp_path: Path) -> None:
    cifar(tmp_path / "data_batch_1.bin", [1, 2])
    save(tmp_path / "a.png", noise(4, 4))
    picture, batch = find_pictures(str(tmp_path))
    batch.path.write_bytes(batch.path.read_bytes()[:-1])
    assert picture.name == "a.png"
    with pytest.raises(DataError, match=r"expected 3073 bytes, found 3072 in .* it shrank while it was read"):
        list(read_pictures(batch, 32, 32))
    for file in (picture, batch):
        file.path.unlink()
        with pytest.raises(DataError, match="found none; it was removed"):
            list(read_pictures(file, 32, 32))


@pytest.mark.parametrize("name", ["a.png", "data_batch_1.bin", "train-images-idx3-ubyte", "train-images-idx3-ubyte.gz"])
def test_an_unreadable_file_is_a_storage_error(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root may read every file, so the system's refusal is made up."""
    cifar(tmp_path / name, [1])
    (file,) = find_pictures(str(tmp_path))

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    monkeypatch.setattr(Path, "read_bytes", refuse)
    monkeypatch.setattr(pictures.gzip, "open", refuse)
    with pytest.raises(StorageError) as refused:
        list(read_pictures(file, 32, 32))
    monkeypatch.undo()  # `--cpu-times` reads files after a test
    assert str(refused.value) == f"reading {tmp_path / name} failed: Permission denied; check its permissions"
