"""Renders conversations to tokens with the tokenizer's chat template, and marks the stretches that the assistant says.

`ChatTemplate(tokenizer)` takes the Jinja chat template from a model's files (`Tokenizer.others`) and runs it as
transformers does: sandboxed, with the blanks around its blocks trimmed. A tokenizer without one gets a plain template: each
turn is end-of-text, the role on its own line, the content; the last turn ends with end-of-text. No text encodes to that
token, so nothing inside a message can end a turn or begin another.

Special tokens that the template writes are special tokens; in a message they are ordinary text. While the template runs,
Unicode noncharacters shield the ones in messages, mark where the assistant's contents end, and stand for
`{% generation %}`; a message that contains a noncharacter is refused.
"""

import contextlib
import functools
import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple

import numpy as np

from handgrad.data.confined import BEGIN, END, ProgramError, program
from handgrad.data.tokenizer import Tokenizer
from handgrad.errors import DataError
from handgrad.parsing import parse_json

CHAT_TEMPLATE_FILE = "chat_template.jinja"
ROLES = ("system", "user", "assistant")
SHIELD, CONTENT_END = "\ufdd0", "\ufdd1"
_OURS = re.compile(f"[{SHIELD}{CONTENT_END}{BEGIN}{END}]")

# Prompts rendered at each end of a conversation: to render all, a conversation of 6000 messages would take 3000 renderings.
RENDERED_PROMPTS = 16
MOST_SPECIAL = 1 << 28  # characters of all prefixes and suffixes of special tokens: 60,000 short ones

Message = Mapping[str, str]  # role and content


class Segment(NamedTuple):
    """A part of a conversation that is encoded separately: text, or the id of a special token."""

    content: str | int
    trained: bool


class ChatTemplate:
    """The template of `tokenizer`, or the plain one. `now` is the time that the template sees (default: the current
    time). Raises DataError: the tokenizer's template is not valid Jinja."""

    def __init__(self, tokenizer: Tokenizer, now: datetime | None = None):
        self.tokenizer = tokenizer
        text = template_text(tokenizer)
        self.is_plain = text is None
        self._jinja = None if text is None else _Jinja(tokenizer, text, now)
        plain = functools.partial(plain_segments, tokenizer.end_of_text)
        self._segments = plain if self._jinja is None else self._jinja.segments

    def render(self, messages: Sequence[Message], add_generation_prompt: bool = False) -> list[int]:
        """The tokens of a conversation; with `add_generation_prompt`, up to where the assistant's answer begins. Raises
        DataError: the template refuses the conversation, or does not show where the assistant speaks."""
        return [int(token) for each in self._encode(self._segments(messages, add_generation_prompt)) for token in each]

    def conversation(self, messages: Sequence[Message]) -> tuple[np.ndarray, np.ndarray]:
        """(uint32 tokens, (first, end) of each trained stretch in them). Raises DataError as `render` does."""
        if isinstance(rendered := self.conversations([messages])[0], DataError):
            raise rendered
        return rendered

    def conversations(self, talks: Sequence[Sequence[Message]]) -> list[tuple[np.ndarray, np.ndarray] | DataError]:
        """`conversation` of each, or an error in its place. Faster: renders and encodes all of them in batches."""
        if self._jinja is not None:
            self._jinja.render_ahead(talks)
        cut = list[list[Segment] | DataError]()
        for messages in talks:
            try:
                cut.append(self._segments(messages, False))
            except DataError as error:
                cut.append(error)
        encoded = iter(self._encode([segment for each in cut if isinstance(each, list) for segment in each]))
        return [_joined(each, encoded) if isinstance(each, list) else each for each in cut]

    @functools.cached_property
    def end_tokens(self) -> frozenset[int]:
        """The tokens that end an answer: of the assistant's turns, whose last may end by another, and end-of-text."""
        turns = [{"role": role, "content": "Hello"} for role in ("user", "assistant")]
        ends = {self.tokenizer.end_of_text}
        for trained, answer in itertools.groupby(self._segments(turns * 2, False), lambda segment: segment.trained):
            special = [segment.content for segment in answer if isinstance(segment.content, int)]
            ends |= {*special[-1:]} if trained else set()
        return frozenset(ends)

    def _encode(self, segments: list[Segment]) -> list[np.ndarray]:
        texts = iter(self.tokenizer.encode_each([s.content for s in segments if isinstance(s.content, str)]))
        return [np.array([s.content], np.uint32) if isinstance(s.content, int) else next(texts) for s in segments]


