"""Reads documents from sources, assigns each to a split, and cuts and groups them into units of work.

Tokenising the pieces of a long text one by one gives the tokens of the whole text. GPT-2's splitter never matches a blank
after a non-blank, so one of its parts ends before every blank that follows a non-blank, and the text to the right does not
affect how the text to the left is split. The same holds after a single newline between two non-blanks, which is a part of
its own. Byte-pair merges stay inside a part.
"""

import itertools
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

from handgrad.data.batches import mix
from handgrad.data.chat import Conversation, read_conversations
from handgrad.data.codes import View
from handgrad.data.pictures import name_of, picture_count
from handgrad.data.preferences import read_pairs
from handgrad.data.recipe import PrepareOptions
from handgrad.data.sources import BLOCK_BYTES, SourceFile, check_expansion, open_plain, read_rows, read_text, reading
from handgrad.errors import DataError, storage_errors
from handgrad.parsing import numbered_lines, parse_record

TRAIN, VALIDATION = 0, 1  # indices into shards.SPLITS
UNIT_CHARACTERS = 1 << 20
STORIES_PER_UNIT = 1000
PICTURES_PER_UNIT = 250
# Validation shares without --validation-fraction: about a million tokens of a large corpus, enough of a small one.
TEXT_FRACTION, LOCAL_ROW_FRACTION, HUB_ROW_FRACTION, STORY_FRACTION = 0.1, 0.05, 0.005, 0.01
SPLIT_ORDER = 4  # domain separator in a hash key (batches has 1 to 3)
PIECE_CHARACTERS = 1 << 18
# Cuts a piece this long anywhere, to bound memory: a text without a blank for a million characters is not prose.
MAX_PIECE_CHARACTERS = 1 << 20
CUT_WINDOW_BYTES = 1 << 16

# Python's \S excludes a few more control characters than the splitter's, so a cut found here is also safe there.
_SAFE = re.compile(r"(?<=\S)[ \n]")
# Places to cut a file in two, best first: after a line, before a blank (both safe), after any newline, anywhere between two
# characters. They match bytes; safe cuts need ASCII neighbours, as one byte of a longer character does not identify it.
_FILE_CUTS = tuple(
    re.compile(pattern)
    for pattern in (rb"(?<=[!-~]\n)(?=[!-~])", rb"(?<=[!-~])(?=[ \n])", rb"(?<=\n)(?=\S)", rb"(?=[^\x80-\xbf])")
)


class Piece(NamedTuple):
    """A part of one document; `starts_document` asks for an end-of-text token before it."""

    split: int
    starts_document: bool
    text: str
    nats: float = 0.0  # -log p, if the source knows it


class Generated(NamedTuple):
    """The built-in documents first..first+count-1 of a seed; the worker that tokenises them also generates them."""

    source: str  # STORIES, QUESTIONS or SPRITES
    seed: int
    first: int
    count: int
    block: int


class Pictures(NamedTuple):
    """Consecutive pictures; the worker that tokenises them also reads them."""

    parts: tuple[tuple[SourceFile, int, int], ...]  # (file, its first picture, number of pictures)
    captions: tuple[str, ...]  # of each picture; empty without captions
    number: int  # of the first picture
    seed: int
    block: int
    strict: bool
    view: View | None = None  # of an autoencoder's codes


class Position(NamedTuple):
    """Reading progress: bytes of the source files on disk (compressed ones count as such), and documents begun."""

    size_bytes: int
    documents: int


Unit = tuple[Piece | Conversation, ...] | Generated | Pictures
Fetch = Callable[[SourceFile], Path]


def block_length(validation_fraction: float) -> int:
    """Rows per block; one row of each block goes to validation."""
    return max(2, round(1 / validation_fraction))


def split_of(seed: int, document: int, block: int) -> int:
    """The split of row `document`: a hash chooses one of every `block` rows for validation."""
    number, row = divmod(document, block)
    return VALIDATION if row == mix(seed, SPLIT_ORDER, number) % block else TRAIN


