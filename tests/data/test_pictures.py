"""Pictures read from made-up files of each format, and every file that is refused."""

import gzip
import io
import os
import re
import struct
import warnings
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from handgrad.data import pictures
from handgrad.data.pictures import class_names, find_pictures, picture_count, read_pictures
from handgrad.errors import DataError, StorageError

NAMES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


def noise(rows: int, columns: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (rows, columns, 3), dtype=np.uint8)


def save(path: Path, pixels: np.ndarray, mode: str | None = None, **how: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    image = Image.fromarray(pixels)
    (image.convert(mode) if mode else image).save(path, **how)
    return path


def cifar(path: Path, labels: list[int]) -> np.ndarray:
    """Writes a batch of CIFAR-10, and returns its pictures (count, 32, 32, 3)."""
    images = np.stack([noise(32, 32, seed) for seed in range(len(labels))])
    path.write_bytes(b"".join(bytes([n]) + p.transpose(2, 0, 1).tobytes() for n, p in zip(labels, images, strict=True)))
    return images


def idx(values: np.ndarray, magic: int | None = None) -> bytes:
    return struct.pack(f">{1 + values.ndim}I", magic or 0x800 + values.ndim, *values.shape) + values.tobytes()


def mnist(folder: Path, count: int = 5, prefix: str = "train", packed: bool = True, dot: str = "-") -> np.ndarray:
    """Writes pictures and labels as MNIST names them, and returns the pictures (count, 28, 28)."""
    grey = noise(28, 28 * count, seed=count)[..., 0].reshape(28, count, 28).transpose(1, 0, 2).copy()
    for name, content in (
        (f"{prefix}-images{dot}idx3-ubyte", idx(grey)),
        (f"{prefix}-labels{dot}idx1-ubyte", idx(np.arange(count, dtype=np.uint8) % 10)),
    ):
        (folder / (name + ".gz" if packed else name)).write_bytes(gzip.compress(content) if packed else content)
    return grey


def read(path: Path, rows: int = 32, columns: int = 32, **how: Any) -> list[pictures.Picture]:
    return [picture for file in find_pictures(str(path)) for picture in read_pictures(file, rows, columns, **how)]


def one(path: Path, rows: int, columns: int, **how: Any) -> np.ndarray:
    (picture,) = read(path, rows, columns, **how)
    assert picture.pixels.shape == (rows, columns, 3) and picture.pixels.dtype == np.uint8
    return picture.pixels


def refusal(path: Path, kind: type[Exception] = DataError, **how: Any) -> str:
    """The message with which reading a path fails, without a warning: one line, with the four parts of a message."""
    with warnings.catch_warnings(), pytest.raises(kind) as refused:
        warnings.simplefilter("error")
        read(path, **how)
    message = str(refused.value)
    assert type(refused.value) is kind and str(path.name) in message and "\n" not in message
    if kind is DataError:
        assert re.fullmatch(r"expected .+, found .+; .+", message) and "0x7" not in message
    return message


@pytest.mark.parametrize("suffix", [".png", ".PNG", ".webp", ".jpg", ".jpeg"])
def test_a_picture_is_read_as_it_was_written(suffix: str, tmp_path: Path) -> None:
    pixels = np.tile(np.linspace(0, 255, 12, dtype=np.uint8)[None, :, None], (8, 1, 3))
    read_back = one(save(tmp_path / f"a{suffix}", pixels, lossless=True, quality=100), 8, 12)
    assert abs(read_back.astype(int) - pixels).max() <= (4 if suffix.startswith(".j") else 0)


def test_a_name_says_nothing_of_the_three_formats(tmp_path: Path) -> None:
    pixels = noise(4, 4)
    save(tmp_path / "a.webp", pixels, lossless=True).rename(tmp_path / "a.png")
    assert (one(tmp_path / "a.png", 4, 4) == pixels).all()


@pytest.mark.parametrize(
    ("mode", "value", "expected"),
    [
        ("1", True, (255, 255, 255)),
        ("L", 90, (90, 90, 90)),
        ("P", 1, (10, 20, 30)),
        ("RGB", (1, 2, 3), (1, 2, 3)),
        ("LA", (90, 0), (255, 255, 255)),  # transparent: white
        ("RGBA", (9, 9, 9, 0), (255, 255, 255)),
        ("RGBA", (0, 100, 200, 255), (0, 100, 200)),
        ("RGBA", (0, 100, 200, 51), (204, 224, 244)),  # a fifth
        ("I;16", 0x5AFF, (0x5A, 0x5A, 0x5A)),  # the upper half of 16 bits
    ],
)
def test_every_mode_becomes_red_green_and_blue_on_white(
    mode: str, value: Any, expected: tuple[int, int, int], tmp_path: Path
) -> None:
    image = Image.new(mode, (3, 2), value)
    if mode == "P":
        image.putpalette([0, 0, 0, 10, 20, 30])
    image.save(tmp_path / "a.png")
    assert (one(tmp_path / "a.png", 2, 3) == expected).all()


def test_a_transparent_colour_of_a_palette_is_white(tmp_path: Path) -> None:
    image = Image.fromarray(np.array([[0, 1]], np.uint8), "L").convert("P")
    image.putpalette([10, 20, 30, 40, 50, 60])
    image.putdata([0, 1])
    image.save(tmp_path / "a.png", transparency=1)
    assert one(tmp_path / "a.png", 1, 2).tolist() == [[[10, 20, 30], [255, 255, 255]]]


def test_four_colours_of_print_become_three(tmp_path: Path) -> None:
    Image.new("CMYK", (8, 8), (0, 255, 255, 0)).save(tmp_path / "a.jpg", quality=100)
    red, green, blue = one(tmp_path / "a.jpg", 8, 8)[4, 4].astype(int)
    assert red > 240 and green < 15 and blue < 15


@pytest.mark.parametrize("suffix", [".jpg", ".png", ".webp"])
def test_the_orientation_of_a_camera_is_applied(suffix: str, tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x112] = 6  # the first row is the right side
    pixels = np.zeros((16, 32, 3), np.uint8)
    pixels[:8] = 255
    save(tmp_path / f"a{suffix}", pixels, exif=exif)
    turned = one(tmp_path / f"a{suffix}", 32, 16, strict=True)
    assert turned[:, :7].max() < 30 and turned[:, 9:].min() > 225


def test_damaged_exif_data_leave_a_picture_as_it_is(tmp_path: Path) -> None:
    save(tmp_path / "a.jpg", np.full((8, 8, 3), 50, np.uint8), exif=b"Exif\0\0MM\0*\xff\xff\xff\xff damaged")
    assert (one(tmp_path / "a.jpg", 8, 8) == 50).all()


@pytest.mark.parametrize("format", ["png", "webp"])
def test_the_first_frame_of_several_is_read(format: str, tmp_path: Path) -> None:
    first, second = Image.new("RGB", (8, 8), "red"), Image.new("RGB", (8, 8), "blue")
    first.save(tmp_path / f"a.{format}", save_all=True, append_images=[second], lossless=True)
    assert Image.open(tmp_path / f"a.{format}").n_frames == 2
    assert (one(tmp_path / f"a.{format}", 8, 8) == (255, 0, 0)).all()


def test_a_wide_picture_loses_its_sides_alone(tmp_path: Path) -> None:
    pixels = np.zeros((10, 30, 3), np.uint8)
    pixels[:, 10:20] = 100
    pixels[0, 10:20] = 200
    for name, turned in (("a.png", pixels), ("b.png", pixels.transpose(1, 0, 2))):
        small = one(save(tmp_path / name, turned), 5, 5)[..., 0].astype(int)
        small = small if name == "a.png" else small.T
        assert small[0].min() > 135 and abs(small[2:] - 100).max() < 20


def test_a_picture_of_the_ratio_keeps_its_corners(tmp_path: Path) -> None:
    pixels = np.full((20, 40, 3), 10, np.uint8)
    pixels[:4, :4], pixels[-4:, -4:] = 250, 130
    small = one(save(tmp_path / "a.png", pixels), 5, 10).astype(int)
    assert small[0, 0].min() > 200 and abs(small[-1, -1] - 130).max() < 20 and abs(small[2, 5] - 10).max() <= 2


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (7, 1), (1, 300), (300, 2)])
def test_any_size_becomes_any_other(rows: int, columns: int, tmp_path: Path) -> None:
    path = save(tmp_path / "a.png", np.full((rows, columns, 3), 77, np.uint8))
    for size in ((1, 1), (32, 32), (3, 100), (1024, 1)):
        assert (one(path, *size) == 77).all()


