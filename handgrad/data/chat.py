"""Conversations from rows of .jsonl, .json and .parquet files, in the forms that datasets use (`messages_of`).

The roles are system, user and assistant. A row has "messages" with "role" and "content" (OpenAI), "conversations" with
"from" (human, gpt, system) and "value" (ShareGPT), or a question and its answer (`PAIRS`).
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

from handgrad.data.chat_template import ROLES
from handgrad.data.sources import SourceFile, batches, check_text, keys_of, open_parquet, read_objects, reading
from handgrad.errors import DataError, UsageError

Messages = tuple[tuple[str, str], ...]  # (role, content)


class Conversation(NamedTuple):
    """A document of chat data. `where`: its row, for messages; `seconds`: the modification time of its file, which a
    template may write; `skips`: leave it out if it cannot be trained; `fault`: why it cannot; `answer_only`: only its last
    answer is trained."""

    messages: Messages
    where: str
    seconds: float = 0.0
    skips: bool = False
    fault: str = ""
    split: int = 0  # `pieces.TRAIN` or `VALIDATION`
    answer_only: bool = False

    @property
    def text(self) -> str:
        """Its roles and contents, as text for training a vocabulary."""
        return "".join(f"{role}\n{content}\n" for role, content in self.messages)


TALKS = ("messages", "conversations")
# (key of the question, key of the answer): key of the text that the question refers to, which may be empty or missing.
PAIRS = {
    ("instruction", "output"): "input",  # Alpaca
    ("instruction", "response"): "context",  # Dolly
    ("prompt", "completion"): None,  # TRL
    ("prompt", "response"): None,
    ("question", "answer"): None,
    ("question", "response"): None,  # OpenOrca
    ("query", "response"): None,  # MetaMathQA
}
SYSTEM = ("system", "system_prompt")  # next to the messages or the pair
NOT_TEXT = ("tool_calls", "function_call", "reasoning_content")  # a text-only template would drop these
TOOLS, SETTINGS, HISTORY = ("tools", "functions"), "chat_template_kwargs", "history"
UNTRAINED = ("train", "training", "trainable", "loss")  # keys that tell other trainers to skip an answer
SHAREGPT = {"human": "user", "gpt": "assistant"}
FORM = '{"messages": [{"role": "user", "content": ...}, {"role": "assistant", "content": ...}]}'
FORMATS = ("jsonl", "parquet")


def check_files(files: list[SourceFile], *, pairs: bool = False) -> None:
    """Raises UsageError for a file whose format has no rows; `pairs`: of preferences."""
    for file in files:
        if pairs and file.format != "jsonl":
            raise UsageError(f"expected .jsonl or .json files with --preferences, found {file.path}; write a pair a line")
        if file.format not in FORMATS:
            raise UsageError(
                f"expected .jsonl, .json or .parquet files with --chat, found {file.path}; write a conversation a line"
                " into a .jsonl file, or leave --chat out to prepare text"
            )


def read_conversations(file: SourceFile, skips: bool) -> Iterator[tuple[int, Conversation]]:
    """(position after it, conversation) for each row; skips blank lines. With `skips`, a row that is not a conversation
    yields one whose `fault` is the reason. Raises DataError, with the row's number: it is not a conversation;
    StorageError: the file is unreadable."""
    with reading(file.path):
        for position, where, row in _parquet_rows(file) if file.format == "parquet" else read_objects(file.path):
            messages, fault = (), ""
            try:
                messages = messages_of(row, where)
            except DataError as error:
                if not skips:
                    raise DataError(f"{error}; --skip-bad-rows leaves such rows out") from None
                fault = str(error)
            yield position, Conversation(messages, where, file.path.stat().st_mtime, skips, fault)


def _parquet_rows(file: SourceFile) -> Iterator[tuple[int, str, dict[str, Any]]]:
    known = {*TALKS, *SYSTEM, *TOOLS, SETTINGS, HISTORY, *(key for pair, about in PAIRS.items() for key in (*pair, about))}
    with open_parquet(file.path) as opened:
        columns = [name for name in opened.schema_arrow.names if name in known]
        count, number = opened.metadata.num_rows, 0
        if not columns:
            names = ", ".join(opened.schema_arrow.names)
            raise DataError(f'expected a column "messages", found {names:.200} in {file.path}; write rows as {FORM}')
        for batch in batches(opened, columns):
            for row in batch.to_pylist():
                number += 1
                yield file.path.stat().st_size * number // count, f"row {number} of {file.path}", row


def messages_of(row: Any, where: str) -> Messages:
    """The messages of a row. Raises DataError: an unsupported form, or no message of the assistant."""
    turns = turns_of(row, where)
    if any(row.get(key) for key in TOOLS):
        raise DataError(f"expected conversations without tools, found some in {where}; take the conversation out")
    if row.get(SETTINGS):
        actual = f"found {SETTINGS} beside them in {where}"
        raise DataError(f"expected messages alone, {actual}; handgrad's templates have none: take it out")
    if not isinstance(turns, list) or not turns:
        raise DataError(f"expected a list of messages, found {turns!r:.60} in {where}; repair it")
    messages = tuple(message_of(turn, f"message {number} in {where}") for number, turn in enumerate(turns, start=1))
    if key := next((key for key in SYSTEM if row.get(key)), None):
        said = message_of({"role": "system", "content": row[key]}, f"{key} in {where}")
        if messages[0] != said:
            if any(role == "system" for role, _ in messages):
                raise DataError(f"expected one system's message, found {key} beside another in {where}; take one out")
            messages = (said, *messages)
    if late := next((number for number, (role, _) in enumerate(messages[1:], start=2) if role == "system"), 0):
        raise DataError(
            "expected the system's message once, before the others, found it as message"
            f" {late} in {where}; take it out, or write it into the first message"
        )
    if not any(role == "assistant" for role, _ in messages):
        raise DataError(f"expected a message of the assistant, found none in {where}; take the conversation out")
    return messages


def turns_of(row: Any, where: str) -> Any:
    """The list of messages in a row of any form. Raises DataError if there is none."""
    if not isinstance(row, dict):
        raise DataError(f'expected an object with "messages", found {keys_of(row)} in {where}; write it as {FORM}')
    if (turns := next((row[key] for key in TALKS if row.get(key) is not None), None)) is not None:
        return turns
    for (asked, answered), about in PAIRS.items():
        if row.get(asked) is not None and row.get(answered) is not None:
            if row.get(HISTORY):
                raise DataError(f"expected a question and its answer, found also {HISTORY} in {where}; write it as {FORM}")
            return pair(row[asked], row.get(about) if about else None, row[answered], where)
    remedy = "leave --chat out to prepare text" if isinstance(row.get("text"), str) else f"write it as {FORM}"
    raise DataError(f'expected an object with "messages", found {keys_of(row)} in {where}; {remedy}')


def pair(question: Any, about: Any, answer: Any, where: str) -> list[Any]:
    """The messages of a question, the text that it is about, and its answer. TRL's rows may have lists of messages."""
    if isinstance(question, list) and isinstance(answer, list):
        if any(isinstance(turn, dict) and turn.get("role") == "assistant" for turn in question):
            raise DataError(
                f"expected a prompt without answers, found one in {where}; every answer is trained: write messages if it"
                " is to be"
            )
        return [*question, *answer]
    if about and isinstance(question, str) and isinstance(about, str):
        question = f"{question}\n\n{about}"
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def message_of(turn: Any, where: str) -> tuple[str, str]:
    """(role, content) of a message."""
    turn = {key: value for key, value in turn.items() if value is not None} if isinstance(turn, dict) else turn
    role = turn.get("role", turn.get("from")) if isinstance(turn, dict) else None
    content = text_of(turn.get("content", turn.get("value"))) if isinstance(turn, dict) else None
    if isinstance(turn, dict) and (key := next((key for key in NOT_TEXT if turn.get(key)), None)):
        raise DataError(f"expected messages of text alone, found {key} as {where}; take the conversation out")
    if not isinstance(role, str) or not isinstance(content, str):
        actual = f"{turn!r:.80}" if isinstance(turn, dict) else f"a {type(turn).__name__}"
        raise DataError(f"expected a role and a content of text, found {actual} as {where}; repair it")
    if (role := SHAREGPT.get(role, role)) not in ROLES:
        raise DataError(f"expected a role {', '.join(ROLES)}, found {role!r:.40} as {where}; take the conversation out")
    check_text(content, where)
    if role != "assistant":
        return role, content
    if turn.get("weight", 1) != 1:
        raise DataError(f"expected weight 1, found {turn['weight']!r:.40} as {where}; every answer is trained: take it out")
    if key := next((key for key in UNTRAINED if turn.get(key) is False), None):
        raise DataError(f"expected answers that are all trained, found {key} false in {where}; take the conversation out")
    if not content.strip():
        raise DataError(f"expected the assistant to say something, found an empty {where}; take the conversation out")
    return role, content


def text_of(content: Any) -> Any:
    """Joins a content that is a list of text parts, as OpenAI's API allows; returns any other content unchanged."""
    if not isinstance(content, list) or not content:
        return content
    texts = [part.get("text") for part in content if isinstance(part, dict) and part.get("type") == "text"]
    strings = [text for text in texts if isinstance(text, str)]
    return "".join(strings) if len(strings) == len(content) else content
