"""Pictures read from made-up files of each format."""

import gzip
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageOps

from handgrad.data import pictures
from handgrad.data.pictures import class_names, find_pictures, picture_count, read_pictures
from handgrad.errors import DataError
from tests.data.picture_files import NAMES, cifar, mnist, noise, one, read, refusal, save


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
@pytest.mark.parametrize("orientation", range(1, 9))
def test_the_orientation_of_a_camera_is_applied(orientation: int, suffix: str, tmp_path: Path) -> None:
    """As Pillow's own function does, which fails where other EXIF data are damaged."""
    exif = Image.Exif()
    exif[0x112] = orientation
    pixels = np.zeros((16, 32, 3), np.uint8)
    pixels[:8] += 150
    pixels[:, :8] += 100
    path = save(tmp_path / f"a{suffix}", pixels, exif=exif)
    turned = np.array(ImageOps.exif_transpose(Image.open(path)).convert("RGB"))
    assert turned.shape[:2] == ((16, 32) if orientation < 5 else (32, 16))
    assert (one(path, *turned.shape[:2], strict=True) == turned).all()


@pytest.mark.parametrize("suffix", [".jpg", ".png", ".webp"])
def test_damaged_exif_data_leave_a_picture_as_it_is(suffix: str, tmp_path: Path) -> None:
    path = save(tmp_path / f"a{suffix}", np.full((8, 8, 3), 50, np.uint8), exif=b"Exif\0\0M\x1f\0*\0\0\0\x08\0\3\1\x0f")
    assert abs(one(path, 8, 8).astype(int) - 50).max() <= 1


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
