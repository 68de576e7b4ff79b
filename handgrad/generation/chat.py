"""Conversations with a model: cuts one to the context, and knows the tokens that end an answer."""

import bisect
import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from handgrad.data.chat_template import ROLES, ChatTemplate, Message
from handgrad.data.model_tokenizer import GENERATION_FILE
from handgrad.data.tokenizer import Tokenizer
from handgrad.errors import DataError, UsageError


@dataclass(frozen=True)
class Prompt:
    """A conversation as tokens, ready for the assistant's answer."""

    tokens: list[int]
    messages: list[Message]  # the messages in `tokens`
    max_tokens: int  # most tokens of the answer that the context holds
    note: str  # a line about dropped messages, or ""


class Talk:
    """Renders conversations with the tokenizer's chat template or the plain one. `ends`: tokens that end an answer."""

    def __init__(self, tokenizer: Tokenizer):
        self.template = ChatTemplate(tokenizer)
        self.ends = {tokenizer.end_of_text, *listed_ends(tokenizer)}
        with contextlib.suppress(DataError):  # from a template that training cannot use
            self.ends |= self.template.end_tokens

    def prompt(self, messages: Sequence[Message], context: int, max_tokens: int) -> Prompt:
        """The prompt of the most recent messages that leave room in the context for an answer of `max_tokens` or a
        quarter of it. Always keeps a leading system message. Raises `UsageError` for messages that it cannot answer,
        `DataError` for messages that the template refuses."""
        check_messages(messages)
        asked = [number for number, message in enumerate(messages) if message["role"] == "user"]
        most = max(1, context - min(max_tokens, context // 4))

        def without(turns: int) -> list[Message]:
            """The conversation without its first `turns` user messages and the answers to them."""
            return [*messages[: asked[0]], *messages[asked[turns] :]]

        def fits(turns: int) -> bool:
            return len(self.template.render(without(turns), True)) <= most

        # Bisect: a conversation of thousands of messages takes a dozen renderings.
        turns = 0 if fits(0) else bisect.bisect_left(range(len(asked) - 1), True, key=fits)
        recent, left_out = without(turns), asked[turns] - asked[0]
        tokens = self.template.render(recent, True)
        note = f"the oldest {left_out} messages are left out: the context has {context} tokens" if left_out else ""
        if len(tokens) > most:
            note = f"the message has {len(tokens)} tokens, of which the last {most} are read: the context has {context}"
            tokens = tokens[-most:]
        return Prompt(tokens, recent, min(max_tokens, context - len(tokens)) or 1, note)


def listed_ends(tokenizer: Tokenizer) -> set[int]:
    """The end tokens that the model's own file gives transformers' `generate`."""
    ends = (tokenizer.settings(GENERATION_FILE) or {}).get("eos_token_id")
    ids = ends if isinstance(ends, list) else [ends]
    return {token for token in ids if type(token) is int and 0 <= token < tokenizer.vocab_size}


def check_messages(messages: Sequence[Any]) -> None:
    wanted = "expected messages like {'role': 'user', 'content': 'Hello'}"
    for number, message in enumerate(messages, start=1):
        if not isinstance(message, Mapping) or not all(isinstance(message.get(key), str) for key in ("role", "content")):
            raise UsageError(f"{wanted}, found {message!r:.80} as number {number}")
        if message["role"] not in ROLES:
            raise UsageError(f"expected a role of {', '.join(ROLES)}, found {message['role']!r:.40} in message {number}")
    if not messages or messages[-1]["role"] != "user":
        raise UsageError(f"{wanted} as the last one, found {messages[-1]['role'] if messages else 'none'}")
