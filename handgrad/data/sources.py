"""Streams documents from local files in bounded memory: .txt and .md (a document per file), .jsonl, .json and .parquet (a
document per row).

All but .md and .parquet may be compressed as `.gz`. Text is UTF-8; other bytes are refused with their offset. A position
counts the bytes read from the file on disk, for progress.
"""

import codecs
import contextlib
import difflib
import glob
import gzip
import shlex
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal, cast

from handgrad.errors import DataError, storage_error
from handgrad.names import nearest_name
from handgrad.parsing import parse_array, parse_json

Format = Literal["txt", "jsonl", "parquet"]
SUFFIXES: dict[str, Format] = {
    ".txt": "txt",
    ".txt.gz": "txt",
    ".md": "txt",
    ".jsonl": "jsonl",
    ".jsonl.gz": "jsonl",
    ".parquet": "parquet",
    ".json": "jsonl",
    ".json.gz": "jsonl",
}
BUILT_IN = ("stories", "questions", "shakespeare", "tinystories", "fineweb", "fineweb-edu")  # names that `prepare` knows
BY_NAME = (".json", ".json.gz")  # read only if named: in a folder most are settings
FOLDER_SUFFIXES = tuple(suffix for suffix in SUFFIXES if suffix not in BY_NAME)
HUB_SUFFIXES = tuple(suffix for suffix in SUFFIXES if suffix != ".md")  # a dataset's README.md only describes it
TALKS = {"messages", "conversations", "instruction", "prompt", "question"}  # keys of rows that `chat` reads
BLOCK_BYTES = 1 << 18
BLANKS_BYTES = 1 << 12  # of blank lines to skip at once: the file's buffer holds them
MAX_ROW_BYTES = 64 << 20  # a row is held in memory; a longer document belongs in a .txt, which is read in blocks
PARQUET_ROWS, PARQUET_BYTES = 8, 64 << 20  # per batch, at most
DICTIONARY_BYTES = 8 << 20  # largest column of a row group to read as a dictionary: reading accumulates it
# Largest expansion of a compressed file: prose compresses to a tenth; a file beyond this was made to exhaust memory.
MOST_EXPANSION = 200
FREE_BYTES = 1 << 30  # any file may expand to this size
FREE_CHUNK_BYTES = 256 << 20  # any column of a row group may expand to this size: a page of it is held in memory


@dataclass(frozen=True)
class Download:
    """The origin of a file and its hash: SHA-256, or git's SHA-1 for a small file."""

    url: str
    size_bytes: int | None = None
    sha256: str | None = None
    git_sha1: str | None = None


@dataclass(frozen=True)
class SourceFile:
    """One input file. `fingerprint` changes when its content does; a `download` must be fetched to `path` first."""

    name: str
    path: Path
    size_bytes: int
    fingerprint: str
    download: Download | None = None

    @property
    def format(self) -> Format:
        """Its format, from its name; DataError: an unknown suffix."""
        for suffix, format in SUFFIXES.items():
            if self.name.lower().endswith(suffix):
                return format
        raise DataError(f"expected a file named {', '.join(SUFFIXES)}, found {self.path}; convert it, or rename plain text")


def find_local(spec: str) -> list[SourceFile]:
    """The files of a path: a file, the files below a folder, or the matches of a glob; sorted by name. Raises
    DataError: there is none, or a single file has an unknown type."""
    path = Path(spec).expanduser()
    if path.is_file():
        texts, root = [path], path.parent
    elif path.is_dir():
        texts, root = sorted(filter(is_text, files_below(path))), path
        if not texts:
            by_name = any(is_text(file, BY_NAME) for file in files_below(path))
            remedy = f"name its .json files: {str(path / '*.json')!r}" if by_name else "name another folder or add --images"
            raise DataError(f"expected {', '.join(FOLDER_SUFFIXES)} files in {path}, found none; {remedy}")
    else:
        suffixes = BY_NAME if spec.lower().endswith(BY_NAME) else FOLDER_SUFFIXES
        paths = map(Path, glob.glob(str(path), recursive=True))  # noqa: PTH207
        texts, root = sorted(path for path in paths if is_text(path, suffixes)), Path()
        if not texts:
            hint = "the glob matches no text file"
            if not glob.has_magic(spec):
                hint = f"there is no such file or folder{nearest_path(path) or nearest_name(spec, BUILT_IN)}"
            if "://" in spec:
                hint = f"it is an address; `curl -LO {shlex.quote(spec)}` downloads the file, which you can then name"
            raise DataError(
                f"expected a text source, found {spec!r}, but {hint}; sources are a file, a folder, a quoted glob, "
                f"{', '.join(BUILT_IN)}, or a hub dataset OWNER/NAME[:CONFIG]"
            )
    files = []
    for path in texts:
        status = path.stat()
        name = path.relative_to(root).as_posix() if path.is_relative_to(root) else path.as_posix()
        files.append(SourceFile(name, path, status.st_size, f"modified {status.st_mtime_ns}"))
        _ = files[-1].format  # refuses a single file of unknown type before any work
    return files


