"""Questions with four endings, of which one is right: HellaSwag's jsonl, and llm.c's file of such questions.

    header          [0] 20240522  [1] 1  [2] questions  [3] bytes of the longest
    per question    uint16: 65535, its bytes (with these six numbers), its index, the label, 4, tokens of the context;
                    the context; four times: tokens of the ending, the ending

A question is a context and four endings in tokens of GPT-2; to score one, each ending follows the context directly.

Source: llm.c, dev/data/hellaswag.py (`render_example`) and dev/data/data_common.py (`write_evalfile`); HellaSwag, Zellers
et al. 2019, arXiv:1905.07830.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from handgrad.data.llmc_header import EVALUATION, HEADER_BYTES, make_header, read_header
from handgrad.data.tokenizer import Tokenizer
from handgrad.errors import DataError, storage_error
from handgrad.files import write_bytes_durably

ENDINGS = 4
START = 65535  # no token has this id
MAX_QUESTIONS = (1 << 16) - 1  # an index is a uint16
MAX_FILE_BYTES = 1 << 30


@dataclass(frozen=True)
class Question:
    """A context (tokens), its four endings (tokens each, at least one), and which of them is right."""

    context: tuple[int, ...]
    endings: tuple[tuple[int, ...], ...]
    label: int


def read_evaluation(path: Path) -> tuple[Question, ...]:
    """The questions of a llm.c evaluation file, in their order.

    Raises `DataError` in one line: no such file, another kind, cut, or numbers that do not fit together; `StorageError`: it
    cannot be read.
    """
    words, size = read_header(path, EVALUATION, (1,))
    if size > MAX_FILE_BYTES or (size - HEADER_BYTES) % 2:
        raise DataError(f"expected at most {MAX_FILE_BYTES} bytes of uint16 in {path}, found {size}; copy it again")
    try:
        numbers = np.fromfile(path, "<u2", offset=HEADER_BYTES).tolist()
    except OSError as error:
        raise storage_error(error, f"reading {path}") from None
    questions, start, longest = [], 0, 0
    while start < len(numbers):
        question, end = parse_question(numbers, start, len(questions), path)
        questions.append(question)
        longest = max(longest, 2 * (end - start))
        start = end
    if words[2:4] != [len(questions), longest]:
        raise DataError(
            f"expected {words[2]} questions, the longest of {words[3]} bytes, in {path}, found {len(questions)} and"
            f" {longest}; it was cut, copy it again"
        )
    return tuple(questions)


def parse_question(numbers: list[int], start: int, index: int, path: Path) -> tuple[Question, int]:
    """The question that begins at `start`, and where the next one does. Raises `DataError`."""
    first = numbers[start : start + 6]
    end = start + (first[1] // 2 if len(first) == 6 else 0)
    wanted = len(first) == 6 and first[0] == START and first[2] == index and first[3] < ENDINGS and first[4] == ENDINGS
    lists, at = [], start + 5
    for _ in range(1 + ENDINGS if wanted else 0):
        count = numbers[at] if at < end <= len(numbers) else 0
        lists.append(tuple(numbers[at + 1 : at + 1 + count]))
        at += 1 + count
    if not wanted or at != end or first[1] % 2 or not all(lists) or any(START in tokens for tokens in lists):
        raise DataError(
            f"expected question {index} at byte {HEADER_BYTES + 2 * start} of {path}, with its index, a label below"
            f" {ENDINGS} and {ENDINGS} endings in the bytes it states, found {first!r:.80}; copy it again"
        )
    return Question(lists[0], tuple(lists[1:]), first[3]), end


def evaluation_bytes(questions: Sequence[Question]) -> bytes:
    """The content of a llm.c evaluation file. Raises `DataError` for what the format cannot hold."""
    if not 1 <= len(questions) <= MAX_QUESTIONS:
        raise DataError(f"expected 1 to {MAX_QUESTIONS} questions, found {len(questions)}")
    parts = []
    for index, question in enumerate(questions):
        lists = [question.context, *question.endings]
        numbers = [number for tokens in lists for number in (len(tokens), *tokens)]
        size = 2 * (5 + len(numbers))
        fits = len(question.endings) == ENDINGS and 0 <= question.label < ENDINGS and all(lists) and size < START
        if not fits or not all(0 <= token < START for tokens in lists for token in tokens):
            raise DataError(
                f"expected a context and {ENDINGS} endings of tokens below {START} in fewer than {START} bytes, and a label"
                f" below {ENDINGS}, found question {index} with {len(question.endings)} endings, {size} bytes and label"
                f" {question.label}"
            )
        parts.append(np.array([START, size, index, question.label, ENDINGS, *numbers], "<u2").tobytes())
    return make_header({0: EVALUATION, 1: 1, 2: len(parts), 3: max(map(len, parts))}) + b"".join(parts)


def write_evaluation(path: Path, questions: Sequence[Question]) -> None:
    """Writes a llm.c evaluation file, whole or not at all. Raises `DataError` as `evaluation_bytes`, `StorageError`."""
    content = evaluation_bytes(questions)
    try:
        write_bytes_durably(path, content)
    except OSError as error:
        raise storage_error(error, f"writing {path}") from None


def read_hellaswag(path: Path, tokenizer: Tokenizer) -> Iterator[Question]:
    """The questions of HellaSwag's jsonl (`ctx`, `endings`, `label`), each ending with a space before it, as in a text.

    Raises `DataError` naming the line that is none; `StorageError`: it cannot be read.
    """
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, start=1):
                context, endings, label = parse_line(line, f"{path} line {number}")
                texts = [context, *(" " + ending for ending in endings)]
                tokens = [tuple(tokenizer.encode(text).tolist()) for text in texts]
                yield Question(tokens[0], tuple(tokens[1:]), label)
    except FileNotFoundError:
        raise DataError(f"expected HellaSwag's jsonl at {path}, found no such file") from None
    except UnicodeDecodeError as error:
        raise DataError(f"expected UTF-8 in {path}, found {error}") from None
    except OSError as error:
        raise storage_error(error, f"reading {path}") from None


def parse_line(line: str, where: str) -> tuple[str, list[str], int]:
    """(context, endings, label) of one line; the label may be text, as some copies have it. Raises `DataError`."""
    try:
        record: Any = json.loads(line)
        context, endings, label = record["ctx"], record["endings"], int(record["label"])
    except (ValueError, KeyError, TypeError, RecursionError):
        raise DataError(f"expected a JSON object with ctx, endings and label in {where}, found {line!r:.80}") from None
    texts = isinstance(context, str) and context and isinstance(endings, list) and len(endings) == ENDINGS
    if not texts or not all(isinstance(ending, str) for ending in endings) or not 0 <= label < ENDINGS:
        raise DataError(f"expected a text, {ENDINGS} endings and a label below {ENDINGS} in {where}, found {line!r:.80}")
    return context, endings, label
