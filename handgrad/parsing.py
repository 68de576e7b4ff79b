"""JSON and TOML from anybody's file, within bounds: what is returned can be compared, shown and written without a surprise.

Python's own readers pass on integers of hundreds of digits, which no float holds, and values nested so deeply that
`repr` fails; TOML's fails on either with an error of its own.
"""

import contextlib
import json
import re
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from typing import Any

MOST_DEPTH = 64  # of lists and objects in each other
MOST_DIGITS = 40  # of an integer: more than 64 bits ever need
MOST_TOML_BYTES = 1 << 20  # a recipe has some kilobytes
OPENING = "[{"
BLANKS = re.compile(r"\s*")
DOTTED = re.compile(rf"(?:\.\s*[\w\"'-]+\s*){{{MOST_DEPTH}}}")  # such a key takes time with the square of its length


def parse_json(content: bytes | str, *, unique: bool = False) -> Any:
    """The value of a JSON text in UTF-8. Raises ValueError, with the reason: no such text, nested too deeply, an integer of
    too many digits, or with `unique` a key that an object has twice: readers differ in which value they take."""
    text = content.decode("utf-8-sig") if isinstance(content, bytes) else content
    try:
        value = (UNIQUE_DECODER if unique else DECODER).decode(text)
    except RecursionError:
        raise too_deep() from None
    if sum(map(text.count, OPENING)) > MOST_DEPTH:  # else it cannot be
        check_bounds(value)
    return value


def parse_value(text: str, place: int) -> tuple[Any, int]:
    """(value, the place after it) of the JSON that begins at `place` of a text. Raises ValueError as `parse_json` does."""
    try:
        value, end = DECODER.raw_decode(text, place)
    except RecursionError:
        raise too_deep() from None
    check_bounds([value])
    return value, end


def parse_array(blocks: Iterator[str], most: int) -> Iterator[Any]:
    """The entries of an array, in a text that begins with its bracket, one after another: a file of gigabytes is not held.

    Raises ValueError with the text that stands where it expected an entry of at most `most` characters.
    """
    text, place = next(blocks, "").lstrip()[1:], 0
    while not text.startswith("]", place := blanks_end(text, place)):
        value, after = None, len(text)
        with contextlib.suppress(ValueError):  # no JSON, or an entry that goes on in the next block
            value, end = parse_value(text, place)
            after = blanks_end(text, end)
        if after < len(text) and text[after] in ",]":
            yield value
            place = after + (text[after] == ",")
            continue
        goes_on = after >= len(text) and len(text) - place <= most
        text, place, length = text[place:], 0, len(text) - place
        while goes_on and len(text) <= 2 * length and (block := next(blocks, "")):
            text += block
        if len(text) == length:
            raise ValueError(repr(text[:60]) if text else "its end")


def blanks_end(text: str, place: int) -> int:
    """The first place from `place` on that is no blank."""
    found = BLANKS.match(text, place)
    return found.end() if found else place


def parse_toml(content: bytes) -> dict[str, Any]:
    """The table of a TOML text. Raises ValueError as `parse_json` does, and for a text of more than a megabyte."""
    if len(content) > MOST_TOML_BYTES:
        raise ValueError(f"{len(content)} bytes, more than {MOST_TOML_BYTES}")
    text = content.decode()
    if DOTTED.search(text):
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
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"an object has the key {twice!r:.40} twice")
    return found


def too_long(most: int) -> ValueError:
    return ValueError(f"an integer of more than {most} digits")


def too_deep() -> ValueError:
    return ValueError(f"values nested more than {MOST_DEPTH} deep")


DECODER = json.JSONDecoder(parse_int=whole_number)
UNIQUE_DECODER = json.JSONDecoder(parse_int=whole_number, object_pairs_hook=unique_keys)
