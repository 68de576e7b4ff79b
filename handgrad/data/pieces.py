"""Sources to units of work: documents, the split of each, cut and grouped."""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from handgrad.data.chat import read_conversations
from handgrad.data.cutting import cut, slices
from handgrad.data.permutation import mix
from handgrad.data.sources import SourceFile, read_rows, read_text, text_parts

TRAIN, VALIDATION = 0, 1  # indices into shards.SPLITS
UNIT_CHARACTERS = 1 << 20
STORIES_PER_UNIT = 1000
SPLIT_ORDER = 4  # the purpose in a key (batches has 1 to 3)


class Piece(NamedTuple):
    """A stretch of one document; `starts_document` asks for an end-of-text token before it."""

    split: int
    starts_document: bool
    text: str
    nats: float = 0.0  # -log p, where the source knows it


class Conversation(NamedTuple):
    """A document of chat data: (role, content) of its messages, its place in words, and the time of its file in seconds,
    which a template may write. `skips`: it is left out if it cannot be trained; `fault`: why it cannot."""

    split: int
    messages: tuple[tuple[str, str], ...]
    where: str
    seconds: float = 0.0
    skips: bool = False
    fault: str = ""

    @property
    def text(self) -> str:
        """Its roles and contents: the text on which a vocabulary is trained."""
        return "".join(f"{role}\n{content}\n" for role, content in self.messages)


class Stories(NamedTuple):
    """The built-in stories first..first+count-1 of a seed; the worker that tokenises them writes them."""

    seed: int
    first: int
    count: int
    block: int


class Questions(NamedTuple):
    """The built-in conversations first..first+count-1 of a seed, as `Stories`."""

    seed: int
    first: int
    count: int
    block: int


class Position(NamedTuple):
    """Progress of reading: bytes of the source files as they lie on disk, and documents begun."""

    size_bytes: int
    documents: int


Unit = tuple[Piece | Conversation, ...] | Stories | Questions


def block_length(validation_fraction: float) -> int:
    """Rows per block, of which one goes to validation."""
    return max(2, round(1 / validation_fraction))


def split_of(seed: int, document: int, block: int) -> int:
    """The split of row `document`: of every `block` rows the one that the block's hash chooses is validation."""
    number, row = divmod(document, block)
    return VALIDATION if row == mix(seed, SPLIT_ORDER, number) % block else TRAIN


def read_pieces(
    files: Iterable[SourceFile],
    fetch: Callable[[SourceFile], Path],
    *,
    text_field: str,
    text_fraction: float,
    row_fraction: float,
    seed: int,
    max_documents: int,
) -> Iterator[tuple[Position, Piece]]:
    """Every piece of every document, in order, with the position after it; at most `max_documents` documents if not 0.

    Fetches each file just before it reads it. Of a text file the last `text_fraction` is validation, as a document of its
    own; of rows, `row_fraction`. Raises DataError and StorageError as the readers in `sources` and `hub` do.
    """
    block, bytes_before, documents = block_length(row_fraction), 0, 0
    for file in files:
        if max_documents and documents >= max_documents:
            return
        path = fetch(file)
        if file.format == "txt":
            middle, end = text_parts(path, text_fraction)
            documents += 1
            for split, start, stop in ((TRAIN, 0, middle), (VALIDATION, middle, end)):
                read = start
                for n, text in enumerate(cut(read_text(path, start, stop))):
                    read += len(text.encode())
                    position = bytes_before + int(file.size_bytes * read / max(1, end))
                    yield Position(position, documents), Piece(split, n == 0, text)
        else:
            for row_position, text in read_rows(file, text_field):
                split = split_of(seed, documents, block)
                documents += 1
                for n, part in enumerate(cut(slices(text))):
                    yield Position(bytes_before + row_position, documents), Piece(split, n == 0, part)
                if documents == max_documents:
                    return
        bytes_before += file.size_bytes


def read_chats(
    files: Iterable[SourceFile],
    fetch: Callable[[SourceFile], Path],
    *,
    row_fraction: float,
    seed: int,
    max_documents: int,
    skips: bool = False,
) -> Iterator[tuple[Position, Conversation]]:
    """Every conversation, in order, with the position after it; at most `max_documents` if not 0.

    Fetches each file just before it reads it. Raises DataError: a row that is no conversation, unless it `skips` those; and
    as `fetch` does.
    """
    block, bytes_before, documents = block_length(row_fraction), 0, 0
    for file in files:
        if max_documents and documents >= max_documents:
            return
        seconds = fetch(file).stat().st_mtime
        for position, where, found in read_conversations(file, skips):
            if max_documents and documents == max_documents:
                return
            split = split_of(seed, documents, block)
            documents += 1
            messages, fault = ((), found) if isinstance(found, str) else (found, "")
            conversation = Conversation(split, messages, where, seconds, skips, fault)
            yield Position(bytes_before + position, documents), conversation
        bytes_before += file.size_bytes


def in_units(pieces: Iterable[tuple[Position, Piece | Conversation]]) -> Iterator[tuple[Position, Unit]]:
    """Pieces grouped into units of at least a million characters, each with the position after it."""
    unit: list[Piece | Conversation] = []
    characters, position = 0, Position(0, 0)
    for position, piece in pieces:
        unit.append(piece)
        characters += len(piece.text)
        if characters >= UNIT_CHARACTERS:
            yield position, tuple(unit)
            unit, characters = [], 0
    if unit:
        yield position, tuple(unit)


def generated_units(
    kind: type[Stories] | type[Questions], seed: int, count: int, row_fraction: float
) -> Iterator[tuple[Position, Unit]]:
    """The units of `count` built-in stories or questions."""
    for first in range(0, count, STORIES_PER_UNIT):
        size = min(STORIES_PER_UNIT, count - first)
        yield Position(0, first + size), kind(seed, first, size, block_length(row_fraction))
