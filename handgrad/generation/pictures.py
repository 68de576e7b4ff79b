"""Pictures from a model: prompts that begin with a class, a caption or a picture's upper rows, and a sheet of results."""

from collections.abc import Sequence

import numpy as np

from handgrad.data.codes import MISSING, Codes, View, codes_of, parts_of, text_of
from handgrad.data.pictures import find_pictures, read_pictures
from handgrad.data.tokenizer import Tokenizer
from handgrad.errors import UsageError


def form_of(tokenizer: Tokenizer) -> Codes:
    """The form of a model's pictures. Raises `UsageError` for a model of text."""
    codes = codes_of(tokenizer)
    if codes is None:
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