def test_another_size_is_refused_if_strict(tmp_path: Path) -> None:
    pixels = noise(32, 31)
    save(tmp_path / "a.png", pixels)
    assert refusal(tmp_path / "a.png", strict=True) == (
        f"expected 32 rows x 32 columns, found 32 x 31 in {tmp_path}/a.png; resize it, or let other sizes be resized"
    )
    assert (one(tmp_path / "a.png", 32, 31, strict=True) == pixels).all()
    mnist(tmp_path / ".", 2)
    assert f"found 28 x 28 in {tmp_path}/train-images-idx3-ubyte.gz#0; " in refusal(
        tmp_path / "train-images-idx3-ubyte.gz", strict=True
    )


def test_cifar_10(tmp_path: Path) -> None:
    labels = [3, 9, 0, 3]
    images = cifar(tmp_path / "data_batch_2.bin", labels)
    cifar(tmp_path / "test_batch.bin", [1])
    files = find_pictures(str(tmp_path))
    assert [file.name for file in files] == ["data_batch_2.bin", "test_batch.bin"]
    assert [picture_count(file) for file in files] == [4, 1] and class_names(files) == tuple("0123456789")
    (tmp_path / "batches.meta.txt").write_text("\n".join(NAMES) + "\n\n")
    assert class_names(files) == NAMES
    several = list(read_pictures(files[0], 32, 32, strict=True))
    assert (np.stack([picture.pixels for picture in several]) == images).all()
    assert [picture.label for picture in several] == ["cat", "truck", "airplane", "cat"]
    assert [picture.name for picture in several] == [f"data_batch_2.bin#{n}" for n in range(4)]
    (single,) = read_pictures(files[1], 32, 32)
    assert (single.name, single.label) == ("test_batch.bin", "automobile")


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("dot", ["-", "."])
@pytest.mark.parametrize("prefix", ["train", "t10k"])
def test_mnist(packed: bool, dot: str, prefix: str, tmp_path: Path) -> None:
    grey = mnist(tmp_path, 12, prefix, packed, dot)
    (file,) = find_pictures(str(tmp_path))
    assert file.name == f"{prefix}-images{dot}idx3-ubyte{'.gz' * packed}"
    assert picture_count(file) == 12 and class_names([file]) == tuple("0123456789")
    several = list(read_pictures(file, 28, 28, strict=True))
    assert (np.stack([picture.pixels for picture in several]) == grey[..., None]).all()
    assert [picture.label for picture in several] == [str(n % 10) for n in range(12)]
    assert several[11].name == f"{file.name}#11"
    larger = next(read_pictures(file, 32, 32)).pixels
    assert (larger == np.array(Image.fromarray(grey[0]).resize((32, 32), Image.Resampling.LANCZOS))[..., None]).all()