def units_of(options: PrepareOptions, files: list[SourceFile], fetch: Fetch) -> Iterator[tuple[Position, Unit]]:
    """The units of a source, in order, each with the position after it. Groups pieces until they have a million
    characters. Raises DataError and StorageError as the readers in `sources`, `chat` and `hub` do."""
    if options.is_generated:
        block, count = block_length(options.validation_fraction or STORY_FRACTION), options.most_documents
        for first in range(0, count, STORIES_PER_UNIT):
            size = min(STORIES_PER_UNIT, count - first)
            yield Position(0, first + size), Generated(options.source, options.seed, first, size, block)
        return
    if options.is_pictures:
        yield from picture_units(options, files)
        return
    unit: list[Piece | Conversation] = []
    characters, position = 0, Position(0, 0)
    for position, piece in read_pieces(options, files, fetch):
        unit.append(piece)
        characters += len(piece.text)
        if characters >= UNIT_CHARACTERS:
            yield position, tuple(unit)
            unit, characters = [], 0
    if unit:
        yield position, tuple(unit)


def picture_units(options: PrepareOptions, files: list[SourceFile]) -> Iterator[tuple[Position, Pictures]]:
    """The pictures of `files` in order. Raises the errors of `pictures.picture_count` and `captions_of`."""
    counts = [picture_count(file) for file in files]
    each = ((file, n, count) for file, count in zip(files, counts, strict=True) for n in range(count))
    captions = captions_of(options.join, files, counts) if options.join else []
    block, number, bytes_before = block_length(options.validation_fraction or LOCAL_ROW_FRACTION), 0, 0.0
    each = itertools.islice(each, options.documents or None)
    while group := list(itertools.islice(each, PICTURES_PER_UNIT)):
        by_file = ([*same] for _, same in itertools.groupby(group, lambda one: one[0]))
        parts = tuple((same[0][0], same[0][1], len(same)) for same in by_file)
        bytes_before += sum(file.size_bytes / count for file, _, count in group)
        told = tuple(captions[number : number + len(group)])
        unit = Pictures(parts, told, number, options.seed, block, options.strict, options.view)
        number += len(group)
        yield Position(int(bytes_before), number), unit


def captions_of(path: str, files: list[SourceFile], counts: list[int]) -> list[str]:
    """The caption of each picture, in the order of `files`, which hold `counts` pictures each. Raises DataError: a bad
    row, a picture without a caption, a caption without a picture; StorageError: unreadable."""
    captions = dict[str, str]()
    with storage_errors(f"reading {path}"):
        content = Path(path).read_bytes()
    for line, where in numbered_lines(content, Path(path)):
        row = parse_record(line, where)
        image, caption = row.text("image"), row.text("caption").strip()
        if image in captions:
            raise DataError(f"expected one caption for each image, found a second for {image} in {where}; leave one out")
        if not caption or "\n" in caption:
            raise DataError(f"expected a caption of one line, found {caption[:40]!r} in {where}; write it in one")
        captions[image] = caption
    names = [name_of(file, n, count) for file, count in zip(files, counts, strict=True) for n in range(count)]
    if lacking := [name for name in names if name not in captions]:
        raise DataError(
            f"expected a caption in {path} for each picture, found none for {lacking[0]} and {len(lacking) - 1} more; add"
            " them, or move these pictures away"
        )
    if lost := sorted(captions.keys() - names):
        raise DataError(
            f"expected a picture for each caption in {path}, found none for {lost[0]} and {len(lost) - 1} more; an image is"
            " a path within the source, like cats/1.png"
        )
    return [captions[name] for name in names]


