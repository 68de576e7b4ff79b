"""Parses requests of OpenAI's API (`/v1/chat/completions` and `/v1/completions`) and generates their texts: one model in
one thread, one text after another.

Source: https://platform.openai.com/docs/api-reference. `top_k`, `min_p` and `repetition_penalty` have the names that vLLM
and llama.cpp use.
"""

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, get_type_hints

from handgrad.data.chat_template import Message
from handgrad.errors import UsageError
from handgrad.evaluation.load import Writing
from handgrad.generation.chat import Talk, check_messages, listed_ends
from handgrad.generation.generate import Continuation, SamplingOptions, check_writing, cropped, document, stream_text
from handgrad.parsing import parse_json

CHAT, COMPLETION = "chat", "completion"
PATHS = {"/v1/chat/completions": CHAT, "/v1/completions": COMPLETION}

WORDS = {float: "a number", int: "a whole number", bool: "true or false", dict: "an object"}
NUMBERS = get_type_hints(SamplingOptions)
READ = {*NUMBERS, "messages", "prompt", "max_tokens", "max_completion_tokens", "stop", "seed", "stream", "stream_options"}
# Settings that do not affect the text.
PASSED_OVER = {"model", "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"}
PASSED_OVER |= {"parallel_tool_calls", "tool_choice"}  # without `tools` they choose nothing
# Defaults that clients may spell out. Another value asks for something that this server lacks.
NEUTRAL = {"n": 1, "best_of": 1, "response_format": {"type": "text"}}


@dataclass(frozen=True)
class Request:
    """A text to write. `prompt`: the conversation that it answers, or the text that it continues."""

    prompt: list[Message] | str = ""
    max_tokens: int = 512
    options: SamplingOptions = SamplingOptions()  # noqa: RUF009 - frozen
    stops: tuple[str, ...] = ()
    seed: int | None = None  # None: any
    streams: bool = False  # the client wants the pieces as they come
    counts: bool = False  # a stream ends with the number of tokens

    @property
    def kind(self) -> str:
        return COMPLETION if isinstance(self.prompt, str) else CHAT


def read_request(kind: str, content: bytes, default: Request, context: int, system: str = "") -> Request:
    """The request in the body of a POST; `default` has the settings that it omits, and `system` is the system message for a
    conversation without one. Raises `UsageError` for an invalid body, for more than `context` tokens, or for a setting that
    handgrad lacks."""
    try:
        body = parse_json(content)
    except ValueError as error:
        raise UsageError(f"expected JSON, found: {error}") from None
    if not isinstance(body, dict):
        raise UsageError(f"expected a JSON object, found {content[:40]!r}")
    for name, value in body.items():
        asks = (value or name in NEUTRAL) and value not in (None, NEUTRAL.get(name))
        if asks and name not in {*READ, *PASSED_OVER}:
            raise UsageError(f"this server does not know {name!r} (here {value!r:.60}); leave it out")
    most = "max_completion_tokens" if body.get("max_completion_tokens") is not None else "max_tokens"
    numbers: dict[str, Any] = {
        name: setting(body, name, kind, getattr(default.options, name)) for name, kind in NUMBERS.items()
    }
    request = replace(
        default,
        prompt=conversation(body, system) if kind == CHAT else text_of(body.get("prompt", "")),
        max_tokens=setting(body, most, int, default.max_tokens),
        options=replace(default.options, **numbers),
        stops=stops_of(body.get("stop")) or default.stops,
        seed=setting(body, "seed", int, default.seed),
        streams=setting(body, "stream", bool, False),
        counts=setting(setting(body, "stream_options", dict, {}), "include_usage", bool, False),
    )
    if request.max_tokens > context:
        raise UsageError(f"expected {most!r} of at most {context}, the model's context, found {request.max_tokens}")
    check_writing(request.max_tokens, request.seed or 0, request.stops)
    return request