def _joined(segments: list[Segment], encoded: Iterator[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """(tokens, trained stretches) of segments; takes their tokens from `encoded`."""
    tokens, stretches, length = [], [], 0
    for segment in segments:
        tokens.append(next(encoded))
        end = length + len(tokens[-1])
        if segment.trained and end > length:
            if stretches and stretches[-1][1] == length:
                stretches[-1][1] = end
            else:
                stretches.append([length, end])
        length = end
    return np.concatenate(tokens).astype(np.uint32), np.array(stretches, np.int64).reshape(-1, 2)


def template_text(tokenizer: Tokenizer) -> str | None:
    """The chat template among a tokenizer's files, or None. Raises DataError: a file is not a JSON object."""
    if (text := tokenizer.others.get(CHAT_TEMPLATE_FILE)) is not None:
        return text
    for name in ("tokenizer_config.json", "chat_template.json"):
        source = _object(tokenizer, name).get("chat_template")
        if isinstance(source, list):  # several, each with a name
            source = {each.get("name"): each.get("template") for each in source if isinstance(each, dict)}.get("default")
        if isinstance(source, str):
            return source
    return None


def plain_segments(end_of_text: int, messages: Sequence[Message], add_generation_prompt: bool) -> list[Segment]:
    """The plain template. Roles and contents are encoded apart: a content has the same tokens wherever it stands."""
    segments, said = [], False
    for message in messages:
        segments += [Segment(end_of_text, said), Segment(message["role"] + "\n", False)]
        said = message["role"] == "assistant"
        segments.append(Segment(message["content"], said))
    segments.append(Segment(end_of_text, said))
    return [*segments, Segment("assistant\n", False)] if add_generation_prompt else segments


def plain_template(end_of_text: str) -> str:
    """The plain template in Jinja, for programs that read a tokenizer's template; `end_of_text`: the text of that token. A
    content that begins with a newline may get other tokens than ours, because we encode it separately from the role."""
    end = f"{{{{ {json.dumps(end_of_text)} }}}}"
    turns = "{% for message in messages %}" + end + "{{ message['role'] + '\\n' + message['content'] }}{% endfor %}"
    return turns + end + "{% if add_generation_prompt %}{{ 'assistant\\n' }}{% endif %}"


class _Jinja:
    """A Jinja template and the special tokens of its tokenizer."""

    def __init__(self, tokenizer: Tokenizer, text: str, now: datetime | None):
        self.text = text
        check_apart(tokenizer)
        self.special = _special_tokens(tokenizer)
        every = sorted(self.special, key=len, reverse=True)
        self.inside = re.compile("|".join(f"(?<={c})(?={rest})" for c, rest in _by_first_character(every)) or "(?!)")
        # Parts of special tokens at the edges of a content, which the adjacent text could complete.
        self.starts = tuple({s[n:] for s in every for n in range(1, len(s))})
        self.ends = tuple({s[:n] for s in every for n in range(1, len(s))})
        alike: dict[tuple[bool, bool], list[str]] = {}
        for special in every:
            alike.setdefault(self.special[special][1:], []).append(special)
        # Matches blanks before a token only from the start of their run: from each of n blanks, it would take n * n steps.
        self.pattern, self.pattern_here = (
            re.compile("|".join(_any_of(left * blanks, right, texts) for (left, right), texts in alike.items()) or "(?!)")
            for blanks in (r"(?:(?<!\s)\s+)?", r"\s*")
        )
        self.at_end = re.compile(rf"(?:{self.pattern.pattern})\s*\Z")
        self.ahead: dict[str, tuple[bool, str]] = {}
        try:
            content = json.dumps([text, now and now.isoformat(), _named_tokens(tokenizer)])
            self.program = program("template", content.encode())
        except ProgramError as error:
            raise DataError(f"expected a chat template in Jinja, found {error}; fetch the tokenizer again") from None
        self.has_generation = bool(re.search(r"\{%-?\s*generation\b", text))

    def segments(self, messages: Sequence[Message], add_generation_prompt: bool) -> list[Segment]:
        """Renders a conversation, and cuts it at its special tokens and around the trained stretches."""
        for number, message in enumerate(messages, start=1):
            if match := _OURS.search(message["content"]):
                raise DataError(f"expected text, found noncharacter U+{ord(match[0]):04X} in message {number}; remove it")
        shielded = self.shielded(messages)
        mark = self.marked_by_generation if self.has_generation else self.marked_by_difference
        try:
            text, spans = mark(shielded, add_generation_prompt)
        except DataError:
            if not add_generation_prompt:
                raise
            text, spans = self.rendered(shielded, True), []  # without marks, a template can still be used to chat
        segments, position = [], 0
        for first, end in spans:
            segments += [*self.cut(text[position:first], False), *self.cut(text[first:end], True)]
            position = end
        return [*segments, *self.cut(text[position:], False)]

    def render_ahead(self, talks: Sequence[Sequence[Message]]) -> None:
        """Renders everything that `segments` needs for most conversations, in one request."""
        needed = list[str]()
        for messages in map(self.shielded, talks):
            needed.append(json.dumps([messages, False]))
            if not self.has_generation:
                marked, said = _marked(messages), _answers(messages)
                needed.append(json.dumps([marked, False]))
                asked = (n for index, n in enumerate(said) if n and not _is_inner(index, said))
                needed += [json.dumps([marked[:number], True]) for number in asked]
        self.ahead = dict(zip(needed, self.request(needed), strict=True))

    def rendered(self, messages: list[dict[str, str]], add_generation_prompt: bool) -> str:
        rendering = json.dumps([messages, add_generation_prompt])
        well, text = self.ahead.get(rendering) or self.request([rendering])[0]
        if not well:
            raise DataError(f"expected a conversation that the tokenizer's template takes, found {text}")
        return text

    def request(self, renderings: list[str]) -> list[tuple[bool, str]]:
        """(True, text) or (False, reason for the failure) for each [messages, add_generation_prompt] in JSON."""
        try:
            return json.loads(self.program.run(f"[{','.join(renderings)}]".encode()))
        except ProgramError as error:
            return [(False, str(error))] * len(renderings)

    def shielded(self, messages: Sequence[Message]) -> list[dict[str, str]]:
        return [{**message, "content": self.shield(message["content"])} for message in messages]

    def shield(self, content: str) -> str:
        """`content` with a noncharacter inside each special token, and at each edge where other text could complete one."""
        content = self.inside.sub(SHIELD, content)
        inner = content.strip()
        before, after = SHIELD * inner.startswith(self.starts), SHIELD * inner.endswith(self.ends)
        first = len(content) - len(content.lstrip())
        return content[:first] + before + inner + after + content[first + len(inner) :]

    def marked_by_generation(self, messages: list[dict[str, str]], asks: bool) -> tuple[str, list[tuple[int, int]]]:
        """(rendered text, the stretches inside `{% generation %}`, each including the special token right after it)."""
        parts = re.split(f"[{BEGIN}{END}]", self.rendered(messages, asks))  # every second one is inside a block
        text, spans, end = "".join(parts), [], 0
        for number, part in enumerate(parts):
            first, end = end, end + len(part)
            if number % 2:
                last = self.at_end.search(part)
                ends_turn = self.pattern_here.match(text, first + last.start() if last else end)
                spans.append((first, max(end, ends_turn.end()) if ends_turn else end))
        if not spans and any(message["role"] == "assistant" for message in messages):
            raise DataError("expected a template that marks what the assistant says, found no generation block that it ran")
        return text, spans

    def marked_by_difference(self, messages: list[dict[str, str]], asks: bool) -> tuple[str, list[tuple[int, int]]]:
        """(rendered text, a stretch per answer, from the end of its prompt through the special token after its content)."""
        marked, said = _marked(messages), _answers(messages)
        text, spans = self.rendered(marked, asks), []
        if text.replace(CONTENT_END, "") != self.rendered(messages, asks) or text.count(CONTENT_END) != len(said):
            raise DataError("expected a template that writes every message of the assistant, found one that does not")
        prompts: list[str] = []
        ending = ""
        for index, number in enumerate(said):
            before, begin = spans[-1][1] if spans else 0, 0
            if _is_inner(index, said):
                ending = ending or self.ending(prompts)
                begin = begin_of_answer(text, before, ending, marked[number]["content"])
            if not begin:
                prompt = self.rendered(marked[:number], True) if number else self.opening(text)
                prompts.append(prompt)
                begin = len(prompt) if text.startswith(prompt) else -1
            content_end = text.find(CONTENT_END, max(0, begin))
            if begin < before or content_end < 0:
                raise DataError(
                    "expected a template whose prompt is how the conversation before it begins, found another text before"
                    f" message {number + 1}; use a template with {{% generation %}} around what the assistant says"
                )
            if (ends_turn := self.pattern.search(text, content_end)) is None:
                raise DataError(
                    f"expected a special token that ends the assistant's turn, found none after message {number + 1};"
                    " give the template one"
                )
            spans.append((begin, ends_turn.end()))
        return text, spans

    def ending(self, prompts: list[str]) -> str:
        """The common suffix of these prompts, from its first special token on if it has one."""
        backwards = sorted(prompt[::-1] for prompt in prompts)
        pairs = zip(backwards[0], backwards[-1], strict=False)  # as they are sorted, all share what these two share
        shared = "".join(one for one, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))[::-1]
        match = self.pattern.search(shared)
        return shared[match.start() :] if match else shared

    def opening(self, text: str) -> str:
        """The prompt before any message, for a conversation that the assistant begins; `text`: that conversation."""
        with contextlib.suppress(DataError):
            if text.startswith(prompt := self.rendered([], True)):
                return prompt
        raise DataError("expected a message before the assistant's first one, as the template needs, found none; add one")

    def cut(self, text: str, trained: bool) -> Iterator[Segment]:
        position = 0
        for match in self.pattern.finditer(text):
            yield from self.plain(text[position : match.start()], trained)
            yield Segment(self.special[match[match.lastindex or 0]][0], trained)
            position = match.end()
        yield from self.plain(text[position:], trained)

    def plain(self, text: str, trained: bool) -> Iterator[Segment]:
        if text := _OURS.sub("", text):
            yield Segment(text, trained)


def check_apart(tokenizer: Tokenizer) -> None:
    """Raises DataError for a tokenizer that changes a text's ends (a prefix space): conversations are encoded in pieces."""
    for text in ("a", " a\n"):
        if (decoded := tokenizer.decode(tokenizer.encode(text))) != text:
            raise DataError(
                f"expected a tokenizer that gives a text back, found {decoded!r} for {text!r} (a prefix space?);"
                " handgrad has no such chat"
            )


def _by_first_character(special: list[str]) -> list[tuple[str, str]]:
    """(first character, alternation of the remainders), as patterns: hundreds of tokens are tried at few places."""
    rests: dict[str, list[str]] = {}
    for text in special:
        rests.setdefault(re.escape(text[0]), []).append(re.escape(text[1:]))
    return [(first, f"(?:{'|'.join(each)})") for first, each in rests.items()]


def _any_of(left: str, right: bool, special: list[str]) -> str:
    """A pattern that captures any of these special tokens, with the blanks that they absorb on the `left` and right."""
    return left + f"({'|'.join(map(''.join, _by_first_character(special)))})" + r"\s*" * right


def begin_of_answer(text: str, first: int, ending: str, marked: str) -> int:
    """The index in `text`, from `first` on, where the next answer begins: right after a prompt's `ending`, with nothing but
    the answer up to its mark; 0 if there is none. `marked`: the answer with its mark."""
    end = text.find(CONTENT_END, first)
    position = text.rfind(ending, first, end) if ending else -1
    begin = position + len(ending)
    return begin if position >= 0 and text[begin:end].strip() == marked[: marked.index(CONTENT_END)].strip() else 0


def _answers(messages: list[dict[str, str]]) -> list[int]:
    return [number for number, message in enumerate(messages) if message["role"] == "assistant"]


def _is_inner(index: int, said: list[int]) -> bool:
    """True for an answer whose prompt is rendered only if `begin_of_answer` fails."""
    return RENDERED_PROMPTS <= index < len(said) - RENDERED_PROMPTS


def _marked(messages: list[dict[str, str]]) -> list[dict[str, str]]:
    return [{**m, "content": _mark(m["content"])} if m["role"] == "assistant" else m for m in messages]


def _mark(content: str) -> str:
    """`content` with a mark where its last word ends, so a template that trims blanks does not move the mark."""
    words = content.rstrip()
    return words + CONTENT_END + content[len(words) :]


def _object(tokenizer: Tokenizer, name: str) -> dict[str, Any]:
    if (content := tokenizer.settings(name)) is None:
        raise DataError(f"expected a JSON object in the tokenizer's {name}, found none; fetch it again")
    return content


def _special_tokens(tokenizer: Tokenizer) -> dict[str, tuple[int, bool, bool]]:
    """Text of a special token -> (id, absorbs blanks on its left, absorbs blanks on its right)."""
    added = parse_json(tokenizer.json_bytes).get("added_tokens") or [] if tokenizer.json_bytes else []
    special = [token for token in added if token.get("special") and token.get("content")]
    if sum((len(token["content"]) + 64) ** 2 for token in special) > MOST_SPECIAL:
        raise DataError(f"expected fewer or shorter special tokens, found {len(special)}; handgrad has no such chat")
    if (short := next((token["content"] for token in special if len(token["content"]) == 1), None)) is not None:
        raise DataError(f"expected special tokens of two characters or more, found {short!r}; handgrad has no such chat")
    if alone := next((token["content"] for token in special if token.get("single_word")), None):
        raise DataError(f"expected special tokens anywhere, found {alone!r} of single_word; handgrad has no such chat")
    return {token["content"]: (token["id"], bool(token.get("lstrip")), bool(token.get("rstrip"))) for token in special}


def _named_tokens(tokenizer: Tokenizer) -> dict[str, str]:
    """bos_token, eos_token and so on, the variables of a template."""
    named = {"eos_token": tokenizer.token_bytes[tokenizer.end_of_text].decode(errors="replace")}
    config, legacy = (_object(tokenizer, name) for name in ("tokenizer_config.json", "special_tokens_map.json"))
    # As transformers reads them: the map overrides the configuration, unless the latter lists all added tokens.
    for source in (legacy, config) if "added_tokens_decoder" in config else (config, legacy):
        for key, value in source.items():
            content = value.get("content") if isinstance(value, dict) else value
            if key.endswith("_token") and isinstance(content, str):
                named[key] = content
    return named
