"""Units to tokens, in this process or in many, in order."""

import functools
import itertools
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from datetime import UTC, datetime
from typing import NamedTuple

import numpy as np

from handgrad.data import questions, stories
from handgrad.data.chat import Conversation
from handgrad.data.chat_template import ChatTemplate
from handgrad.data.pieces import TRAIN, VALIDATION, Generated, Piece, Position, Unit, split_of
from handgrad.data.recipe import STORIES
from handgrad.data.tokenizer import Tokenizer
from handgrad.data.tokenizer_loading import load_tokenizer
from handgrad.errors import DataError, StorageError


class Encoded(NamedTuple):
    """The part of a unit in a split: tokens, offsets of documents in them, bytes of UTF-8 text, its -log p, and of
    conversations (first, end) of the stretches that are trained, and why each that is left out cannot be trained."""

    tokens: np.ndarray
    document_starts: np.ndarray
    text_bytes: int
    nats: float
    trained: np.ndarray
    left_out: tuple[str, ...] = ()


def tokenize(tokenizer: Tokenizer, unit: Unit) -> tuple[Encoded, Encoded]:
    """The tokens of a unit for train and validation; every document of text has its start."""
    pieces = list(unit_pieces(unit))
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
            found = next(talks)
            if isinstance(found, DataError):
                if not piece.skips:
                    raise found
                left_out.append(str(found))
                continue
            tokens, stretches = found
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
    """(tokens, trained stretches) of each conversation, or the error in its place, with where it stands: a template that
    does not serve, or the fault of its row."""
    for seconds, group in itertools.groupby(conversations, lambda each: each.seconds):
        each = list(group)
        talks = [[{"role": r, "content": c} for r, c in one.messages] for one in each if not one.fault]
        found = iter(_template(tokenizer, seconds).conversations(talks))
        for one in each:
            result = DataError(one.fault) if one.fault else next(found)
            if isinstance(result, DataError) and not one.fault:
                remedy = "" if one.skips else "; --skip-bad-rows leaves such rows out"
                result = DataError(f"{one.where}: {result}{remedy}")
            yield result


def tokenize_in_order(
    tokenizer: Tokenizer, spec: str, units: Iterable[tuple[Position, Unit]], workers: int
) -> Generator[tuple[Position, tuple[Encoded, Encoded]], None, None]:
    """`tokenize` of every unit, in order, by `workers` processes (1: this one), which load the tokenizer `spec`.

    At most two units per worker are in flight. Raises StorageError: a worker was killed.
    """
    if workers == 1:
        for position, unit in units:
            yield position, tokenize(tokenizer, unit)
        return
    # Spawned, not forked: this process may hold threads (a progress display, torch), and a fork of those can hang.
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


def unit_pieces(unit: Unit) -> Iterator[Piece | Conversation]:
    """The pieces of a unit; stories and questions are written here."""
    if not isinstance(unit, Generated):
        yield from unit
        return
    for number in range(unit.first, unit.first + unit.count):
        split = split_of(unit.seed, number, unit.block)
        if unit.source == STORIES:
            yield Piece(split, True, *stories.story(unit.seed, number))
        else:
            messages = questions.conversation(unit.seed, number, held_out=split == VALIDATION)
            yield Conversation(messages, f"question {number}", split=split)


def _start_worker() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the main process ends the pool
    threading.Thread(target=_exit_with_parent, daemon=True).start()


def _exit_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
    os._exit(1)  # a worker waits on a queue whose other end its siblings hold open too: it would never notice


def _work(spec: str, unit: Unit) -> tuple[Encoded, Encoded]:
    return tokenize(_tokenizer(spec), unit)


@functools.lru_cache(maxsize=1)
def _template(tokenizer: Tokenizer, seconds: float) -> ChatTemplate:
    return ChatTemplate(tokenizer, datetime.fromtimestamp(seconds, UTC))


_tokenizer = functools.lru_cache(maxsize=1)(load_tokenizer)