def files_below(folder: Path) -> Iterator[Path]:
    """The files in and below `folder`, except hidden files and files in hidden folders such as .git and .venv."""
    for path in folder.rglob("*"):
        if path.is_file() and not any(part.startswith(".") for part in path.relative_to(folder).parts):
            yield path


def passed_over(spec: str) -> dict[str, int]:
    """Counts, by suffix, the files below a folder whose names are not a text file's; empty for any other source."""
    folder = Path(spec).expanduser()
    others = (path for path in files_below(folder) if not is_text(path)) if folder.is_dir() else ()
    return dict(Counter(path.suffix.lower() or "no suffix" for path in others).most_common())


def read_text(path: Path, start: int, stop: int) -> Iterator[str]:
    """The text in bytes [start, stop) of a file, in blocks, without the byte-order mark that Windows puts before it.
    Raises DataError: bytes that are not UTF-8, with their offset, or a damaged .gz; StorageError: the file cannot be
    read."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    with reading(path), open_plain(path) as file:
        file.seek(start)
        while start < stop:
            block = file.read(min(BLOCK_BYTES, stop - start))
            if not block:
                raise DataError(f"expected {stop} bytes, found {start} in {path}; it shrank while it was read")
            pending = len(decoder.getstate()[0])  # bytes of a character that the last block cut
            start += len(block)
            try:
                text = decoder.decode(block, final=start >= stop)
            except UnicodeDecodeError as error:
                raise _not_utf8(path, start - len(block) - pending + error.start) from None
            yield text.removeprefix("\ufeff") if start == len(block) else text


def read_rows(file: SourceFile, text_field: str) -> Iterator[tuple[int, str]]:
    """(position, text) of every row that has text; skips empty and null texts. Raises DataError: damaged, not UTF-8, no
    column or key `text_field`, or a row above 64 MiB; StorageError: unreadable."""
    rows, characters = _read_jsonl if file.format == "jsonl" else _read_parquet, 0
    with reading(file.path):
        for position, text in rows(file.path, text_field):
            if text:
                characters += len(text)
                check_expansion(characters, file.path)
                yield position, text


def check_expansion(size: int, path: Path, packed_bytes: int | None = None, free_bytes: int | None = None) -> None:
    """Raises `DataError` if `size` bytes (or characters) are far more than a file, or its `packed_bytes`, can hold."""
    if size <= (FREE_BYTES if free_bytes is None else free_bytes):
        return
    packed_bytes = path.stat().st_size if packed_bytes is None else packed_bytes
    if size > MOST_EXPANSION * packed_bytes:
        raise DataError(
            f"expected text that is packed to no less than 1/{MOST_EXPANSION}, found {size} bytes or more from"
            f" {packed_bytes} in {path}; unpack it yourself if it is what you want"
        )


def read_objects(path: Path) -> Iterator[tuple[int, str, Any]]:
    """(position after it, its location in words, its content) of every non-blank line of JSON, or of every entry of a
    file that is one array. Raises DataError: a line or an entry that is not JSON, not UTF-8 or above 64 MiB."""
    with path.open("rb") as raw, open_plain(path, raw) as file:
        begin = cast(Any, file).peek(1 << 10).removeprefix(codecs.BOM_UTF8).lstrip()[:1]
        rows = _array_entries(file, path) if begin == b"[" else _json_lines(file, path)
        yield from ((raw.tell(), where, row) for where, row in rows)


def _json_lines(file: IO[bytes], path: Path) -> Iterator[tuple[str, Any]]:
    offset = number = 0
    while line := file.readline(MAX_ROW_BYTES + 1):
        number += 1
        where = f"line {number} of {path}"
        if len(line) > MAX_ROW_BYTES:
            raise DataError(f"expected lines of at most {MAX_ROW_BYTES} bytes, found more in {where}; use a .txt file")
        try:
            row = parse_json(line) if not line.isspace() else None
        except UnicodeDecodeError as error:
            raise _not_utf8(path, offset + error.start) from None
        except ValueError:
            raise DataError(f"expected a JSON object, found {line[:60]!r} in {where}; repair it") from None
        if not line.isspace():
            yield where, row
        elif blanks := len(blanks_ahead(file)):  # a gigabyte of them is slow line by line
            line += (skipped := file.read(blanks))
            number += skipped.count(b"\n")
        offset += len(line)
        check_expansion(offset, path)


def blanks_ahead(file: IO[bytes]) -> bytes:
    """The blank lines at the position of a file, as many as its buffer holds."""
    ahead = cast(Any, file).peek(BLANKS_BYTES)
    return ahead[: ahead.rfind(b"\n", 0, len(ahead) - len(ahead.lstrip())) + 1]


def _array_entries(file: IO[bytes], path: Path) -> Iterator[tuple[str, Any]]:
    number = 0
    try:
        for number, row in enumerate(parse_array(_decoded_blocks(file, path), MAX_ROW_BYTES), start=1):
            yield f"entry {number} of {path}", row
    except ValueError as error:
        if isinstance(error, DataError):
            raise
        where = f"entry {number + 1} of {path}"
        raise DataError(f"expected an array of objects, found {error!s:.100} as {where}; repair the file") from None


def _decoded_blocks(file: IO[bytes], path: Path) -> Iterator[str]:
    decoder, offset = codecs.getincrementaldecoder("utf-8-sig")(), 0
    for block in iter(lambda: file.read(BLOCK_BYTES), b""):
        pending = len(decoder.getstate()[0])  # bytes of a character that the last block cut
        try:
            yield decoder.decode(block)
        except UnicodeDecodeError as error:
            raise _not_utf8(path, offset - pending + error.start) from None
        offset += len(block)
        check_expansion(offset, path)


def _read_jsonl(path: Path, text_field: str) -> Iterator[tuple[int, str | None]]:
    for position, where, row in read_objects(path):
        if not isinstance(row, dict) or text_field not in row:
            remedy = field_to_try(row if isinstance(row, dict) else (), longest_text(row))
            raise DataError(f"expected an object with {text_field!r}, found {keys_of(row)} in {where}; {remedy}")
        text = row[text_field]
        if text is not None and not isinstance(text, str):
            raise DataError(f"expected text in {text_field!r}, found {text!r:.60} in {where}; try --text-field")
        check_text(text or "", where)
        yield position, text


def longest_text(row: Any) -> str:
    """The key of the longest text in a JSON object; empty if it has no text."""
    texts = {key: len(value) for key, value in row.items() if isinstance(value, str)} if isinstance(row, dict) else {}
    return max(texts, key=lambda key: texts[key], default="")[:60]


def field_to_try(keys: Iterable[str], longest: str) -> str:
    """The remedy in an error about rows with these keys and no text."""
    if {"chosen", "rejected"} <= set(keys):
        return "add --preferences --reference MODEL, which prepares pairs of answers"
    chat = "add --chat to the command, which prepares conversations, questions and answers"
    return chat if TALKS & set(keys) else f"try --text-field {longest}".rstrip()


def keys_of(row: Any) -> str:
    """The keys of a JSON object in words, or the type of anything else."""
    return (f"the keys {', '.join(map(str, row))}" if isinstance(row, dict) else f"a {type(row).__name__}")[:200]


def check_text(text: str, where: str) -> None:
    """Raises DataError for a text that UTF-8 cannot encode."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise DataError(f"expected text, found a lone surrogate (\\ud800...) in {where}; repair it") from None


