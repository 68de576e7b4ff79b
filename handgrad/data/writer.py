"""Turns units of work into shards: tokenises them in order, in this process or in many, and appends their tokens to files
that are checkpointed, so an interrupted attempt can resume."""

import functools
import hashlib
import itertools
import json
import multiprocessing
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from handgrad.data import questions, stories
from handgrad.data.chat import Conversation
from handgrad.data.chat_template import ChatTemplate
from handgrad.data.codes import Codes, codes_of
from handgrad.data.llmc_header import HEADER_BYTES, TokenForm, header, token_form
from handgrad.data.picture_pieces import picture_pieces, sprite_piece
from handgrad.data.pieces import TRAIN, VALIDATION, Generated, Pictures, Piece, Position, Unit, split_of
from handgrad.data.recipe import SPRITES, STORIES
from handgrad.data.tokenizer import Tokenizer
from handgrad.data.tokenizer_loading import load_tokenizer
from handgrad.errors import DataError, StorageError
from handgrad.files import file_sha256, write_durably

JOURNAL_FILE = "journal.json"


class Encoded(NamedTuple):
    """A unit's part of a split: tokens, offsets of documents in them, bytes of UTF-8 text, its -log p in nats, and for
    conversations (first, end) of the trained stretches, and the reason for each one that is left out."""

    tokens: np.ndarray
    document_starts: np.ndarray
    text_bytes: int
    nats: float
    trained: np.ndarray
    left_out: tuple[str, ...] = ()


def tokenize(tokenizer: Tokenizer, unit: Unit) -> tuple[Encoded, Encoded]:
    """The tokens of a unit for train and validation; each document of text begins with `document_start`."""
    pieces = list(unit_pieces(unit, codes_of(tokenizer)))
    return encode(tokenizer, pieces, TRAIN), encode(tokenizer, pieces, VALIDATION)


def encode(tokenizer: Tokenizer, pieces: list[Piece | Conversation], split: int) -> Encoded:
    marker = np.array(tokenizer.document_start, tokenizer.dtype)
    parts, starts, length, text_bytes, nats = [marker[:0]], [], 0, 0, 0.0
    trained, left_out = [np.empty((0, 2), np.int64)], list[str]()
    pieces = [piece for piece in pieces if piece.split == split]
    texts = iter(tokenizer.encode_each([piece.text for piece in pieces if isinstance(piece, Piece)]))
    talks = iter(encode_conversations(tokenizer, [piece for piece in pieces if isinstance(piece, Conversation)]))
    for piece in pieces:
        if isinstance(piece, Conversation):
            encoded = next(talks)
            if isinstance(encoded, DataError):
                if not piece.skips:
                    raise encoded
                left_out.append(str(encoded))
                continue
            tokens, stretches = encoded
            stretches = stretches[-1:] if piece.answer_only else stretches
            starts.append(length)
            trained.append(stretches + length)
            parts.append(tokens.astype(tokenizer.dtype))
            length += len(tokens)
            continue
        if piece.starts_document:
            starts.append(length)
            parts.append(marker)
            length += len(marker)
        parts.append(next(texts))
        length += len(parts[-1])
        text_bytes += len(piece.text.encode())
        nats += piece.nats
    starts, stretches = np.array(starts, np.int64), np.concatenate(trained)
    return Encoded(np.concatenate(parts), starts, text_bytes, nats, stretches, tuple(left_out))


def encode_conversations(
    tokenizer: Tokenizer, conversations: list[Conversation]
) -> Iterator[tuple[np.ndarray, np.ndarray] | DataError]:
    """(tokens, trained stretches) of each conversation, or an error with its location: its template's, or its row's."""
    for seconds, group in itertools.groupby(conversations, lambda each: each.seconds):
        each = list(group)
        talks = [[{"role": r, "content": c} for r, c in one.messages] for one in each if not one.fault]
        encoded = iter(_template(tokenizer, seconds).conversations(talks))
        for one in each:
            result = DataError(one.fault) if one.fault else next(encoded)
            if isinstance(result, DataError) and not one.fault:
                remedy = "" if one.skips else "; --skip-bad-rows leaves such rows out"
                result = DataError(f"{one.where}: {result}{remedy}")
            yield result


