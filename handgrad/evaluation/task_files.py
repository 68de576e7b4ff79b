"""The rows of a task's file, each with its place: .jsonl (also .gz), .json, .parquet, and .txt, a text per line."""

import gzip
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from handgrad.errors import DataError, UsageError, storage_error

SUFFIXES = (".jsonl", ".jsonl.gz", ".json", ".parquet", ".txt")


@dataclass(frozen=True)
class Row:
    """One row of a file and where it stands, for messages: "line 3 of FILE"."""

    record: dict[str, Any]
    where: str

    def _field(self, name: str, wanted: str) -> Any:
        if name not in self.record:
            found = ", ".join(map(str, self.record)) or "none"
            raise DataError(f"expected {wanted} in {name!r}, found only the keys {found:.200} in {self.where}")
        return self.record[name]

    def wrong(self, name: str, wanted: str, found: Any) -> DataError:
        return DataError(f"expected {wanted} in {name!r}, found {found!r:.80} in {self.where}; repair or remove it")

    def text(self, name: str) -> str:
        value = self._field(name, "text")
        if not isinstance(value, str):
            raise self.wrong(name, "text", value)
        return self._checked(name, value)

    def _checked(self, name: str, value: str) -> str:
        try:
            value.encode()
        except UnicodeEncodeError:
            raise self.wrong(name, "text without half a surrogate pair", value) from None
        return value

    def texts(self, name: str, *, count: int = 0) -> tuple[str, ...]:
        """A list of texts, two or more, or exactly `count`."""
        wanted = f"a list of {count or 'two or more'} texts"
        value = self._field(name, wanted)
        if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
            raise self.wrong(name, wanted, value)
        if len(value) < 2 or (count and len(value) != count):
            raise self.wrong(name, wanted, value)
        return tuple(self._checked(name, text) for text in value)

    def index(self, name: str, below: int) -> int:
        """A number from 0 to `below` - 1; as text, too, which the Hub has in places."""
        wanted = f"a whole number from 0 to {below - 1}"
        value = self._field(name, wanted)
        number = int(value) if isinstance(value, str) and value.isdecimal() else value
        if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < below:
            raise self.wrong(name, wanted, value)
        return number

    def inner(self, name: str) -> "Row":
        """The object in a field."""
        value = self._field(name, "an object")
        if not isinstance(value, dict):
            raise self.wrong(name, "an object", value)
        return Row(value, f"{name!r} in {self.where}")


def read_rows(path: Path) -> Iterator[Row]:
    """The rows of a file, in order. Raises `UsageError`: no such file, or a name that says nothing; `DataError`: damaged,
    naming the line; `StorageError`: it cannot be read."""
    if not path.is_file():
        raise UsageError(f"expected a task's file at {path}, found none; give NAME=FILE, or a known NAME for the Hub's")
    name = path.name.lower()
    if not name.endswith(SUFFIXES):
        raise UsageError(f"expected a file named {', '.join(SUFFIXES)}, found {path}; rename it if it is one of these")
    try:
        if name.endswith(".parquet"):
            yield from _parquet(path)
            return
        content = path.read_bytes()
    except OSError as error:
        raise storage_error(error, f"reading {path}") from None
    if name.endswith(".gz"):
        try:
            content = gzip.decompress(content)
        except (OSError, EOFError, zlib.error) as error:
            raise DataError(f"expected a gzip file, found {error!s:.100} in {path}; fetch it again") from None
    yield from _whole(content, path) if name.endswith(".json") else _lines(content, path, plain=name.endswith(".txt"))


def _lines(content: bytes, path: Path, *, plain: bool) -> Iterator[Row]:
    for number, line in enumerate(content.split(b"\n"), start=1):
        where = f"line {number} of {path}"
        if not line.strip():
            continue
        try:
            text = line.decode()
            record = {"text": text.removesuffix("\r")} if plain else json.loads(text)
        except UnicodeDecodeError:
            raise DataError(f"expected UTF-8, found other bytes in {where}; convert it, for example with iconv") from None
        except (ValueError, RecursionError):
            raise DataError(f"expected a JSON object, found {line[:60]!r} in {where}; repair or remove the line") from None
        yield _row(record, where)


def _whole(content: bytes, path: Path) -> Iterator[Row]:
    """A JSON file: a list of objects. One object per line, as the Hub also calls .json, is taken for what it is."""
    try:
        loaded = json.loads(content.decode())
    except UnicodeDecodeError:
        raise DataError(f"expected UTF-8, found other bytes in {path}; convert it, for example with iconv") from None
    except json.JSONDecodeError as error:
        if error.msg != "Extra data":
            raise DataError(f"expected JSON, found {error.msg} in line {error.lineno} of {path}; repair the file") from None
        yield from _lines(content, path, plain=False)
        return
    except RecursionError:
        raise DataError(f"expected a list of objects, found deep nesting in {path}; repair the file") from None
    for number, record in enumerate(loaded if isinstance(loaded, list) else [loaded], start=1):
        yield _row(record, f"entry {number} of {path}")


def _parquet(path: Path) -> Iterator[Row]:
    import pyarrow  # here and not above: other formats do without its 50 MB
    import pyarrow.parquet

    try:
        number = 0
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(1024):
                for record in batch.to_pylist():
                    number += 1
                    yield Row(record, f"row {number} of {path}")
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise DataError(f"expected a parquet file, found {error!s:.200} in {path}; fetch it again") from None


def _row(record: Any, where: str) -> Row:
    if not isinstance(record, dict):
        raise DataError(f"expected a JSON object, found {record!r:.60} in {where}; repair or remove it")
    return Row(record, where)
