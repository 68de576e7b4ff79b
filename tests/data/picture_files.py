"""Made-up files of pictures: CIFAR-10's, MNIST's, and what Pillow writes."""

import gzip
import re
import struct
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from handgrad.data import pictures
from handgrad.data.pictures import find_pictures, read_pictures
from handgrad.errors import DataError

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
