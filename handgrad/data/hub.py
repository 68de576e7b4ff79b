"""Text from the network: hub datasets by name, and tiny Shakespeare. Downloads resume and retry; a file gets its final name
only once it is verified."""

import fnmatch
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
from typing import Any, TypeVar

from handgrad.data.sources import HUB_SUFFIXES, SUFFIXES, Download, SourceFile
from handgrad.errors import DataError, StorageError, storage_errors
from handgrad.files import locked

ALIASES = {
    "tinystories": "roneneldan/TinyStories",
    "fineweb": "HuggingFaceFW/fineweb:sample-10BT",
    "fineweb-edu": "HuggingFaceFW/fineweb-edu:sample-10BT",
}
SHAKESPEARE = Download(
    "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",
    size_bytes=1115394,
    sha256="86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
)
ABOUT = "dataset_info"  # dataset_info.json and dataset_infos.json describe the columns
Answer = TypeVar("Answer")
ATTEMPTS = 5  # in a row that gain no byte
BACKOFF_SECONDS = 1.0  # before the second attempt; doubles for each further one
TIMEOUT_SECONDS = 60.0  # without a byte
BLOCK_BYTES = 1 << 20

OnBytes = Callable[[int, int | None], None]  # (bytes on the disk, total if known)


def is_hub_name(spec: str) -> bool:
    """True for a name that this module resolves: an alias, shakespeare, or OWNER/NAME[:CONFIG]."""
    if spec in ALIASES or spec == "shakespeare":
        return True
    named_like_a_file = spec.lower().endswith(tuple(SUFFIXES))
    return not named_like_a_file and re.fullmatch(r"\w[\w.-]*/\w[\w.-]*(:[\w.+-]+)?", spec) is not None


def default_cache() -> Path:
    """The folder of downloads: $HANDGRAD_CACHE, or handgrad/ in the user's cache folder."""
    if "HANDGRAD_CACHE" in os.environ:
        return Path(os.environ["HANDGRAD_CACHE"])
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "handgrad"


def find_hub(spec: str, split: str = "train") -> list[SourceFile]:
    """The files of a dataset at its newest revision, to be downloaded below `default_cache()`.

    Takes the default configuration unless `spec` names one, and only the split `split` (a run's validation text is taken
    out of train). Raises DataError: no such dataset, configuration or text; StorageError: no connection."""
    cache = default_cache()
    if spec == "shakespeare":
        path = cache / "shakespeare" / "shakespeare.txt"
        return [SourceFile(path.name, path, SHAKESPEARE.size_bytes or 0, str(SHAKESPEARE.sha256), SHAKESPEARE)]
    import huggingface_hub.constants  # imported here: local sources and workers do not need it

    name, _, config = ALIASES.get(spec, spec).partition(":")
    endpoint = os.environ.get("HF_ENDPOINT", huggingface_hub.constants.ENDPOINT).rstrip("/")
    api = huggingface_hub.HfApi(endpoint=endpoint)
    info = _ask(lambda: api.dataset_info(name), f"asking {endpoint} for the dataset {name}")
    names = [sibling.rfilename for sibling in info.siblings or []]
    chosen = choose_files(names, (info.card_data.to_dict() if info.card_data else {}).get("configs"), config, name, split)
    paths = []
    for start in range(0, len(chosen), 100):
        part = chosen[start : start + 100]
        paths += _ask(
            lambda part=part: api.get_paths_info(name, part, repo_type="dataset", revision=info.sha),
            f"asking {endpoint} for the files of {name}",
        )
    files = []
    for entry in sorted(paths, key=lambda entry: entry.path):
        url = huggingface_hub.hf_hub_url(name, entry.path, repo_type="dataset", revision=info.sha, endpoint=endpoint)
        lfs_sha256 = entry.lfs.sha256 if entry.lfs else None
        origin = Download(url, entry.size, lfs_sha256, None if lfs_sha256 else entry.blob_id)
        path = cache / name / str(info.sha) / entry.path
        files.append(SourceFile(entry.path, path, entry.size, str(lfs_sha256 or entry.blob_id), origin))
    return files


