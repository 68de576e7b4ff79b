"""JSON objects from users' files. Each carries its place, so an error names the file, the line and the field."""

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from handgrad.errors import DataError, storage_errors
from handgrad.parsing import parse_json

COUNT_LIMIT = 1 << 53  # a float64, which plots use, holds every whole number below it


@dataclass(frozen=True)
class Record:
    """A JSON object and its place, such as "line 3 of FILE". Its methods raise `DataError` for a field of another type."""

    fields: dict[str, Any]
    where: str

    def value(self, name: str, wanted: str) -> Any:
        if name not in self.fields:
            keys = ", ".join(map(str, self.fields)) or "none"
            raise DataError(f"expected {wanted} in {name!r}, found only the keys {keys:.200} in {self.where}")
        return self.fields[name]

    def wrong(self, name: str, wanted: str, found: Any) -> DataError:
        return DataError(f"expected {wanted} in {name!r}, found {found!r:.80} in {self.where}; repair or remove it")

    def text(self, name: str, *, encodable: bool = True) -> str:
        value = self.value(name, "text")
        if not isinstance(value, str):
            raise self.wrong(name, "text", value)
        return self._encodable(name, value) if encodable else value

    def _encodable(self, name: str, value: str) -> str:
        try:
            value.encode()
        except UnicodeEncodeError:
            raise self.wrong(name, "text without half a surrogate pair", value) from None
        return value

    def texts(self, name: str, *, count: int = 0) -> tuple[str, ...]:
        """A list of at least two texts, or of exactly `count`."""
        wanted = f"a list of {count or 'two or more'} texts"
        value = self.value(name, wanted)
        right = isinstance(value, list) and (len(value) == count if count else len(value) > 1)
        if not right or not all(isinstance(text, str) for text in value):
            raise self.wrong(name, wanted, value)
        return tuple(self._encodable(name, text) for text in value)

    def number(self, name: str) -> float:
        """A float; null is NaN. A writer of strict JSON may spell the non-finite ones as text."""
        value = self.value(name, "a number")
        if value is None:
            return math.nan
        if value in ("NaN", "Infinity", "-Infinity"):
            return float(value)
        try:
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise TypeError
            return float(value)
        except (TypeError, OverflowError):
            raise self.wrong(name, "a number", value) from None

    def count(self, name: str, limit: int = COUNT_LIMIT, *, or_text: bool = False) -> int:
        """A whole number from 0 to `limit` - 1; with `or_text` its digits count as well."""
        wanted = f"a whole number from 0 to {limit - 1}"
        value = self.value(name, wanted)
        short = or_text and isinstance(value, str) and value.isdecimal() and len(value) <= len(str(COUNT_LIMIT))
        number = int(value) if short else value
        if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < limit:
            raise self.wrong(name, wanted, value)
        return number

    def inner(self, name: str) -> "Record":
        """The object in a field."""
        value = self.value(name, "an object")
        if not isinstance(value, dict):
            raise self.wrong(name, "an object", value)
        return Record(value, f"{name!r:.60} in {self.where}")


def record(value: Any, where: str) -> Record:
    """Checks that `value` is an object; raises `DataError` otherwise."""
    if not isinstance(value, dict):
        raise DataError(f"expected a JSON object, found {value!r:.60} in {where}; repair or remove it")
    return Record(value, where)


def parse(line: bytes, where: str, *, unique: bool = False) -> Record:
    """The record in a line. Raises `DataError` if the line is no JSON object, or with `unique` has a key twice."""
    try:
        value = parse_json(line, unique=unique)
    except ValueError as error:  # not JSON, not UTF-8, or out of bounds
        text = f"{line[:60]!r} ({error})" if unique else f"{line[:60]!r}"
        raise DataError(f"expected a JSON object, found {text} in {where}; repair or remove the line") from None
    return record(value, where)


def numbered_lines(content: bytes, path: Path) -> Iterator[tuple[bytes, str]]:
    """(line, place) of every line that is not blank."""
    for number, line in enumerate(content.split(b"\n"), start=1):
        if line.strip():
            yield line, f"line {number} of {path}"


def readable_records(path: Path) -> Iterator[Record]:
    """The records of a file in order, without lines that are none: a kill may have cut the last. Raises `StorageError`."""
    with storage_errors(f"reading {path}"):
        content = path.read_bytes()
    for line, where in numbered_lines(content, path):
        with contextlib.suppress(DataError):
            yield parse(line, where)
