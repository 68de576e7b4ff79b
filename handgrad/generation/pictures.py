"""Pictures from a model: prompts that begin with a class, a caption or a picture's upper rows, a decoder that finishes what
it begins, and a sheet of results."""

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import numpy as np
import torch

from handgrad.data.codes import MISSING, Codes, View, codes_of, parts_of, text_of
from handgrad.data.pictures import find_pictures, read_pictures
from handgrad.data.tokenizer import Tokenizer
from handgrad.errors import UsageError
from handgrad.generation.generate import Continuation, Decoder, SamplingOptions, stream_text
from handgrad.settings.config import ModelShape

# The codes that a document's picture still lacks; or, as a state, that none has begun. Both negative states also index the
# last rows of a table of four.
DONE, PICTURE, CAPTION, START = 0, 1, -2, -1
NEVER = -1e30  # logit of a forbidden token: finite, since `choose_tokens` takes an infinite one for divergence


class PictureDecoder(Decoder):
    """Keeps documents to the form of `data.codes`: a class or a line before a picture, then its codes alone, and after them
    no further picture. The device counts the codes: the host reads a token only after the next is chosen."""

    def __init__(self, codes: Codes, shape: ModelShape, *model: Any, **settings: Any):
        super().__init__(shape, *model, **settings)
        self.codes, self.last = codes, shape.vocab_size - 1
        colours, device = len(codes.colours), self.buf.tokens.device
        first_byte = colours + len(codes.classes)
        self.begun = [codes.count - 1] * colours + [codes.count] * len(codes.classes)  # by the token: the state after it
        self.begun += [codes.count if byte == ord("\n") else CAPTION for byte in range(self.last - first_byte)]
        self.begun.append(START if codes.classes or codes.captions else codes.count)
        of_state = {
            DONE: (first_byte, self.last + 1),
            PICTURE: (0, colours),
            CAPTION: (first_byte, self.last),
            START: (0 if codes.captions else colours, self.last),
        }
        self.states = torch.zeros_like(self.buf.tokens)
        self.allowed = torch.tensor([*of_state.values()], device=device)  # the first id, and the first after them
        self.after = torch.tensor(self.begun, device=device)
        self.ids = torch.arange(self.buf.logits.shape[1], device=device)

    def choose(self) -> None:
        first, end = self.allowed[self.states.clamp(max=PICTURE)].T.unsqueeze(2)  # (B, 1) each
        never = max(NEVER, torch.finfo(self.buf.logits.dtype).min)
        self.buf.logits.masked_fill_((self.ids < first) | (self.ids >= end), never)
        super().choose()
        after = self.after[self.buf.chosen.clamp(min=0)]
        self.states.copy_(torch.where(self.states < 0, after, (self.states - 1).clamp(min=0)))

    def enter(self, texts: dict[int, Continuation], most: int) -> None:
        super().enter(texts, most)
        for index, text in texts.items():
            tokens = [*text.prompt, *text.tokens]
            drawn = sum(token < len(self.codes.colours) for token in tokens)
            self.states[index] = max(0, self.codes.count - drawn) if drawn else self.begun[tokens[-1]]


def decoder_of(tokenizer: Tokenizer, *model: Any, **settings: Any) -> Decoder:
    """The decoder of a model with this tokenizer; the rest as for `Decoder`."""
    return PictureDecoder(codes, *model, **settings) if (codes := codes_of(tokenizer)) else Decoder(*model, **settings)


def write_document(
    shape: ModelShape, ops: ModuleType, weights: Any, buf: Any, tokenizer: Tokenizer, *, max_tokens: int, seed: int
) -> str:
    """Writes a document of up to `max_tokens` tokens without a prompt, with `handgrad sample`'s default options."""
    decoder = decoder_of(tokenizer, shape, ops, weights, buf, SamplingOptions(), end_of_text=tokenizer.end_of_text)
    document = Continuation(list(tokenizer.prompt_start), max_tokens, seed)
    return "".join(piece for _, piece in stream_text(decoder, tokenizer, iter([document])))


def form_of(tokenizer: Tokenizer) -> Codes:
    """The form of a model's pictures. Raises `UsageError` for a model of text."""
    if (codes := codes_of(tokenizer)) is None:
        raise UsageError("expected a model of pictures, found one of text; --image-out, --image-in, --class need pictures")
    return codes


def picture_prompt(codes: Codes, view: View, prompt: str, of_class: str, image: str, rows: int | None) -> str:
    """The text that a sample begins with. `image`: a file whose upper `rows` of codes the model continues; None: half of
    them, or all for a model that captions. Raises the errors of `class_text` and `read_pictures`."""
    begin = codes.class_text(of_class) if of_class else ""
    begin += f"{prompt.strip()}\n" if prompt and codes.captions else prompt
    if not image:
        return begin
    if rows is None:
        rows = codes.rows if codes.captions and not prompt else codes.rows // 2
    most = codes.rows if codes.captions else codes.rows - 1  # a model without captions has nothing to say after a picture
    if not 0 <= rows <= most:
        raise UsageError(f"expected --rows from 0 to {most}, found {rows}")
    (picture, *_) = read_pictures(find_pictures(image)[0], *view.size, count=1)
    return begin + text_of(view.encode(picture.pixels[None])[0, :rows])


def tokens_left(codes: Codes, prompt: str, context: int) -> int:
    """The tokens to sample after a prompt: what its picture lacks, or for a caption all that the context holds."""
    started = sum(int((part != MISSING).sum()) for part in parts_of(prompt, codes) if not isinstance(part, str))
    if codes.captions and (started == codes.count or not prompt):
        return context - started
    return codes.count - started + (1 if codes.classes and not prompt else 0)


def read_sheet(texts: Sequence[str], codes: Codes, view: View) -> tuple[list[str], list[np.ndarray]]:
    """(a line about the picture of each text: its class or caption, and what it lacks; the pixels of each)."""
    pictures, lines = [], []
    for number, text in enumerate(texts, start=1):
        parts = [*parts_of(text, codes)]
        shapes = [part for part in parts if not isinstance(part, str)] or [np.full((codes.rows, codes.columns), MISSING)]
        pictures.append(view.paint(shapes[0]))
        words = " ".join(part.strip() for part in parts if isinstance(part, str))
        lacking = int((shapes[0] == MISSING).sum())
        note = f"unfinished, {lacking} of {codes.count} codes are missing" if lacking else ""
        lines.append(f"{number:>3}  {'; '.join(filter(None, (words, note)))}".rstrip())
    return lines, pictures