def read_pieces(
    options: PrepareOptions, files: list[SourceFile], fetch: Fetch
) -> Iterator[tuple[Position, Piece | Conversation]]:
    """Every piece of every document, in order, with the position after it.

    Fetches each file just before it reads it. The last part of a text file is validation, as a separate document; for
    rows, `split_of` chooses."""
    fraction = options.validation_fraction
    row_fraction = fraction or (HUB_ROW_FRACTION if any(file.download for file in files) else LOCAL_ROW_FRACTION)
    block, bytes_before, documents = block_length(row_fraction), 0, 0
    for file in files:
        path = fetch(file)
        if file.format == "txt":
            documents += 1
            for size_bytes, piece in text_pieces(path, fraction or TEXT_FRACTION, file.size_bytes):
                yield Position(bytes_before + size_bytes, documents), piece
        else:
            for size_bytes, row in rows_of(file, options):
                split = split_of(options.seed, documents, block)
                documents += 1
                position = Position(bytes_before + size_bytes, documents)
                if not isinstance(row, str):
                    talks = (row,) if isinstance(row, Conversation) else row
                    yield from ((position, talk._replace(split=split)) for talk in talks)
                else:
                    yield from ((position, Piece(split, n == 0, part)) for n, part in enumerate(cut(slices(row))))
                if documents == options.documents:
                    return
        if documents == options.documents:
            return
        bytes_before += file.size_bytes


def rows_of(file: SourceFile, options: PrepareOptions) -> Iterator[tuple[int, Any]]:
    """(position after it, text, conversation or pair of conversations) for each row."""
    if options.preferences:
        return read_pairs(file)
    return read_conversations(file, options.skip_bad_rows) if options.chat else read_rows(file, options.text_field)


def text_pieces(path: Path, fraction: float, size_bytes: int) -> Iterator[tuple[int, Piece]]:
    """(position after it, piece) for a text file of `size_bytes` on the disk; its last `fraction` is validation."""
    middle, end = text_parts(path, fraction)
    for split, read, stop in ((TRAIN, 0, middle), (VALIDATION, middle, end)):
        for n, text in enumerate(cut(read_text(path, read, stop))):
            read += len(text.encode())
            yield int(size_bytes * read / max(1, end)), Piece(split, n == 0, text)


def cut(blocks: Iterable[str]) -> Iterator[str]:
    """Cuts a text that arrives in `blocks` of any size into pieces of about 256 Ki characters, at most 1 Mi and a block."""
    pending = ""
    for block in blocks:
        pending += block
        while len(pending) > PIECE_CHARACTERS:
            if (blank := _SAFE.search(pending, PIECE_CHARACTERS)) is not None:
                end = blank.start()
            elif len(pending) >= MAX_PIECE_CHARACTERS:
                end = MAX_PIECE_CHARACTERS
            else:
                break
            yield pending[:end]
            pending = pending[end:]
    if pending:
        yield pending


def slices(text: str) -> Iterator[str]:
    """A text in memory as blocks for `cut`, so that `cut` does not copy the rest of it for every piece."""
    for start in range(0, len(text), PIECE_CHARACTERS):
        yield text[start : start + PIECE_CHARACTERS]


def text_parts(path: Path, fraction: float) -> tuple[int, int]:
    """(byte where the validation part of a text file begins, size in bytes), both uncompressed. Raises DataError: a
    damaged .gz; StorageError: the file cannot be read."""
    with reading(path), open_plain(path) as file:
        if path.suffix.lower() == ".gz":  # a .gz states its size only in its last four bytes, modulo 4 GiB
            size_bytes = 0
            for block in iter(lambda: file.read(BLOCK_BYTES), b""):
                size_bytes += len(block)
                check_expansion(size_bytes, path)
        else:
            size_bytes = path.stat().st_size
        return file_cut(cast(Any, file), size_bytes, fraction), size_bytes


def file_cut(file: BinaryIO, size_bytes: int, fraction: float) -> int:
    """The byte where the last `fraction` of a UTF-8 file begins, at the next good cut; `size_bytes` if none."""
    target = int(size_bytes * (1 - fraction))
    start = max(0, target - 2)  # the patterns look two bytes back
    file.seek(start)
    window = file.read(CUT_WINDOW_BYTES)
    for pattern in _FILE_CUTS:
        match = pattern.search(window, target - start)
        if match is not None and start + match.start() < size_bytes:
            return start + match.start()
    return size_bytes