@contextlib.contextmanager
def open_parquet(path: Path) -> Iterator[Any]:
    """A `pyarrow.parquet.ParquetFile` that keeps a small column of texts as a dictionary, so a repeated text is held
    once. Raises DataError: it is damaged, also when the `with` block reads it; a column expands to far more than its
    bytes."""
    import pyarrow  # imported here: workers and other sources do not need it
    import pyarrow.parquet

    try:
        # Without pre_buffer, and with a small buffer, a row group of any size is read page by page.
        options: dict[str, Any] = {"buffer_size": 1 << 20, "pre_buffer": False}
        with pyarrow.parquet.ParquetFile(path, **options) as file:
            columns, metadata = range(len(file.schema)), file.metadata
            texts = {file.schema.column(n).path for n in columns if file.schema.column(n).logical_type.type == "STRING"}
            for chunk in (metadata.row_group(g).column(n) for g in range(metadata.num_row_groups) for n in columns):
                check_expansion(chunk.total_uncompressed_size, path, chunk.total_compressed_size, FREE_CHUNK_BYTES)
                if chunk.total_uncompressed_size > DICTIONARY_BYTES:
                    texts.discard(chunk.path_in_schema)
        with pyarrow.parquet.ParquetFile(path, read_dictionary=list(texts), **options) as file:
            yield file
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:  # a plain OSError for a damaged page
        raise DataError(f"expected a parquet file, found {error!s:.200} in {path}; fetch it again") from None