def choose_files(names: list[str], configs: Any, config: str, dataset: str, split: str = "train") -> list[str]:
    """The files among a dataset's `names` that hold the `split` of `config` ("": the default one).

    `configs` is the list of that name in the dataset's card, which is written by hand and may have any shape. Raises
    DataError: there is no such configuration, or no text."""
    texts = [name for name in names if name.lower().endswith(HUB_SUFFIXES) and not name.startswith((".", ABOUT))]
    known = {c["config_name"]: c for c in configs or [] if isinstance(c, dict) and isinstance(c.get("config_name"), str)}
    if config:
        entry = known.get(config)
    else:
        only = next(iter(known.values())) if len(known) == 1 else None
        entry = next((c for c in known.values() if c.get("default")), known.get("default", only))
    patterns = _split_patterns(entry.get("data_files"), split) if entry else []
    chosen = [name for name in texts if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)]
    if not chosen and config:
        chosen = [name for name in texts if f"/{config}/" in f"/{name}"]
        if split != "train":  # rows of another split are other questions
            chosen = [name for name in chosen if split in name.lower()]
        if not chosen:
            listed = ", ".join(known) or "none"
            raise DataError(f"expected a configuration {config!r} of {dataset}, found {listed:.300}; give {dataset}:CONFIG")
    if not chosen:
        # The card names no splits: takes one format, and of it the files named after the split, if there are any.
        for endings in ((".parquet",), (".jsonl", ".jsonl.gz"), (".json", ".json.gz"), (".txt", ".txt.gz")):
            chosen = chosen or [name for name in texts if name.lower().endswith(endings)]
        chosen = [name for name in chosen if split in name.lower()] or (chosen if split == "train" else [])
    if not chosen:
        what = "" if split == "train" else f" of its {split} split"
        raise DataError(f"expected {', '.join(HUB_SUFFIXES)} files{what} in {dataset}, found none; download and convert it")
    return chosen


def fetch(file: SourceFile, on_bytes: OnBytes | None = None) -> Path:
    """The path of a source file, downloaded first if it has a `download`. Raises the errors of `download`."""
    if file.download is not None:
        download(file.download, file.path, on_bytes)
    return file.path


def hub_failures() -> tuple[type[BaseException], ...]:
    """The errors of `huggingface_hub`: an invalid name, the network, the disk."""
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    # The base of HfHubHTTPError belongs to the HTTP library, which changed twice: it has no stable name.
    return HFValidationError, HfHubHTTPError, HfHubHTTPError.__bases__[0], OSError


def _split_patterns(data_files: Any, split: str) -> list[str]:
    """The file patterns of a split, from a card's `data_files`: text, a list of it, or a list per split."""
    patterns = []
    for entry in data_files if isinstance(data_files, list) else [data_files]:
        if isinstance(entry, dict):
            if entry.get("split", "train") != split:
                continue
            entry = entry.get("path")
        elif split != "train":
            continue
        patterns += [pattern for pattern in (entry if isinstance(entry, list) else [entry]) if isinstance(pattern, str)]
    return patterns


def _ask(question: Callable[[], Answer], doing: str) -> Answer:
    """The hub's answer; retries transient failures. Raises DataError: bad name, no access; StorageError: no connection."""
    from huggingface_hub.errors import HFValidationError, OfflineModeIsEnabled

    reason = ""
    for attempt in range(ATTEMPTS):
        try:
            return question()
        except HFValidationError as error:
            raise DataError(f"expected a dataset OWNER/NAME, found {error!s:.200}; check the name") from None
        except OfflineModeIsEnabled:
            raise StorageError(
                f"{doing}: expected a connection, found HF_HUB_OFFLINE set; unset it, or use a local file or stories"
            ) from None
        except hub_failures() as error:
            status = getattr(getattr(error, "response", None), "status_code", None)
            if status is not None and 400 <= status < 500 and status not in (408, 429):
                raise DataError(
                    f"{doing}: expected an answer, found HTTP {status}; there is no such public dataset, nor a local "
                    "file of that name: check it, or log in with `hf auth login`"
                ) from None
            reason = f"{error!s:.200}"
            if attempt < ATTEMPTS - 1:
                time.sleep(BACKOFF_SECONDS * 2**attempt)
    raise StorageError(f"{doing} failed: {reason}; check the connection, or use a local file or stories")


