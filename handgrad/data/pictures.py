"""Reads pictures from local files: PNG, JPEG and WebP; CIFAR-10's binary files; MNIST's and Fashion-MNIST's idx files."""

import contextlib
import functools
import gzip
import io
import math
import re
import shlex
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import IO, NamedTuple, cast

import numpy as np
from PIL import Image, ImageOps

from handgrad.data.codes import CLASS
from handgrad.data.sources import SourceFile, files_below, holds_text, nearest_path, reading
from handgrad.errors import DataError

EXPECTED = "PNG, JPEG or WebP files, CIFAR-10's data_batch_1.bin, or MNIST's train-images-idx3-ubyte[.gz]"
MOST_PIXELS = 64 << 20  # of a picture; Pillow warns above 85 Mi
MOST_BYTES = 4 * MOST_PIXELS  # of a picture's file, which is held in memory
MOST_GZ_BYTES = 1 << 30  # of an idx file in a .gz, which is held in memory
TURNS = {2: 0, 3: 3, 4: 1, 5: 5, 6: 4, 7: 6, 8: 2}  # the orientation in EXIF data, 1 if upright: Pillow's Transpose
DIGITS = tuple("0123456789")
CIFAR, CIFAR_NAMES = re.compile(r"(data_batch_\d+|test_batch)\.bin"), "batches.meta.txt"
CIFAR_BYTES = 1 + 3 * 32 * 32  # of a record: its label, then the planes of red, green and blue, row by row
IDX = re.compile(r"(.*)-images([-.])idx3-ubyte(\.gz)?")
IDX_IMAGES, IDX_LABELS = 0x803, 0x801  # the first four bytes: unsigned bytes, in three dimensions or in one


class Picture(NamedTuple):
    """One picture of a source."""

    pixels: np.ndarray  # (rows, columns, 3), uint8: red, green, blue
    label: str  # its class; without meaning if `class_names` has none
    name: str  # path within the source; with #n, from 0, in a file of several


def find_pictures(spec: str) -> list[SourceFile]:
    """The files with pictures of a path, a file or a folder, sorted by name; without hidden files, and without a .gz whose
    unpacked file lies beside it. The fingerprint of an idx or CIFAR file also changes when its labels or names do. Raises
    DataError: there is none; StorageError: unreadable."""
    path = Path(spec).expanduser()
    with reading(path):
        if not path.exists():
            raise DataError(f"expected pictures, found no file or folder {spec!r}{nearest_path(path)}; check its name")
        root = path if path.is_dir() else path.parent
        paths = {below for below in (files_below(path) if path.is_dir() else [path]) if kind_of(below)}
        if not paths:
            text = f"for its text: `handgrad prepare {shlex.quote(spec)}`" if holds_text(path) else "name another source"
            raise _refusal(EXPECTED, "none", path, text)
        files = [_source_file(path, root) for path in paths if path.suffix != ".gz" or path.with_suffix("") not in paths]
    return sorted(files, key=lambda file: file.name)


def _source_file(path: Path, root: Path) -> SourceFile:
    beside = labels_path(path) or path.with_name(CIFAR_NAMES)
    both = (path, beside) if kind_of(path) != "picture" and beside.is_file() else (path,)
    times = ", ".join(str(file.stat().st_mtime_ns) for file in both)
    return SourceFile(path.relative_to(root).as_posix(), path, path.stat().st_size, f"modified {times}")


def kind_of(path: Path) -> str:
    """The kind of a file, from its name: "picture", "cifar" or "idx"; "" if it holds no pictures."""
    if path.name.lower().endswith((".png", ".jpg", ".jpeg", ".webp")):
        return "picture"
    return "cifar" if CIFAR.fullmatch(path.name) else "idx" if IDX.fullmatch(path.name) else ""


def class_names(files: list[SourceFile]) -> tuple[str, ...]:
    """The classes of pictures, sorted; () if any file has none. A picture's class is the folder directly below the source
    that it is in; in CIFAR-10, a name in batches.meta.txt, else "0" to "9"; in an idx file with labels, "0" to "9". Raises
    DataError: a name with characters other than letters, digits, blanks, _, - and ."""
    origins = {name: file.path for file in files for name in _classes(file)}
    if not all(map(_classes, files)):
        return ()
    for name, path in origins.items():
        if not re.fullmatch(CLASS, name):
            folder = kind_of(path) == "picture"
            where, remedy = (path.parent, "rename the folder") if folder else (path.with_name(CIFAR_NAMES), "rename it")
            raise _refusal("a class named in letters, digits, blanks, _, - and .", repr(name[:100]), where, remedy)
    return tuple(sorted(origins))