def _read_parquet(path: Path, text_field: str) -> Iterator[tuple[int, str | None]]:
    with open_parquet(path) as file:
        column = file.schema_arrow.get_field_index(text_field)
        if column < 0:
            names, remedy = ", ".join(file.schema_arrow.names), field_to_try(file.schema_arrow.names, first_text(file))
            raise DataError(f"expected a column {text_field!r}, found {names:.200} in {path}; {remedy}")
        kind = file.schema_arrow.field(column).type
        kind = getattr(kind, "value_type", kind) if str(kind).startswith("dictionary") else kind
        if str(kind) not in ("string", "large_string", "string_view"):
            raise DataError(f"expected text in column {text_field!r}, found {kind} in {path}; try --text-field")
        size_bytes, row, row_count = path.stat().st_size, 0, file.metadata.num_rows
        for batch in batches(file, [text_field]):
            for value in batch.column(0):
                row += 1
                try:
                    text = value.as_py()
                except UnicodeDecodeError:
                    raise DataError(f"expected UTF-8, found other bytes in row {row} of {path}; repair it") from None
                if text is not None and len(text) > MAX_ROW_BYTES:
                    long = f"{len(text)} in row {row} of {path}"
                    raise DataError(f"expected rows below {MAX_ROW_BYTES} characters, found {long}; use a .txt file")
                yield size_bytes * row // row_count, text


def first_text(file: Any) -> str:
    """The first column of texts in a parquet file; empty if there is none."""
    kinds = ("string", "large_string", "dictionary<values=string", "dictionary<values=large_string")
    return next((f"{field.name:.60}" for field in file.schema_arrow if str(field.type).startswith(kinds)), "")


def batches(file: Any, columns: list[str] | None = None) -> Iterator[Any]:
    """The rows of a parquet file, in batches bounded in rows and, by the sizes that the file states, in bytes."""
    for number in range(file.metadata.num_row_groups):
        group = file.metadata.row_group(number)
        rows = PARQUET_BYTES * group.num_rows // max(1, group.total_byte_size)
        rows = max(1, min(PARQUET_ROWS, rows))
        yield from file.iter_batches(rows, row_groups=[number], columns=columns, use_threads=False)


def nearest_path(path: Path) -> str:
    """' (did you mean X?)' if the folder of a missing path has a text or folder of a similar name X; else empty."""
    beside = list[str]()
    with contextlib.suppress(OSError):  # a missing or unreadable folder
        beside = [file.name for file in path.parent.iterdir() if file.is_dir() or is_text(file, tuple(SUFFIXES))]
    near = difflib.get_close_matches(path.name, beside, n=1, cutoff=0.8)
    return f" (did you mean {path.with_name(near[0])}?)" if near else ""


def holds_text(path: Path) -> bool:
    """True for a text file and for a folder with one."""
    return is_text(path) or (path.is_dir() and any(map(is_text, files_below(path))))


def is_text(path: Path, suffixes: tuple[str, ...] = FOLDER_SUFFIXES) -> bool:
    return path.is_file() and not path.name.startswith(".") and path.name.lower().endswith(suffixes)


def open_plain(path: Path, raw: IO[bytes] | None = None) -> IO[bytes]:
    """A file, or its file object `raw`, opened for reading; a .gz is decompressed."""
    if path.suffix.lower() == ".gz":
        return cast(IO[bytes], gzip.open(raw or path, "rb"))
    return raw or path.open("rb")


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Converts errors of reading `path` to DataError (damaged, removed) and StorageError."""
    try:
        yield
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DataError(f"expected a gzip file, found {error!s:.100} in {path}; fetch it again") from None
    except FileNotFoundError:
        raise DataError(f"expected the file {path}, found none; it was removed, name another source") from None
    except OSError as error:
        raise storage_error(error, f"reading {path}") from None


def _not_utf8(path: Path, offset: int) -> DataError:
    return DataError(f"expected UTF-8, found other bytes at byte {offset} of {path}; convert it, for example with iconv")