def setting(body: Mapping[str, Any], name: str, kind: type, default: Any) -> Any:
    """The value of `name` in `body`; `default` if it is null or missing. Raises `UsageError` for another type."""
    if (value := body.get(name)) is None:
        return default
    if type(value) is kind or (kind is float and type(value) is int):
        return kind(value)
    raise UsageError(f"expected {name!r} to be {WORDS[kind]}, found {value!r:.60}")


def conversation(body: Mapping[str, Any], system: str) -> list[Message]:
    """The messages, each with a single text as content."""
    if not isinstance(listed := body.get("messages"), list):
        raise UsageError(f"expected 'messages' to be a list, found {listed!r:.60}")
    messages = []
    for message in listed:
        if isinstance(message, dict) and isinstance(message.get("content"), list):
            message = message | {"content": "".join(map(part_of, message["content"]))}
        messages.append(message)
    check_messages(messages)
    if messages[0]["role"] != "system":
        messages = [{"role": "system", "content": system}] * bool(system) + messages
    elif not messages[0]["content"]:  # an empty one asks for none, even if the server has a default
        del messages[0]
    return [{"role": message["role"], "content": message["content"]} for message in messages]


def part_of(part: Any) -> str:
    """The text of a part of a content. Raises `UsageError` for images and audio."""
    if isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return part["text"]
    raise UsageError(f"expected parts of a message to be texts, found {part!r:.60}")


def stops_of(stop: Any) -> tuple[str, ...]:
    texts = [stop] if isinstance(stop, str) else stop or []
    if isinstance(texts, list) and all(isinstance(text, str) for text in texts):
        return tuple(texts)
    raise UsageError(f"expected 'stop' to be a text or a list of texts, found {stop!r:.60}")


def text_of(prompt: Any) -> str:
    if isinstance(prompt, list) and len(prompt) == 1:
        prompt = prompt[0]
    if not isinstance(prompt, str):
        raise UsageError(f"expected 'prompt' to be one text, found {prompt!r:.60}")
    return prompt


@dataclass(frozen=True)
class Written:
    """The result of a finished text."""

    reason: str  # `generate.END_OF_TEXT`, `STOP` or `MAX_TOKENS`
    prompt_tokens: int
    tokens: int
    elapsed_seconds: float
    note: str  # a line about the part of the prompt that was left out, or ""


class Writer:
    """Generates texts. `context`: most tokens of a conversation; `seed`: of the first request without one; counts up."""

    def __init__(self, writing: Writing, talk: Talk, *, context: int, seed: int):
        self.writing, self.talk, self.context, self.seed = writing, talk, context, seed

    def write(self, request: Request) -> Iterator[str | Written]:
        """Yields a piece of the text for each token, possibly empty, then the end.

        A conversation reuses the cached keys and values of its earlier turns; their rounding depends on how they were
        computed. So a request with a seed recomputes the whole prompt, and gives the same text every time.

        Raises `UsageError`; `DataError` if the template refuses the conversation or its cache does not fit in memory;
        `NumericsError` if the logits are not finite."""
        started, seed, reuse_cache = time.perf_counter(), request.seed, False
        if seed is None:
            seed, reuse_cache, self.seed = self.seed, request.kind == "chat", (self.seed + 1) % (1 << 32)
        tokenizer = self.writing.model.tokenizer
        if isinstance(request.prompt, str):
            ends = {tokenizer.end_of_text, *listed_ends(tokenizer)}
            text = Continuation(document(tokenizer, request.prompt), request.max_tokens, seed)
            note = cropped([text], self.context)
        else:
            ends, prompt = self.talk.ends, self.talk.prompt(request.prompt, self.context, request.max_tokens)
            text, note = Continuation(prompt.tokens, prompt.max_tokens, seed), prompt.note
        longest = min(max(self.writing.size[1], len(text.prompt) + text.max_tokens), self.context)
        decoder = self.writing.decoder(1, longest, request.options, frozenset(ends))
        for _, piece in stream_text(decoder, tokenizer, iter([text]), request.stops, reuse_cache=reuse_cache):
            yield piece
        yield Written(text.stopped, len(text.prompt), len(text.tokens), time.perf_counter() - started, note)