def test_labels_may_be_packed_otherwise_than_pictures(tmp_path: Path) -> None:
    mnist(tmp_path)
    labels = tmp_path / "train-labels-idx1-ubyte.gz"
    (tmp_path / "train-labels.idx1-ubyte").write_bytes(gzip.decompress(labels.read_bytes()))
    labels.unlink()
    assert [picture.label for picture in read(tmp_path)] == list("01234")


def test_pictures_without_labels_have_no_classes(tmp_path: Path) -> None:
    mnist(tmp_path)
    mnist(tmp_path, 3, "t10k")
    (tmp_path / "t10k-labels-idx1-ubyte.gz").unlink()
    files = find_pictures(str(tmp_path))
    assert len(files) == 2 and class_names(files) == ()
    assert [picture.label for picture in read_pictures(files[0], 28, 28)] == [""] * 3


def test_a_packed_file_beside_its_content_is_left_out(tmp_path: Path) -> None:
    """torchvision keeps both."""
    mnist(tmp_path)
    mnist(tmp_path, packed=False)
    assert [file.name for file in find_pictures(str(tmp_path))] == ["train-images-idx3-ubyte"]
    assert len(read(tmp_path / "train-images-idx3-ubyte.gz")) == 5  # by its name it is read


@pytest.mark.parametrize("kind", ["cifar", "gz", "plain"])
def test_a_range_holds_the_same_pictures(kind: str, tmp_path: Path) -> None:
    if kind == "cifar":
        cifar(tmp_path / "data_batch_1.bin", [1, 2, 3, 4, 5, 6])
    else:
        mnist(tmp_path, 6, packed=kind == "gz")
    (file,) = find_pictures(str(tmp_path))
    every = list(read_pictures(file, 32, 32))
    for first, count in ((0, 6), (0, 2), (2, 3), (5, 1), (5, 9), (3, None), (6, 2), (0, 0)):
        some, expected = list(read_pictures(file, 32, 32, first=first, count=count)), every[first:][:count]
        assert [(p.label, p.name, p.pixels.tobytes()) for p in some] == [
            (p.label, p.name, p.pixels.tobytes()) for p in expected
        ]


def test_ranges_of_a_packed_file_unpack_it_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mnist(tmp_path, 6)
    opened = []
    monkeypatch.setattr(pictures.gzip, "open", lambda path: opened.append(path.name) or gzip.GzipFile(path))
    (file,) = find_pictures(str(tmp_path))
    for first in range(6):
        assert len(list(read_pictures(file, 28, 28, first=first, count=1))) == 1
    assert sorted(opened) == ["train-images-idx3-ubyte.gz", "train-labels-idx1-ubyte.gz"]
    grey = mnist(tmp_path, 7)  # another file of the same name
    os.utime(file.path, ns=(1, 1))
    assert (list(read_pictures(file, 28, 28))[6].pixels == grey[6][..., None]).all()