def _classes(file: SourceFile) -> tuple[str, ...]:
    """The classes that pictures of a file may have; of a picture's file, its own one."""
    if kind_of(file.path) == "picture":
        return tuple(file.name.split("/")[:-1]) if file.name.count("/") == 1 else ()
    if kind_of(file.path) == "idx":
        return DIGITS if labels_path(file.path) else ()
    meta = file.path.with_name(CIFAR_NAMES)
    if not meta.is_file():
        return DIGITS
    with reading(meta), meta.open("rb") as names:
        return tuple(line.strip() for line in names.read(1 << 16).decode(errors="replace").splitlines() if line.strip())


def labels_path(path: Path) -> Path | None:
    """The labels beside the pictures of an idx file, packed or not; None if there are none."""
    if not (name := IDX.fullmatch(path.name)):
        return None
    beside = [path.with_name(f"{name[1]}-labels{dot}idx1-ubyte{gz}") for dot in (name[2], *"-.") for gz in ("", ".gz")]
    return next((path for path in beside if path.is_file()), None)


def picture_count(file: SourceFile) -> int:
    """The number of pictures in a file. Raises `DataError` for a CIFAR or idx file of another size than its records or its
    header say, `StorageError` for an unreadable one."""
    if kind_of(file.path) == "picture":
        return 1
    if kind_of(file.path) == "idx":
        with _open_idx(file.path, IDX_IMAGES) as (_, sizes):
            return sizes[0]
    if file.size_bytes % CIFAR_BYTES or not file.size_bytes:
        raise _refusal(f"records of {CIFAR_BYTES} bytes", f"{file.size_bytes} bytes", file.path)
    return file.size_bytes // CIFAR_BYTES


def name_of(file: SourceFile, number: int, total: int) -> str:
    """The name of a picture in a file of `total`."""
    return f"{file.name}#{number}" if total > 1 else file.name


def read_pictures(
    file: SourceFile, rows: int, columns: int, *, strict: bool = False, first: int = 0, count: int | None = None
) -> Iterator[Picture]:
    """The pictures of a file in order, or `count` of them from picture `first`, each of `rows` x `columns` pixels. `strict`
    refuses pictures of another size; else they are cut to the ratio of the sides, around their centre, and resized. Raises
    DataError: damaged, too large, a label out of range, or refused for its size; StorageError: unreadable."""
    total = picture_count(file)
    numbers = range(total)[first : None if count is None else first + count]
    read = {"picture": _read_one, "cifar": _read_cifar, "idx": _read_idx}[kind_of(file.path)]
    for number, (image, label) in zip(numbers, read(file, numbers), strict=True):
        name = name_of(file, number, total)
        if strict and image.size != (columns, rows):
            where, remedy = file.path.with_name(Path(name).name), "resize it, or let other sizes be resized"
            raise _refusal(f"{rows} rows x {columns} columns", f"{image.height} x {image.width}", where, remedy)
        if image.size != (columns, rows):
            image = ImageOps.fit(image, (columns, rows), Image.Resampling.LANCZOS)
        yield Picture(np.array(image), label, name)


def _read_one(file: SourceFile, numbers: range) -> Iterator[tuple[Image.Image, str]]:
    yield from ((_decoded(file.path), "".join(_classes(file))) for _ in numbers)


def _decoded(path: Path) -> Image.Image:
    most, turn = f"a picture of at most {MOST_PIXELS} pixels", None
    with reading(path):
        if (size := path.stat().st_size) > MOST_BYTES:
            raise _refusal(f"{most} and {MOST_BYTES} bytes", f"{size} bytes", path, "make it smaller")
        content = path.read_bytes()
    try:
        with warnings.catch_warnings(action="ignore"):  # Pillow warns of large pictures and of odd metadata
            image = Image.open(io.BytesIO(content), formats=("PNG", "JPEG", "WEBP"))  # reads the header alone
            if image.width * image.height > MOST_PIXELS:
                raise _refusal(most, f"{image.height} x {image.width}", path, "make it smaller")
            image.load()
            with contextlib.suppress(Exception):  # damaged EXIF data: the picture stays as it is stored, as in viewers
                turn = TURNS.get(image.getexif().get(0x112, 1))
            return _rgb(image if turn is None else image.transpose(Image.Transpose(turn)))
    except (DataError, MemoryError):
        raise
    except Image.DecompressionBombError:  # above twice Pillow's own bound
        raise _refusal(most, "far more", path, "make it smaller") from None
    except Exception as error:  # decoders raise errors of many types for damaged bytes
        about = f"first bytes {content[:8]!r}" if isinstance(error, Image.UnidentifiedImageError) else f"{error!s:.100}"
        raise _refusal("a PNG, JPEG or WebP picture", about, path, "replace or remove it") from None


