"""Pictures as tokens: a vocabulary of a palette's colours, with a token for each class or the bytes of captions.

A picture is its codes, row by row from the top left. In a text a code is one character of Unicode's private plane 15. A
class is its name in angle brackets before the codes; a caption is a line before them, or after them. Ids: the colours, then
the classes, then the bytes, then end-of-text. The vocabulary of an autoencoder's codes holds its weights.
"""

import functools
import hashlib
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np

from handgrad.data.tokenizer import END_OF_TEXT, Tokenizer
from handgrad.errors import DataError, UsageError
from handgrad.parsing import parse_json

PALETTE, PALETTE_FILE = "palette", "palette.json"  # the tokenizer's kind, its file in an exported folder
FIRST_CODE = 0xF0000  # the character of code 0
MOST_COLOURS, MOST_CLASSES = 1 << 15, 1 << 14  # with bytes and end-of-text, tokens stay within uint16
MOST_SIDE = 1024
VOCABULARY = "vocabulary "  # before the SHA-256 of one that pictures share with a model
RGB = "rgb"  # a decoder: bytes of red, green and blue in turn
GREYS = tuple((n, n, n) for n in range(256))
MISSING = -1  # a code that an unfinished picture lacks
GREY = (128, 128, 128)
CLASS = r"[\w. -]{1,100}"  # a class's name, which stands in angle brackets in a text
SPECIAL = re.compile(f"([\U000f0000-\U000f7fff]+)|<({CLASS})>")
CODES = re.compile("([\U000f0000-\U000f7fff]+)")


@dataclass(frozen=True)
class Codes:
    """A picture's form: `rows` x `columns` codes, each one of `colours`."""

    rows: int
    columns: int
    colours: tuple[tuple[int, int, int], ...]  # red, green, blue, 0 to 255; of an autoencoder's code, its mean colour
    classes: tuple[str, ...] = ()
    captions: bool = False
    decoder: str = ""  # what draws the codes: "" if they are pixels, `RGB`, or the weights of `evaluation.codec`

    @property
    def count(self) -> int:
        """Codes of a picture."""
        return self.rows * self.columns

    @property
    def size(self) -> tuple[int, int]:
        """Rows and columns of a picture without an autoencoder."""
        return self.rows, self.columns // (3 if self.decoder == RGB else 1)

    def pixels(self, codes: np.ndarray) -> np.ndarray:
        """codes (rows, columns) -> colours (*size, 3), uint8; missing ones are grey, an autoencoder's are mean colours."""
        colours = np.array([*self.colours, GREY], np.uint8)[codes]
        return colours[..., 0].reshape(*self.size, 3) if self.decoder == RGB else colours

    def class_text(self, name: str) -> str:
        """The text of a class, named or numbered. Raises `UsageError` for an unknown one."""
        if name.isdecimal() and name not in self.classes and int(name) < len(self.classes):
            name = self.classes[int(name)]
        if name not in self.classes:
            some = ", ".join(self.classes[:20]) or "none: it was trained without classes"
            raise UsageError(f"expected a class of the model, found {name!r}; it has {some}")
        return f"<{name}>"


class View(NamedTuple):
    """Pictures as codes, and codes as pictures."""

    size: tuple[int, int]  # rows and columns of a picture
    encode: Callable[[np.ndarray], np.ndarray]  # pictures (B, *size, 3), uint8 -> codes (B, rows, columns)
    paint: Callable[[np.ndarray], np.ndarray]  # codes (rows, columns), `MISSING` among them -> a picture (*size, 3), uint8


def text_of(codes: np.ndarray) -> str:
    """The characters of codes, an array of any shape, row by row."""
    return (codes.astype("<u4") + FIRST_CODE).tobytes().decode("utf-32-le")


def parts_of(text: str, codes: Codes) -> Iterator[str | np.ndarray]:
    """The strings and the pictures (rows, columns), int64, of a text, in order; unfinished ones end in `MISSING`."""
    for part in filter(None, CODES.split(text)):
        if not CODES.match(part):
            yield part
            continue
        every = np.frombuffer(part.encode("utf-32-le"), "<u4").astype(np.int64) - FIRST_CODE
        for first in range(0, len(every), codes.count):
            one = every[first : first + codes.count]
            yield np.pad(one, (0, codes.count - len(one)), constant_values=MISSING).reshape(codes.rows, codes.columns)


