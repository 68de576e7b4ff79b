"""Writes tensors as a safetensors file and hashes it on the way; the hash up to the end of each tensor locates damage."""

import contextlib
import hashlib
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import safetensors
import torch
from torch import Tensor

from handgrad.errors import DataError

SAFETENSORS_DTYPES = {torch.float32: "F32", torch.float64: "F64", torch.bfloat16: "BF16"}
HEADER = "its header"
CHUNK_BYTES = 1 << 20


@dataclass
class Stored:
    """A tensor to write to a file: its entry in the header, and a function that fetches it."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    get: Callable[[], Tensor]
    fetched: bool = False

    @classmethod
    def of(cls, name: str, tensor: Tensor) -> "Stored":
        return cls(name, tensor.dtype, tuple(tensor.shape), lambda: tensor)

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def fetch(self) -> Tensor:
        self.fetched = True
        return self.get()


class Named(Protocol):
    """Anything with the name and size of a tensor: `Stored`, or a row of a plan."""

    @property
    def name(self) -> str: ...

    @property
    def size_bytes(self) -> int: ...


Row = TypeVar("Row", bound=Named)


def split(tensors: list[Row], parts: int) -> list[list[Row]]:
    """At most `parts` groups of consecutive tensors, equal in size by their midpoints; at least one, even if empty."""
    total, before = sum(tensor.size_bytes for tensor in tensors), 0
    groups: list[list[Row]] = [[] for _ in range(parts)]
    for tensor in tensors:
        groups[(2 * before + tensor.size_bytes) * parts // (2 * total)].append(tensor)
        before += tensor.size_bytes
    return [group for group in groups if group] or [[]]


def safetensors_bytes(tensors: list[Stored], metadata: dict[str, str] | None = None) -> Iterator[bytes | memoryview]:
    """The safetensors layout: header length, JSON header (with `metadata`, if any), raw tensors one after another.

    The library's writer needs all tensors as bytes in memory and cannot hash while it writes; the format is 10 lines."""
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    end = 0
    for tensor in tensors:
        start, end = end, end + tensor.size_bytes
        dtype = SAFETENSORS_DTYPES[tensor.dtype]
        header[tensor.name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for tensor in tensors:
        yield tensor.fetch().cpu().contiguous().flatten().view(torch.uint8).numpy().data


def write_file(path: Path, chunks: Iterable[bytes | memoryview]) -> dict[str, Any]:
    """Writes and fsyncs a file; returns its size, SHA-256 and, by chunk, the end and the SHA-256's first digits so far."""
    digest, size, ends = hashlib.sha256(), 0, []
    with path.open("xb") as file:
        for chunk in chunks:
            file.write(chunk)
            digest.update(chunk)
            size += len(chunk)
            ends.append([size, digest.hexdigest()[:16]])
        file.flush()
        os.fsync(file.fileno())
    return {"bytes": size, "sha256": digest.hexdigest(), "ends": ends}


def with_names(written: dict[str, Any], tensors: list[Stored]) -> dict[str, Any]:
    """Names the ends that `write_file` returned for the tensors' `safetensors_bytes`: [name, end, hash up to there]."""
    names = [HEADER, *(tensor.name for tensor in tensors)]
    return {**written, "ends": [[name, *end] for name, end in zip(names, written["ends"], strict=True)]}


def first_damaged(path: Path, ends: Any) -> str:
    """The name of the first tensor whose bytes changed since they were written; "" if `ends`, from a manifest that may also
    be damaged, does not show it. Raises OSError."""
    digest, position = hashlib.sha256(), 0
    if not isinstance(ends, list) or any(not isinstance(e, list) or [*map(type, e)] != [str, int, str] for e in ends):
        return ""
    with path.open("rb") as file:
        for name, end, expected in ends:
            while position < end and (chunk := file.read(min(CHUNK_BYTES, end - position))):
                digest.update(chunk)
                position += len(chunk)
            if position < end or digest.hexdigest()[:16] != expected:
                return name
    return ""


@contextlib.contextmanager
def open_tensors(path: Path) -> Iterator[Any]:
    """An open safetensors file; raises `DataError` for one that cannot be read."""
    try:
        with safetensors.safe_open(path, framework="pt") as stored:
            yield stored
    except (safetensors.SafetensorError, OSError) as error:
        raise DataError(f"{path} cannot be read as safetensors: {error}") from None


def read_tensor(stored: Any, path: Path, name: str, shape: tuple[int, ...], *, padded: bool = False) -> Tensor:
    """A tensor of an open file, which may be `padded` to more dimensions. Raises `DataError`: missing, or another shape."""
    try:
        tensor = stored.get_tensor(name)
    except safetensors.SafetensorError as error:
        raise DataError(f"{path} cannot be read as safetensors: {error}") from None
    if padded and tensor.shape[: len(shape)] == shape:
        tensor = tensor.view(-1)[: math.prod(shape)].view(shape)
    if tensor.shape != shape:
        raise DataError(f"{path}: expected {name} of shape {tuple(shape)}, found {tuple(tensor.shape)}")
    return tensor