def _rgb(image: Image.Image) -> Image.Image:
    """A picture of any mode in red, green and blue, on white where it is transparent."""
    if image.mode.startswith("I"):  # 16 bits of grey, which Pillow would cut off at 255
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if not image.has_transparency_data:
        return image.convert("RGB")
    image, white = image.convert("RGBA"), Image.new("RGB", image.size, "white")
    white.paste(image, mask=image.getchannel("A"))
    return white


def _read_cifar(file: SourceFile, numbers: range) -> Iterator[tuple[Image.Image, str]]:
    """Krizhevsky, 2009, Learning Multiple Layers of Features from Tiny Images."""
    classes = _classes(file)
    with reading(file.path), file.path.open("rb") as records:
        records.seek(numbers.start * CIFAR_BYTES)
        for number in numbers:
            record = _exactly(records, CIFAR_BYTES, file.path)
            planes = np.frombuffer(record, np.uint8, offset=1).reshape(3, 32, 32)
            yield Image.fromarray(planes.transpose(1, 2, 0).copy()), _label(classes, record[0], number, file.path)


def _read_idx(file: SourceFile, numbers: range) -> Iterator[tuple[Image.Image, str]]:
    labels, path = b"", labels_path(file.path)
    with _open_idx(file.path, IDX_IMAGES) as (images, (count, rows, columns)):
        if path:
            with _open_idx(path, IDX_LABELS) as (entries, (label_count,)):
                if label_count != count:
                    raise _refusal(f"{count} labels", label_count, path, "fetch both files again")
                entries.seek(numbers.start, io.SEEK_CUR)
                labels = _exactly(entries, len(numbers), path)
        images.seek(numbers.start * rows * columns, io.SEEK_CUR)
        for n, number in enumerate(numbers):
            grey = np.frombuffer(_exactly(images, rows * columns, file.path), np.uint8).reshape(rows, columns)
            yield Image.fromarray(grey).convert("RGB"), _label(DIGITS, labels[n], number, path) if path else ""


def _label(classes: tuple[str, ...], label: int, number: int, path: Path) -> str:
    if label >= len(classes):
        raise _refusal(f"labels below {len(classes)}", f"{label} for picture {number}", path)
    return classes[label]


def _exactly(file: IO[bytes], size: int, path: Path) -> bytes:
    if len(content := file.read(size)) < size:
        raise _refusal(f"{size} bytes", len(content), path, "it shrank while it was read")
    return content


@contextlib.contextmanager
def _open_idx(path: Path, magic: int) -> Iterator[tuple[IO[bytes], tuple[int, ...]]]:
    """An idx file at its first entry, and its dimensions: entries; for pictures their rows and columns. LeCun, Cortes and
    Burges, 1998, The MNIST database of handwritten digits."""
    with reading(path):
        packed = path.suffix == ".gz"
        with io.BytesIO(_unpacked(path, path.stat().st_mtime_ns, magic)) if packed else path.open("rb") as file:
            sizes, expected = _idx_header(file, path, magic)
            begin, size = file.tell(), file.seek(0, io.SEEK_END)
            if size != expected:
                more = " or more" if packed and size > expected else ""
                raise _refusal(f"{expected} bytes, as its header says", f"{size}{more}", path)
            file.seek(begin)
            yield file, sizes


@functools.lru_cache(2)  # pictures and their labels: a file is read in ranges
def _unpacked(path: Path, modified_ns: int, magic: int) -> bytes:
    """The content of a .gz, no more than one byte beyond the size that its header says."""
    with gzip.open(path) as file:
        if (expected := _idx_header(cast(IO[bytes], file), path, magic)[1]) > MOST_GZ_BYTES:
            raise _refusal(f"at most {MOST_GZ_BYTES} bytes in a .gz", f"{expected} by its header", path, "gunzip it")
        file.seek(0)
        return file.read(expected + 1)


def _idx_header(file: IO[bytes], path: Path, magic: int) -> tuple[tuple[int, ...], int]:
    """The dimensions that an idx file's header gives, and the size of the file, in bytes, that follows from them."""
    header = file.read(length := 4 + 4 * (magic & 0xFF))
    if int.from_bytes(header[:4]) != magic or len(header) < length:
        raise _refusal(f"an idx header of {length} bytes, with {magic} first", header.hex() or "nothing", path)
    sizes = tuple(int.from_bytes(header[at : at + 4]) for at in range(4, length, 4))
    if not sizes[0] or not 0 < (entry := math.prod(sizes[1:])) <= MOST_PIXELS:
        raise _refusal(f"pictures of 1 to {MOST_PIXELS} pixels", f"dimensions {' x '.join(map(str, sizes))}", path)
    return sizes, length + sizes[0] * entry


def _refusal(expected: str, actual: object, where: Path, remedy: str = "fetch the file again") -> DataError:
    return DataError(f"expected {expected}, found {actual} in {where}; {remedy}")