def codes_tokenizer(codes: Codes) -> Tokenizer:
    """The tokenizer of texts with pictures of this form."""
    characters = tuple(chr(FIRST_CODE + code).encode() for code in range(len(codes.colours)))
    classes = tuple(f"<{name}>".encode() for name in codes.classes)
    single_bytes = tuple(bytes([b]) for b in range(256)) if codes.captions else ()
    token_bytes = (*characters, *classes, *single_bytes, END_OF_TEXT.encode())
    fields = {name: value for name, value in asdict(codes).items() if name != "decoder" or value}
    content = json.dumps({"type": PALETTE, **fields}).encode()
    encode = functools.partial(_encode, codes)
    sha256 = hashlib.sha256(content).hexdigest()
    return Tokenizer(
        PALETTE, token_bytes, len(token_bytes) - 1, sha256, lambda texts: [*map(encode, texts)], json_bytes=content
    )


def _encode(codes: Codes, text: str) -> np.ndarray:
    classes = {name: len(codes.colours) + n for n, name in enumerate(codes.classes)}
    first_byte = len(codes.colours) + len(classes)
    parts, end = [np.empty(0, np.uint16)], 0

    def plain(piece: str) -> None:
        if piece and not codes.captions:
            wanted = "classes and codes" if classes else "codes"
            raise DataError(f"expected {wanted} alone, found the text {piece[:40]!r}; it was trained without captions")
        parts.append(np.frombuffer(piece.encode(), np.uint8).astype(np.uint16) + np.uint16(first_byte))

    for special in SPECIAL.finditer(text):
        run, name = special.groups()
        if name is not None and name not in classes:
            continue
        plain(text[end : special.start()])
        end = special.end()
        values = np.frombuffer(run.encode("utf-32-le"), "<u4") - FIRST_CODE if name is None else np.array([classes[name]])
        if run and (largest := int(values.max())) >= len(codes.colours):
            raise DataError(f"expected codes below {len(codes.colours)}, found {largest}: the picture has another palette")
        parts.append(values.astype(np.uint16))
    plain(text[end:])
    return np.concatenate(parts)


@functools.lru_cache(8)
def parse_codes(content: bytes, where: str) -> Codes:
    """The form that a `tokenizer.json` with this `content` describes. Raises `DataError` if it describes none."""
    try:
        fields: Any = parse_json(content)
        codes = Codes(**{name: _frozen(value) for name, value in fields.items() if name != "type"})
        colours, classes = codes.colours, codes.classes
        if (
            all(type(side) is int and 0 < side <= MOST_SIDE for side in (codes.rows, codes.columns))
            and type(codes.captions) is bool
            and type(codes.decoder) is str
            and 0 < len(colours) <= MOST_COLOURS
            and all(len(colour) == 3 for colour in colours)
            and all(type(value) is int and 0 <= value <= 255 for colour in colours for value in colour)
            and len(set(classes)) == len(classes) <= MOST_CLASSES
            and all(SPECIAL.fullmatch(f"<{name}>") for name in classes)
        ):
            return codes
    except (ValueError, TypeError, AttributeError):
        pass
    raise DataError(f"expected a palette's rows, columns and colours in {where}, found others; prepare the pictures again")


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


def codes_of(tokenizer: Tokenizer) -> Codes | None:
    """The form of the pictures in a tokenizer's texts; None for a tokenizer of text."""
    return parse_codes(tokenizer.json_bytes, "the tokenizer") if tokenizer.kind == PALETTE else None


def is_palette(content: bytes) -> bool:
    """True if a `tokenizer.json` with this `content` describes pictures."""
    return content.startswith(b'{"type": "%s"' % PALETTE.encode())


def caption_text(caption: str, codes: np.ndarray, where: str = "a sprite", *, picture_first: bool) -> str:
    """A document of a caption and its picture, `where` in words. Raises `DataError` for a caption of several lines or with
    codes in it."""
    if "\n" in caption or CODES.search(caption) or not caption.strip():
        raise DataError(f"expected a caption of one line without codes, found {caption[:40]!r} for {where}; write another")
    picture = text_of(codes)
    return f"{picture}{caption}\n" if picture_first else f"{caption}\n{picture}"


def drawn(parts: Sequence[str | np.ndarray], paint: Callable[[np.ndarray], np.ndarray]) -> tuple[str, list[np.ndarray]]:
    """(the text of the parts, which only mentions pictures; the pixels (*size, 3) of each picture)."""
    painted = [part if isinstance(part, str) else paint(part) for part in parts]
    words = (part if isinstance(part, str) else f"[{part.shape[0]} x {part.shape[1]} picture]" for part in painted)
    return "".join(words), [part for part in painted if not isinstance(part, str)]