def test_folders_are_classes(tmp_path: Path) -> None:
    for n, name in enumerate(["dog/b.png", "cat/10.png", "cat/2.jpg", "sea lion_1.x-y/é.webp", ".git/x.png", "cat/.x.png"]):
        save(tmp_path / name, noise(8, 8, n))
    (tmp_path / "cat" / "notes.txt").write_text("no picture")
    files = find_pictures(str(tmp_path))
    assert [file.name for file in files] == ["cat/10.png", "cat/2.jpg", "dog/b.png", "sea lion_1.x-y/é.webp"]
    assert class_names(files) == ("cat", "dog", "sea lion_1.x-y")
    several = [picture for file in files for picture in read_pictures(file, 8, 8)]
    assert [picture.label for picture in several] == ["cat", "cat", "dog", "sea lion_1.x-y"]
    assert [picture.name for picture in several] == [file.name for file in files]
    (alone,) = find_pictures(str(tmp_path / "cat" / "2.jpg"))
    assert alone.name == "2.jpg" and class_names([alone]) == () and next(read_pictures(alone, 8, 8)).label == ""


@pytest.mark.parametrize("names", [["a.png", "b.png"], ["cat/a.png", "b.png"], ["x/cat/a.png", "x/dog/b.png"]])
def test_other_folders_are_no_classes(names: list[str], tmp_path: Path) -> None:
    for name in names:
        save(tmp_path / name, noise(4, 4))
    assert class_names(find_pictures(str(tmp_path))) == ()


@pytest.mark.parametrize("name", ["a<b", "a>b", "<|endoftext|>", "a\nb", "cat, dog", "x" * 101, "a'b"])
def test_a_class_must_fit_between_angle_brackets(name: str, tmp_path: Path) -> None:
    save(tmp_path / "fine" / "a.png", noise(4, 4))
    save(tmp_path / name / "a.png", noise(4, 4))
    with pytest.raises(DataError, match=r"letters, digits, blanks, _, - and \., found .+; rename the folder") as refused:
        class_names(find_pictures(str(tmp_path)))
    assert "\n" not in str(refused.value)


def test_the_names_of_cifar_must_fit_too(tmp_path: Path) -> None:
    cifar(tmp_path / "data_batch_1.bin", [0])
    (tmp_path / "batches.meta.txt").write_bytes("\n".join(NAMES[:-1]).encode() + b"\ntr\xffck")
    with pytest.raises(DataError, match=r"found 'tr.ck' in .*batches.meta.txt; rename it"):
        class_names(find_pictures(str(tmp_path)))


def test_the_fingerprint_follows_content_and_labels(tmp_path: Path) -> None:
    mnist(tmp_path)
    save(tmp_path / "a.png", noise(4, 4))
    cifar(tmp_path / "test_batch.bin", [0])
    (tmp_path / "batches.meta.txt").write_text("\n".join(NAMES))

    def fingerprints() -> dict[str, str]:
        return {file.name: file.fingerprint for file in find_pictures(str(tmp_path))}

    before = fingerprints()
    assert before["a.png"] == f"modified {(tmp_path / 'a.png').stat().st_mtime_ns}"
    for changed, follows in (
        ("a.png", "a.png"),
        ("train-labels-idx1-ubyte.gz", "train-images-idx3-ubyte.gz"),
        ("batches.meta.txt", "test_batch.bin"),
    ):
        os.utime(tmp_path / changed, ns=(1, 1))
        after = fingerprints()
        assert {name for name in after if after[name] != before[name]} == {follows}
        before = after


def jpeg() -> bytes:
    file = io.BytesIO()
    Image.fromarray(noise(64, 64)).save(file, "JPEG")
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
        ("a.jpg", b"GIF89a\x01\0\x01\0\0\0\0;", "first bytes b'GIF89a"),
        ("a.jpg", jpeg()[:900], "truncated"),
        ("a.jpg", jpeg()[:30], ""),
        ("a.png", png(8, 8, zlib.compress(bytes(8 * 25)))[:-60], ""),
        ("a.png", png(8, 8, b"damaged"), ""),
        ("a.png", png(64, 64, zlib.compress(b"".join(b"\0" + row.tobytes() for row in noise(64, 64))))[:9000], "truncated"),
        ("a.png", png(0, 8), ""),
        ("a.webp", b"RIFF\x10\0\0\0WEBPVP8 damaged!", ""),
    ],
    ids=map(str, range(10)),
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
    assert "at most 1073741824 bytes unpacked, found 1683627180048 by the header" in message and "gunzip" in message


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
    assert str(refused.value) == f"reading {tmp_path / name} failed: Permission denied; check its permissions"
