"""Prompts for training on rewards: rows of .jsonl files, or the built-in questions, as the tokens that an answer follows.

A row has "prompt", a text or a list of messages that ends with the user's, or "messages". The reward function receives the
whole row, with its "messages", so a row may hold whatever the reward needs: the right answer, tests, a name.
"""

import functools
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from handgrad.data import questions
from handgrad.data.batches import WINDOW_ORDER, mix, permute
from handgrad.data.chat import message_of
from handgrad.data.chat_template import ChatTemplate
from handgrad.data.shards import MANIFEST_FILE, SPLITS, Dataset
from handgrad.data.sources import find_local, keys_of, read_objects, reading
from handgrad.data.tokenizer_loading import load_tokenizer
from handgrad.errors import DataError, UsageError
from handgrad.names import check_choice

QUESTIONS = "questions"
BUILT_IN_ROWS = {"train": 2048, "validation": 256}  # of the built-in questions, before repeated ones go
MOST_CHARACTERS = 96  # of a conversation of built-in questions, so that short rows hold it
HELD_OUT = 16  # of 256: rows whose hash puts them into validation
FORM = '{"prompt": "..."}'

Row = Mapping[str, Any]


@dataclass(frozen=True, eq=False)
class PromptShard:
    """The prompts of a split."""

    path: Path
    rows: tuple[Row, ...]  # each with "messages"
    prompts: tuple[list[int], ...]  # their tokens, up to where the answer begins
    index_sha256: str = ""
    trained_sha256: str = ""

    @functools.cached_property
    def sha256(self) -> str:
        """SHA-256 of the rows and of their tokens."""
        return hashlib.sha256(json.dumps([self.rows, self.prompts], sort_keys=True, default=str).encode()).hexdigest()

    @property
    def token_count(self) -> int:
        return sum(map(len, self.prompts))

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt."""
        return max(map(len, self.prompts))

    def of_group(self, group: int, seed: int) -> int:
        """The prompt of a 0-based group of rollouts: epoch after epoch, each in an order of its own from the seed."""
        epoch, index = divmod(group, len(self.prompts))
        return permute(index, len(self.prompts), mix(seed, WINDOW_ORDER, epoch))


def open_prompts(data: str, model: str) -> Dataset:
    """The prompts in `data`, .jsonl or .json files or "questions[:KIND+KIND...]", in the tokens and the chat template
    of `model`. Raises DataError: a row without a prompt, an empty one, or no row for one of the splits; UsageError:
    another kind of file or an unknown kind of question; and the errors of `load_tokenizer`."""
    if not model:
        raise UsageError("a reward improves a model that answers already, found none; name it: --init-from RUN")
    if (Path(data) / MANIFEST_FILE).is_file():
        raise UsageError(f"expected prompts in .jsonl files, found shards in {data}; write a row a line: {FORM}")
    tokenizer, name = load_tokenizer(model), data.partition(":")[0]
    if name == QUESTIONS and not Path(data).exists():
        path, seconds, sources = Path(data), 0.0, asked_questions(data)
    else:
        files = find_local(data)
        for file in files:
            if file.format != "jsonl":
                raise UsageError(f"expected prompts in .jsonl files, found {file.path}; write a row a line: {FORM}")
        path, seconds, sources = Path(data), max(file.path.stat().st_mtime for file in files), rows_of(data)
    splits: dict[str, dict[str, Row]] = {split: {} for split in SPLITS}
    for split, where, row in sources:
        splits[split][json.dumps(row, sort_keys=True)] = {**row, "messages": asked(row, where)}
    template = ChatTemplate(tokenizer, datetime.fromtimestamp(seconds, UTC).replace(tzinfo=None))
    shards: Any = {split: shard_of(path, split, tuple(rows.values()), template) for split, rows in splits.items()}
    return Dataset(path, tokenizer, shards, {"chat": True, "recipe": {"source": data}})


def shard_of(path: Path, split: str, rows: tuple[Row, ...], template: ChatTemplate) -> tuple[PromptShard, ...]:
    if not rows:
        if split == "train":
            raise DataError(f"expected prompts in {path}, found none; write a row a line: {FORM}")
        return ()
    return (PromptShard(path, rows, tuple(template.render(row["messages"], True) for row in rows)),)


def rows_of(data: str) -> Iterator[tuple[str, str, Row]]:
    """(split, its location in words, row) of every row of files."""
    for file in find_local(data):
        with reading(file.path):
            for _, where, row in read_objects(file.path):
                if not isinstance(row, dict):
                    raise DataError(f"expected an object with a prompt, found {keys_of(row)} in {where}; write {FORM}")
                yield SPLITS[hashlib.sha256(json.dumps(row, sort_keys=True).encode()).digest()[0] < HELD_OUT], where, row


@functools.cache
def asked_questions(data: str) -> tuple[tuple[str, str, Row], ...]:
    """The built-in questions of some kinds, or of all, as `rows_of` has rows; the held-out ones are for validation."""
    kinds = data.partition(":")[2].split("+") if ":" in data else questions.NAMES
    for kind in kinds:
        check_choice("kind of question", kind, questions.NAMES)
    rows = list[tuple[str, str, Row]]()
    for split, count in BUILT_IN_ROWS.items():
        number, enough = 0, len(rows) + count
        while len(rows) < enough:
            talk = questions.conversation(1, number, split == "validation")[:-1]
            messages, number = [{"role": role, "content": content} for role, content in talk], number + 1
            if questions.kind_of(messages) in kinds and sum(len(content) for _, content in talk) <= MOST_CHARACTERS:
                rows.append((split, "", {"messages": messages, "kind": questions.kind_of(messages)}))
    return tuple(rows)


def asked(row: Row, where: str) -> list[dict[str, str]]:
    """The messages of a row's prompt. Raises DataError: it has none, or an empty one, or ends with another role."""
    turns = row.get("prompt", row.get("messages", row.get("question")))
    turns = [{"role": "user", "content": turns}] if isinstance(turns, str) else turns
    if not isinstance(turns, list) or not turns:
        raise DataError(f"expected a prompt, found {keys_of(row)} in {where}; write it as {FORM}")
    said = [message_of(turn, f"message {number} in {where}") for number, turn in enumerate(turns, start=1)]
    if said[-1][0] != "user":
        raise DataError(f"expected a prompt that ends with the user's message, found the {said[-1][0]}'s in {where}")
    if empty := next((number for number, (_, content) in enumerate(said, start=1) if not content.strip()), 0):
        raise DataError(f"expected a prompt, found an empty message {empty} in {where}; take the row out")
    return [{"role": role, "content": content} for role, content in said]


def prompts_of(dataset: Dataset, split: str) -> list[PromptShard]:
    """The prompts of a split: none, or one shard. None for any other data."""
    shards: Iterable[Any] = dataset.splits[split]
    return [shard for shard in shards if isinstance(shard, PromptShard)]


def has_prompts(dataset: Dataset) -> bool:
    """True for prompts, which have no answers."""
    return bool(prompts_of(dataset, "train"))


def longest_prompt(dataset: Dataset) -> int:
    """Tokens of the longest prompt of both splits."""
    return max(shard.longest for split in SPLITS for shard in prompts_of(dataset, split))
