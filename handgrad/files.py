"""Durable files: on disk when a call returns, complete or absent; and their hashes."""

import contextlib
import fcntl
import hashlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from handgrad.errors import StorageError, UsageError, print_message, storage_error


def file_sha256(path: Path) -> str:
    """SHA-256 of a file, as hex. Raises OSError."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_durably(path: Path, text: str) -> None:
    """`write_bytes_durably` for `text` in UTF-8. A lone surrogate, which a sample may contain, becomes "?"."""
    write_bytes_durably(path, text.encode(errors="replace"))


def write_bytes_durably(path: Path, content: bytes) -> None:
    """Atomically replaces `path` with a file of `content`, which is on disk when this returns. Raises OSError."""
    new = path.with_name(f"{path.name}.{os.getpid()}.new")  # two processes may write it, as a run's report
    try:
        with new.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            new.unlink()
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Syncs the names in a folder to disk. Raises OSError."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_name(path: Path) -> None:
    """Syncs the new name of a complete file or folder to disk. Raises an OSError that says that `path` is complete."""
    try:
        sync_folder(path.parent)
    except OSError as error:
        raise OSError(
            error.errno, f"{error.strerror}; {path.name} is whole, but a loss of power may take its name away"
        ) from None


@contextlib.contextmanager
def locked(folder: Path, waits: str = "") -> Iterator[None]:
    """Makes a folder and locks it against other processes; the system releases the lock when this process ends, even if
    killed. While another one holds it, prints `waits` and waits, or raises `UsageError` if there is no such text."""
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if not waits:
                told = f"expected {folder} to be free, found another process writing it; wait for that one"
                raise UsageError(told) from None
            print_message(waits, ends=False)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def check_free(path: Path) -> None:
    """Raises `UsageError` if `path` exists or cannot be created; an empty folder counts as free."""
    if path.is_symlink() or (path.exists() and (not path.is_dir() or any(path.iterdir()))):
        raise UsageError(f"{path} already exists; give another name or remove it")
    check_above(path)


def check_above(path: Path) -> None:
    """Raises `UsageError` if the nearest existing ancestor of `path` is not a folder."""
    above = next(folder for folder in path.absolute().parents if folder.exists())
    if not above.is_dir():
        raise UsageError(f"{path} cannot be made: {above} is a file; give another name")


def check_writable(path: Path) -> None:
    """Checks an output file before the work. Raises `UsageError` if it exists, `StorageError` if it cannot be written."""
    if path.is_file():
        raise UsageError(f"{path} already exists; give --out another name or remove it")
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise StorageError(f"expected a file to write at {path}, in an existing folder; give --out another name")


def check_replaceable(path: Path, flag: str) -> None:
    """Checks the file of a `flag` before the work. Raises `UsageError` if it is a folder or its folder does not exist."""
    if not path.absolute().parent.is_dir():
        raise UsageError(f"{flag} {path}: there is no folder {path.absolute().parent}; make it, or write elsewhere")
    if path.is_dir():
        raise UsageError(f"{flag} {path} is a folder; name a file")


@contextlib.contextmanager
def whole(final: Path) -> Iterator[Path]:
    """A path next to `final` for a file or folder, renamed to `final` if the block succeeds, removed if it fails.
    Raises `UsageError` if `final` exists, `StorageError` if the disk refuses."""
    check_free(final)
    final = final.absolute()
    partial = final.with_name(final.name + ".partial")
    try:
        _remove(partial)
        partial.parent.mkdir(parents=True, exist_ok=True)
        yield partial
        if partial.is_dir():
            sync_folder(partial)
        check_free(final)
        partial.rename(final)
        sync_name(final)
    except OSError as error:
        raise storage_error(error, f"writing {final}") from None
    finally:
        _remove(partial)


def _remove(path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True)
    with contextlib.suppress(OSError):
        path.unlink()
