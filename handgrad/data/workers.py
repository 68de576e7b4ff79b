"""Units to tokens, in this process or in many, in order."""

import functools
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import NamedTuple

import numpy as np

from handgrad.data import stories
from handgrad.data.pieces import TRAIN, VALIDATION, Piece, Position, Stories, Unit, deal
from handgrad.data.tokenizer import Tokenizer, load_tokenizer
from handgrad.errors import StorageError


class Encoded(NamedTuple):
    """The part of a unit in a split: tokens, offsets of documents in them, bytes of UTF-8 text, its -log p."""

    tokens: np.ndarray
    document_starts: np.ndarray
    text_bytes: int
    nats: float


def tokenize(tokenizer: Tokenizer, unit: Unit) -> tuple[Encoded, Encoded]:
    """The tokens of a unit for train and validation; every document starts with end-of-text."""
    pieces = list(unit_pieces(unit))
    return encode(tokenizer, pieces, TRAIN), encode(tokenizer, pieces, VALIDATION)


def encode(tokenizer: Tokenizer, pieces: list[Piece], split: int) -> Encoded:
    marker = np.array([tokenizer.end_of_text], tokenizer.dtype)
    parts, starts, length, text_bytes, nats = [marker[:0]], [], 0, 0, 0.0
    for piece in (piece for piece in pieces if piece.split == split):
        if piece.starts_document:
            starts.append(length)
            parts.append(marker)
            length += 1
        parts.append(tokenizer.encode(piece.text))
        length += len(parts[-1])
        text_bytes += len(piece.text.encode())
        nats += piece.nats
    return Encoded(np.concatenate(parts), np.array(starts, np.int64), text_bytes, nats)


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


def unit_pieces(unit: Unit) -> Iterator[Piece]:
    """The pieces of a unit; stories are written here."""
    if isinstance(unit, Stories):
        for number in range(unit.first, unit.first + unit.count):
            yield Piece(deal(unit.seed, number, unit.block), True, *stories.story(unit.seed, number))
    else:
        yield from unit


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


_tokenizer = functools.lru_cache(maxsize=1)(load_tokenizer)