def tokenize_in_order(
    tokenizer: Tokenizer, spec: str, units: Iterable[tuple[Position, Unit]], workers: int
) -> Generator[tuple[Position, tuple[Encoded, Encoded]], None, None]:
    """`tokenize` of every unit, in order, by `workers` processes (1: this one), which load the tokenizer `spec`.

    At most two units per worker are in flight. Raises StorageError: a worker was killed."""
    if workers == 1:
        for position, unit in units:
            yield position, tokenize(tokenizer, unit)
        return
    # Spawned, not forked: this process may have threads (a progress display, torch), and a forked child can then hang.
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), _start_worker)
    pending = deque()
    try:
        for position, unit in units:
            pending.append((position, pool.submit(_work, spec, unit)))
            if len(pending) > 2 * workers:
                position, future = pending.popleft()
                yield position, future.result()
        while pending:
            position, future = pending.popleft()
            yield position, future.result()
    except BrokenProcessPool:
        raise StorageError(
            "expected every tokenising worker to live, found one killed (out of memory?); run the same command again, "
            "it goes on where it stopped, with fewer --workers if it happens again"
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


def unit_pieces(unit: Unit, codes: Codes | None = None) -> Iterator[Piece | Conversation]:
    """The pieces of a unit; generates stories, questions and sprites, and reads pictures as `codes`."""
    if isinstance(unit, Pictures):
        assert codes is not None
        yield from picture_pieces(unit, codes)
        return
    if not isinstance(unit, Generated):
        yield from unit
        return
    for number in range(unit.first, unit.first + unit.count):
        split = split_of(unit.seed, number, unit.block)
        if unit.source == STORIES:
            yield Piece(split, True, *stories.story(unit.seed, number))
        elif unit.source == SPRITES:
            yield sprite_piece(split, unit.seed, number)
        else:
            messages = questions.conversation(unit.seed, number, held_out=split == VALIDATION)
            yield Conversation(messages, f"question {number}", split=split)


def _start_worker() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the main process ends the pool
    threading.Thread(target=_exit_with_parent, daemon=True).start()


def _exit_with_parent() -> None:
    parent = multiprocessing.parent_process()
    # Not `parent.join()`: it waits for the end of a pipe, which a stray close in the parent ends as well.
    while parent is not None and os.getppid() == parent.pid:
        time.sleep(0.5)
    os._exit(1)  # a worker waits on a queue that its siblings hold open as well, so it would wait forever


def _work(spec: str, unit: Unit) -> tuple[Encoded, Encoded]:
    return tokenize(_tokenizer(spec), unit)


@functools.lru_cache(maxsize=1)
def _template(tokenizer: Tokenizer, seconds: float) -> ChatTemplate:
    return ChatTemplate(tokenizer, datetime.fromtimestamp(seconds, UTC))


_tokenizer = functools.lru_cache(maxsize=1)(load_tokenizer)


@dataclass
class SplitState:
    """The written part of a split; a second attempt truncates the files to these lengths and resumes."""

    tokens: int = 0
    documents: int = 0
    text_bytes: int = 0
    source_nats: float = 0.0
    trained_tokens: int = 0
    left_out: int = 0  # rows that are not conversations
    first_left_out: str = ""  # the reason for the first of them
    shards: list[dict[str, Any]] = field(default_factory=list)  # the complete ones, as the manifest lists them
    open_tokens: int = 0  # in the shard being written
    open_documents: int = 0
    open_trained_tokens: int = 0
    open_stretches: int = 0  # of trained tokens


class SplitWriter:
    """Writes one split as shards of exactly `shard_tokens` tokens, the last one shorter. Raises OSError."""

    def __init__(self, folder: Path, split: str, shard_tokens: int, state: SplitState, form: TokenForm, chat: bool):
        self.shard_tokens, self.state, self.form, self.chat = shard_tokens, state, form, chat
        self.open_sizes = functools.partial(open_sizes, folder, split, state, form, chat)
        self.files: list[BinaryIO] = []  # of the shard being written: tokens, index, for chat data trained stretches
        if state.open_tokens:
            for path, size_bytes in self.open_sizes().items():
                self.files.append(path.open("r+b"))
                self.files[-1].truncate(size_bytes)
                self.files[-1].seek(size_bytes)

    def append(self, encoded: Encoded) -> None:
        state, (tokens, document_starts, text_bytes, nats, trained, left_out) = self.state, encoded
        state.tokens += len(tokens)
        state.documents += len(document_starts)
        state.text_bytes += text_bytes
        state.source_nats += nats
        state.trained_tokens += lengths(trained)
        state.left_out += len(left_out)
        state.first_left_out = state.first_left_out or next(iter(left_out), "")
        while len(tokens):
            if not self.files:
                self.files += [path.open("wb") for path in self.open_sizes()]
                self.files[0].write(header(0, self.form))  # `finish_shard` writes the count
            part = tokens[: self.shard_tokens - state.open_tokens]
            starts = document_starts[: np.searchsorted(document_starts, len(part))]
            self.files[0].write(part.astype(self.form.dtype).tobytes())
            self.files[1].write((starts + state.open_tokens).astype("<u4").tobytes())
            if self.chat:
                here = trained[: np.searchsorted(trained[:, 0], len(part))].clip(max=len(part))
                self.files[2].write((here + state.open_tokens).astype("<u4").tobytes())
                state.open_stretches += len(here)
                state.open_trained_tokens += lengths(here)
                trained = (trained[np.searchsorted(trained[:, 1], len(part), side="right") :] - len(part)).clip(min=0)
            state.open_tokens += len(part)
            state.open_documents += len(starts)
            tokens, document_starts = tokens[len(part) :], document_starts[len(starts) :] - len(part)
            if state.open_tokens == self.shard_tokens:
                self.finish_shard()

    def checkpoint(self) -> None:
        """Fsyncs the files of the shard being written."""
        for file in self.files:
            file.flush()
            os.fsync(file.fileno())

    def finish_shard(self) -> None:
        """Completes the shard being written, if there is one: writes its header, fsyncs, closes and hashes its files."""
        if not self.files:
            return
        self.files[0].seek(0)
        self.files[0].write(header(self.state.open_tokens, self.form))
        self.checkpoint()
        self.close()
        path, index_path, *trained_path = self.open_sizes()
        shard: dict[str, Any] = {
            "file": path.name,
            "tokens": self.state.open_tokens,
            "documents": self.state.open_documents,
            "sha256": file_sha256(path),
            "index_sha256": file_sha256(index_path),
        }
        if self.chat:
            shard |= {"trained_tokens": self.state.open_trained_tokens, "trained_sha256": file_sha256(*trained_path)}
        self.state.shards.append(shard)
        self.state.open_tokens = self.state.open_documents = self.state.open_trained_tokens = self.state.open_stretches = 0

    def close(self) -> None:
        for file in self.files:
            file.close()
        self.files = []


def lengths(stretches: np.ndarray) -> int:
    """The number of tokens in (first, end) stretches."""
    return int((stretches[:, 1] - stretches[:, 0]).sum())


def open_sizes(folder: Path, split: str, state: SplitState, form: TokenForm, chat: bool) -> dict[Path, int]:
    """The files of the shard being written (tokens, index, for chat data trained stretches), with their sizes in bytes."""
    path = folder / f"{split}_{len(state.shards):06d}.bin"
    sizes = {
        path: HEADER_BYTES + form.dtype.itemsize * state.open_tokens,
        path.with_suffix(".idx"): 4 * state.open_documents,
    }
    return sizes | ({path.with_suffix(".trained"): 8 * state.open_stretches} if chat else {})


def write_journal(
    folder: Path, recipe: Mapping[str, Any], tokenizer: Mapping[str, Any], units_done: int, states: Mapping[str, SplitState]
) -> None:
    """Records that `units_done` units of `recipe` are on the disk, in the files of `states`. Raises OSError."""
    splits = {split: asdict(state) for split, state in states.items()}
    text = json.dumps({"recipe": recipe, "tokenizer": tokenizer, "units_done": units_done, "states": splits})
    write_durably(folder / JOURNAL_FILE, json.dumps([hashlib.sha256(text.encode()).hexdigest(), text]))


def read_journal(folder: Path, recipe: Mapping[str, Any]) -> tuple[dict[str, Any], int, dict[str, SplitState]] | None:
    """(tokenizer record, units done, state per split) from an intact journal of this `recipe`; else None."""
    try:
        digest, text = json.loads((folder / JOURNAL_FILE).read_bytes())
        if hashlib.sha256(text.encode()).hexdigest() != digest:
            return None
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):
        return None  # absent or damaged: only time is lost
    content = json.loads(text)  # the hash proves that we wrote it
    if content["recipe"] != recipe:
        return None
    states = {split: SplitState(**record) for split, record in content["states"].items()}
    form = token_form(content["tokenizer"]["vocab_size"])
    for split, state in states.items():
        sizes = {folder / shard["file"]: HEADER_BYTES + form.dtype.itemsize * shard["tokens"] for shard in state.shards}
        sizes |= open_sizes(folder, split, state, form, "chat" in recipe) if state.open_tokens else {}
        if not all(path.is_file() and path.stat().st_size >= size_bytes for path, size_bytes in sizes.items()):
            return None
    return content["tokenizer"], content["units_done"], states
