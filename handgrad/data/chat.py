"""Conversations from `.jsonl` files: {"messages": [{"role": ..., "content": ...}, ...]} in each line.

The roles are system, user and assistant. ShareGPT's form is read as well: "conversations" of "from" (human, gpt, system)
and "value".
"""

from collections.abc import Iterator
from typing import Any

from handgrad.data.chat_template import ROLES
from handgrad.data.sources import SourceFile, check_text, keys_of, read_objects, reading
from handgrad.errors import DataError, UsageError

Messages = tuple[tuple[str, str], ...]  # (role, content)
NOT_TEXT = ("tool_calls", "function_call", "reasoning_content")  # that a template of text alone would leave out
EXTRA_KEYS = {
    "system": "write it as their first message",
    "chat_template_kwargs": "handgrad's templates have none: take it out",
}
UNTRAINED = ("train", "training", "trainable", "loss")  # keys by which other trainers leave an answer out
SHAREGPT = {"human": "user", "gpt": "assistant"}
FORM = '{"messages": [{"role": "user", "content": ...}, {"role": "assistant", "content": ...}]}'


def check_files(files: list[SourceFile]) -> None:
    """Raises UsageError for a file that is no .jsonl."""
    for file in files:
        if file.format != "jsonl":
            raise UsageError(
                f"expected .jsonl files with --chat, found {file.path}; write a conversation a line into one,"
                " or leave --chat out to prepare text"
            )


def read_conversations(file: SourceFile) -> Iterator[tuple[int, str, Messages]]:
    """(position after it, its place in words, its messages) of every conversation; blank lines are skipped.

    Raises DataError: a line that is no conversation, with its number; StorageError: not readable.
    """
    with reading(file.path):
        for position, where, row in read_objects(file.path):
            yield position, where, messages_of(row, where)


def messages_of(row: Any, where: str) -> Messages:
    """The messages of a line. Raises DataError: another form, or nothing that the assistant says."""
    turns = first_given(row, "messages", "conversations")
    if turns is None:
        remedy = "leave --chat out to prepare text" if holds_plain_text(row) else f"write it as {FORM}"
        raise DataError(f'expected an object with "messages", found {keys_of(row)} in {where}; {remedy}')
    if row.get("tools") or row.get("functions"):
        raise DataError(f"expected conversations without tools, found some in {where}; take the line out")
    if key := next((key for key in EXTRA_KEYS if row.get(key)), None):
        raise DataError(f"expected messages alone, found {key} beside them in {where}; {EXTRA_KEYS[key]}")
    if not isinstance(turns, list) or not turns:
        raise DataError(f"expected a list of messages, found {turns!r:.60} in {where}; repair the line")
    messages = tuple(message_of(turn, f"message {number} in {where}") for number, turn in enumerate(turns, start=1))
    if not any(role == "assistant" for role, _ in messages):
        raise DataError(f"expected a message of the assistant, found none in {where}; take the line out")
    return messages


def holds_plain_text(row: Any) -> bool:
    """True for a row as `prepare` takes it without --chat."""
    return isinstance(row, dict) and isinstance(row.get("text"), str)


def first_given(row: Any, *keys: str) -> Any:
    """The value of the first of `keys` in a JSON object; null counts as absent, as writers of a fixed form mean it."""
    return next((row[key] for key in keys if row.get(key) is not None), None) if isinstance(row, dict) else None


def message_of(turn: Any, where: str) -> tuple[str, str]:
    """(role, content) of a message."""
    role, content = first_given(turn, "role", "from"), first_given(turn, "content", "value")
    if isinstance(turn, dict) and (key := next((key for key in NOT_TEXT if turn.get(key)), None)):
        raise DataError(f"expected messages of text alone, found {key} as {where}; take the line out")
    if not isinstance(role, str) or not isinstance(content, str):
        found = f"{turn!r:.80}" if isinstance(turn, dict) else f"a {type(turn).__name__}"
        raise DataError(f"expected a role and a content of text, found {found} as {where}; repair the line")
    role = SHAREGPT.get(role, role)
    if role not in ROLES:
        raise DataError(f"expected a role {', '.join(ROLES)}, found {role!r:.40} as {where}; take the line out")
    if role != "assistant":
        check_text(content, where)
        return role, content
    if turn.get("weight") not in (None, 1):
        raise DataError(f"expected weight 1, found {turn['weight']!r:.40} as {where}; every answer is trained: take it out")
    if key := next((key for key in UNTRAINED if turn.get(key) is False), None):
        raise DataError(f"expected answers that are all trained, found {key} false in {where}; take the line out")
    if not content.strip():
        raise DataError(f"expected the assistant to say something, found an empty {where}; take the line out")
    check_text(content, where)
    return role, content
