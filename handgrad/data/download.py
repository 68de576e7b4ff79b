"""One file over HTTP: resumed, retried, and under its final name only once verified."""

import functools
import hashlib
import http.client
import os
import re
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

from handgrad.data.sources import Download
from handgrad.errors import DataError, StorageError, storage_errors

ATTEMPTS = 5  # in a row without a byte gained
BACKOFF_SECONDS = 1.0  # before the second attempt; doubled for each one after
TIMEOUT_SECONDS = 60.0  # without a byte
BLOCK_BYTES = 1 << 20

OnBytes = Callable[[int, int | None], None]  # (bytes on the disk, total if known)


def download(source: Download, path: Path, on_bytes: OnBytes | None = None) -> None:
    """Downloads to `path`, which appears only once its size and hash are verified; goes on from `path`.partial.

    A lost connection, a short body or a server error is tried again, up to five times in a row without progress; wrong
    content once, from its first byte. Raises DataError: no such file, no access, or content that stays wrong;
    StorageError: the network or the disk.
    """
    if path.is_file():
        return
    partial = path.with_name(path.name + ".partial")
    failures, wrong_contents = 0, 0  # attempts in a row without progress; attempts that ended with wrong content
    with storage_errors(f"writing {partial}"):
        path.parent.mkdir(parents=True, exist_ok=True)
        while True:
            before = _size(partial)
            reason = _continue_download(source, partial, on_bytes)
            if not reason:
                reason = _verify(source, partial)
                if not reason:
                    partial.replace(path)
                    return
                partial.unlink()
                wrong_contents += 1
                if wrong_contents == 2:
                    raise DataError(f"expected {reason} from {source.url}; it was replaced or damaged there, try later")
            failures = 0 if _size(partial) > before else failures + 1
            if failures == ATTEMPTS:
                raise StorageError(
                    f"expected {source.url}, found {reason} in {ATTEMPTS} attempts; check the connection and run the "
                    f"same command again, it goes on from {partial}"
                )
            time.sleep(min(BACKOFF_SECONDS * 2 ** max(0, failures - 1), 30.0))


def _continue_download(source: Download, partial: Path, on_bytes: OnBytes | None) -> str:
    """One attempt to complete `partial`: "" if it is, else what went wrong. DataError where another cannot help."""
    have = _size(partial)
    if have and have == source.size_bytes:
        return ""
    request = urllib.request.Request(source.url, headers={"User-Agent": "handgrad", "Accept-Encoding": "identity"})
    if have:
        request.add_header("Range", f"bytes={have}-")
    _authorize(request)
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS) as response:
            length = response.headers.get("Content-Length")
            if length is not None and not re.fullmatch(r"[0-9]{1,18}", length):
                return f"a Content-Length of {length!r:.60}"
            start = re.match(r"bytes ([0-9]+)-", response.headers.get("Content-Range") or "")
            if response.status == 206 and (start is None or start[1] != str(have)):
                partial.unlink(missing_ok=True)
                return "a range that was not asked for"
            if response.status != 206:  # the server ignores ranges: it sends all of it
                have = 0
            sizes = [source.size_bytes, None if length is None else have + int(length)]
            total = min((size for size in sizes if size is not None), default=None)
            with storage_errors(f"writing {partial}"), partial.open("ab" if have else "wb") as file:
                # Of a longer body no more than a block past the end: `_verify` refuses it.
                while (total is None or have <= total) and (block := _read(response)):
                    file.write(block)
                    have += len(block)
                    if on_bytes:
                        on_bytes(have, total)
                file.flush()
                os.fsync(file.fileno())
    except urllib.error.HTTPError as error:
        if error.code == 416:
            partial.unlink(missing_ok=True)  # longer than the file: not a part of it
            return "a partial file that does not fit"
        if error.code < 500 and error.code not in (408, 429):
            hint = "log in with `hf auth login`" if error.code in (401, 403) else "check the name"
            raise DataError(f"expected {source.url}, found HTTP {error.code}; {hint}") from None
        return f"HTTP {error.code}"
    except _Dropped as error:
        return str(error)
    except (OSError, http.client.HTTPException) as error:  # urllib.error.URLError is an OSError
        return f"no answer ({getattr(error, 'reason', None) or error})"
    if total is not None and have < total:
        return f"{have} of {total} bytes"
    return ""


class _Dropped(Exception):
    """The connection broke while a body was read; kept apart from an OSError of the disk."""


def _read(response: http.client.HTTPResponse) -> bytes:
    try:
        return response.read1(BLOCK_BYTES)
    except (OSError, http.client.HTTPException) as error:
        raise _Dropped(f"a dropped connection ({error})") from None


def _authorize(request: urllib.request.Request) -> None:
    endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")
    if request.full_url.startswith(endpoint + "/"):
        import huggingface_hub

        token = huggingface_hub.get_token()
        if token:  # unredirected: the storage behind the hub must not see it
            request.add_unredirected_header("Authorization", f"Bearer {token}")


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _verify(source: Download, path: Path) -> str:
    """The difference between `path` and what the source promises, or ""."""
    size_bytes = path.stat().st_size
    if source.size_bytes is not None and size_bytes != source.size_bytes:
        return f"{source.size_bytes} bytes, found {size_bytes}"
    for algorithm, expected in (("sha256", source.sha256), ("sha1", source.git_sha1)):
        if expected is None:
            continue
        # Git hashes "blob SIZE", NUL, then the content.
        prefix = b"blob %d\0" % size_bytes if algorithm == "sha1" else b""
        with path.open("rb") as file:
            found = hashlib.file_digest(file, functools.partial(hashlib.new, algorithm, prefix)).hexdigest()
        if found != expected:
            return f"{algorithm} {expected}, found {found}"
    return ""