def download(source: Download, path: Path, on_bytes: OnBytes | None = None) -> None:
    """Downloads to `path`, which appears only once its size and hash are verified; resumes from `path`.partial.

    Retries a lost connection, a short body or a server error up to five times in a row without progress, and wrong
    content once, from its first byte. Raises DataError: no such file, no access, or content that stays wrong;
    StorageError: the network or the disk."""
    if path.is_file():
        return
    partial = path.with_name(path.name + ".partial")
    failures, wrong_contents = 0, 0  # attempts in a row without progress; attempts that ended with wrong content
    with storage_errors(f"writing {partial}"), locked(path.parent, f"waiting for another download into {path.parent}"):
        while not path.is_file():
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
    """Tries once to complete `partial`: returns "", or what went wrong. Raises DataError if a retry cannot help."""
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
            if response.status != 206:  # the server ignores ranges and sends the whole file
                have = 0
            sizes = [source.size_bytes, None if length is None else have + int(length)]
            total = min((size for size in sizes if size is not None), default=None)
            with storage_errors(f"writing {partial}"), partial.open("ab" if have else "wb") as file:
                # Reads at most a block past the end of a body that is too long: `_verify` refuses it.
                while (total is None or have <= total) and (block := _read(response)):
                    file.write(block)
                    have += len(block)
                    if on_bytes:
                        on_bytes(have, total)
                file.flush()
                os.fsync(file.fileno())
    except urllib.error.HTTPError as error:
        if error.code == 416:
            partial.unlink(missing_ok=True)  # it is longer than the file
            return "a partial file that does not fit"
        if error.code < 500 and error.code not in (408, 429):
            hint = "log in with `hf auth login`" if error.code in (401, 403) else "check the name"
            raise DataError(f"expected {source.url}, found HTTP {error.code}; {hint}") from None
        return f"HTTP {error.code}"
    except _Dropped as error:
        return str(error)
    except (OSError, http.client.HTTPException) as error:  # urllib.error.URLError is an OSError
        return f"no answer ({getattr(error, 'reason', None) or error})"
    return f"{have} of {total} bytes" if total is not None and have < total else ""


class _Dropped(Exception):
    """The connection broke while reading a body; unlike an OSError, not an error of the disk."""


def _read(response: http.client.HTTPResponse) -> bytes:
    try:
        return response.read1(BLOCK_BYTES)
    except (OSError, http.client.HTTPException) as error:
        raise _Dropped(f"a dropped connection ({error})") from None


def _authorize(request: urllib.request.Request) -> None:
    if request.full_url.startswith(os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/") + "/"):
        import huggingface_hub

        token = huggingface_hub.get_token()
        if token:  # unredirected: the storage behind the hub must not see it
            request.add_unredirected_header("Authorization", f"Bearer {token}")


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _verify(source: Download, path: Path) -> str:
    """The difference between `path` and the size or hash of its source, or ""."""
    size_bytes = path.stat().st_size
    if source.size_bytes is not None and size_bytes != source.size_bytes:
        return f"{source.size_bytes} bytes, found {size_bytes}"
    for algorithm, expected in (("sha256", source.sha256), ("sha1", source.git_sha1)):
        if expected is None:
            continue
        # Git hashes "blob SIZE", NUL, then the content.
        prefix = b"blob %d\0" % size_bytes if algorithm == "sha1" else b""
        with path.open("rb") as file:
            actual = hashlib.file_digest(file, functools.partial(hashlib.new, algorithm, prefix)).hexdigest()
        if actual != expected:
            return f"{algorithm} {expected}, found {actual}"
    return ""
