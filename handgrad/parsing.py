"""JSON and TOML from untrusted files, within bounds: parsed values are safe to compare, print and write. A `Record`, an
object from a file, knows its place, so errors name the file, the line and the field.

Python's own JSON parser accepts integers of hundreds of digits, which no float holds, and values nested so deeply that
`repr` fails; its TOML parser fails on both with exceptions of other types.
"""

import contextlib
import json
import math
import re
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from handgrad.errors import DataError, storage_errors

MOST_DEPTH = 64  # of nested lists and objects
MOST_DIGITS = 40  # of an integer: more than 64 bits ever need
MOST_TOML_BYTES = 1 << 20  # a recipe has a few kilobytes
OPENING = "[{"
BLANKS = re.compile(r"\s*")
DOTTED = re.compile(rf"(?:\.\s*[\w\"'-]+\s*){{{MOST_DEPTH}}}")  # parsing such a key takes quadratic time


def parse_json(content: bytes | str, *, unique: bool = False) -> Any:
    """Parses a JSON text in UTF-8. Raises ValueError, with the reason, if the text is invalid, is nested too deeply, has an
    integer of too many digits, or, with `unique`, has a key twice in an object: parsers differ in the value they keep."""
    text = content.decode("utf-8-sig") if isinstance(content, bytes) else content
    try:
        value = (UNIQUE_DECODER if unique else DECODER).decode(text)
    except RecursionError:
        raise too_deep() from None
    if sum(map(text.count, OPENING)) > MOST_DEPTH:  # otherwise it cannot be nested too deeply
        check_bounds(value)
    return value


def parse_value(text: str, position: int) -> tuple[Any, int]:
    """(JSON value that begins at `position` in a text, the position after it). Raises ValueError as `parse_json` does."""
    try:
        value, end = DECODER.raw_decode(text, position)
    except RecursionError:
        raise too_deep() from None
    check_bounds([value])
    return value, end


def parse_array(blocks: Iterator[str], most: int) -> Iterator[Any]:
    """Yields the entries of a JSON array, whose text comes in `blocks`; never holds all of a file of gigabytes. Raises
    ValueError, with the text that it found, where it expected an entry of at most `most` characters."""
    text, position = next(blocks, "").lstrip()[1:], 0
    while not text.startswith("]", position := blanks_end(text, position)):
        value, after = None, len(text)
        with contextlib.suppress(ValueError):  # not JSON, or an entry that continues in the next block
            value, end = parse_value(text, position)
            after = blanks_end(text, end)
        if after < len(text) and text[after] in ",]":
            yield value
            position = after + (text[after] == ",")
            continue
        goes_on = after >= len(text) and len(text) - position <= most
        text, position, length = text[position:], 0, len(text) - position
        while goes_on and len(text) <= 2 * length and (block := next(blocks, "")):
            text += block
        if len(text) == length:
            raise ValueError(repr(text[:60]) if text else "its end")


def blanks_end(text: str, position: int) -> int:
    """The first non-blank position at or after `position`."""
    blanks = BLANKS.match(text, position)
    return blanks.end() if blanks else position


def parse_toml(content: bytes) -> dict[str, Any]:
    """Parses a TOML text. Raises ValueError as `parse_json` does, and for a text of more than a megabyte."""
    if len(content) > MOST_TOML_BYTES:
        raise ValueError(f"{len(content)} bytes, more than {MOST_TOML_BYTES}")
    if DOTTED.search(text := content.decode()):
        raise too_deep()
    try:
        table = tomllib.loads(text)
    except RecursionError:
        raise too_deep() from None
    except ValueError as error:
        if isinstance(error, tomllib.TOMLDecodeError):
            raise
        raise too_long(sys.get_int_max_str_digits()) from None
    check_bounds(table)
    return table


def check_bounds(value: Any) -> None:
    """Raises ValueError for a parsed value that is nested too deeply or holds an integer of too many digits."""
    level, depth = [value], 0
    while level:
        if depth > MOST_DEPTH:
            raise too_deep()
        if any(isinstance(one, int) and abs(one) >= 10**MOST_DIGITS for one in level):
            raise too_long(MOST_DIGITS)
        lists = [one for one in level if isinstance(one, list)]
        level = [inner for one in level if isinstance(one, dict) for inner in one.values()]
        level += [inner for one in lists for inner in one]
        depth += 1


def whole_number(digits: str) -> int:
    if len(digits) > MOST_DIGITS:
        raise too_long(MOST_DIGITS)
    return int(digits)


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(unique := dict(pairs)) < len(pairs):
        twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"an object has the key {twice!r:.40} twice")
    return unique


def too_long(most: int) -> ValueError:
    return ValueError(f"an integer of more than {most} digits")


def too_deep() -> ValueError:
    return ValueError(f"values nested more than {MOST_DEPTH} deep")


DECODER = json.JSONDecoder(parse_int=whole_number)
UNIQUE_DECODER = json.JSONDecoder(parse_int=whole_number, object_pairs_hook=unique_keys)


# Objects of a file.

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

    def wrong(self, name: str, wanted: str, actual: Any) -> DataError:
        return DataError(f"expected {wanted} in {name!r}, found {actual!r:.80} in {self.where}; repair or remove it")

    def text(self, name: str, *, encodable: bool = True) -> str:
        if not isinstance(value := self.value(name, "text"), str):
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
        """A float; null is NaN. Accepts non-finite numbers as text, because strict JSON has no literals for them."""
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
        """A whole number from 0 to `limit` - 1; with `or_text` also as text of decimal digits."""
        wanted = f"a whole number from 0 to {limit - 1}"
        value = self.value(name, wanted)
        short = or_text and isinstance(value, str) and value.isdecimal() and len(value) <= len(str(COUNT_LIMIT))
        number = int(value) if short else value
        if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < limit:
            raise self.wrong(name, wanted, value)
        return number

    def inner(self, name: str) -> "Record":
        """The object in a field."""
        if not isinstance(value := self.value(name, "an object"), dict):
            raise self.wrong(name, "an object", value)
        return Record(value, f"{name!r:.60} in {self.where}")


def as_record(value: Any, where: str) -> Record:
    """Checks that `value` is an object; raises `DataError` otherwise."""
    if not isinstance(value, dict):
        raise DataError(f"expected a JSON object, found {value!r:.60} in {where}; repair or remove it")
    return Record(value, where)


def parse_record(line: bytes, where: str, *, unique: bool = False) -> Record:
    """Parses a line. Raises `DataError` if it is not a JSON object or, with `unique`, has a key twice."""
    try:
        value = parse_json(line, unique=unique)
    except ValueError as error:  # not JSON, not UTF-8, or out of bounds
        text = f"{line[:60]!r} ({error})" if unique else f"{line[:60]!r}"
        raise DataError(f"expected a JSON object, found {text} in {where}; repair or remove the line") from None
    return as_record(value, where)


def numbered_lines(content: bytes, path: Path) -> Iterator[tuple[bytes, str]]:
    """Yields (line, place) for every line that is not blank."""
    for number, line in enumerate(content.split(b"\n"), start=1):
        if line.strip():
            yield line, f"line {number} of {path}"


def readable_records(path: Path) -> Iterator[Record]:
    """Yields the records of a file in order. Skips other lines: a kill may have cut the last one. Raises `StorageError`."""
    with storage_errors(f"reading {path}"):
        content = path.read_bytes()
    for line, where in numbered_lines(content, path):
        with contextlib.suppress(DataError):
            yield parse_record(line, where)
