"""Durable files: on the disk when a call returns, whole or absent, with their hash."""

import hashlib
import os
from pathlib import Path


def file_sha256(path: Path) -> str:
    """SHA-256 of a file, as hex. Raises OSError."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_durably(path: Path, text: str) -> None:
    """Replaces `path` by a file with `text`, on the disk when this returns; never half of it. Raises OSError."""
    new = path.with_name(path.name + ".new")
    with new.open("wb") as file:
        file.write(text.encode(errors="replace"))  # a sample may hold half a surrogate pair, which UTF-8 cannot
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Forces the names in a folder to the disk. Raises OSError."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
