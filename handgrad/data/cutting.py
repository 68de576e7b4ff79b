"""Cuts of a long text whose pieces, tokenised one by one, give the tokens of the whole.

GPT-2's splitter never matches a blank after a non-blank, so a boundary of its parts lies before every blank that
follows a non-blank; the text left of it is split without a look to the right of it. The same holds after a single newline
between two non-blanks, which is a part of its own. Byte-pair merges stay inside a part.
"""

import re
from collections.abc import Iterable, Iterator
from typing import BinaryIO

PIECE_CHARACTERS = 1 << 18
# A piece this long is cut anywhere: a text without a blank for a million characters is no prose, and memory is bounded.
MAX_PIECE_CHARACTERS = 1 << 20
CUT_WINDOW_BYTES = 1 << 16

# Python's \S excludes a few control characters more than the splitter's, so a cut found here is one there.
_SAFE = re.compile(r"(?<=\S)[ \n]")
# Cuts of a file in two, the best first: after a line, before a blank (both safe), after any newline, anywhere between two
# characters. Bytes, and only ASCII neighbours where safety needs them: a byte of a longer character says too little.
_FILE_CUTS = tuple(
    re.compile(pattern)
    for pattern in (rb"(?<=[!-~]\n)(?=[!-~])", rb"(?<=[!-~])(?=[ \n])", rb"(?<=\n)(?=\S)", rb"(?=[^\x80-\xbf])")
)


def cut(blocks: Iterable[str]) -> Iterator[str]:
    """A text that arrives in `blocks` of any sizes, as pieces of about 256 Ki characters; at most 1 Mi and a block."""
    pending = ""
    for block in blocks:
        pending += block
        while len(pending) > PIECE_CHARACTERS:
            if (blank := _SAFE.search(pending, PIECE_CHARACTERS)) is not None:
                end = blank.start()
            elif len(pending) >= MAX_PIECE_CHARACTERS:
                end = MAX_PIECE_CHARACTERS
            else:
                break
            yield pending[:end]
            pending = pending[end:]
    if pending:
        yield pending


def slices(text: str) -> Iterator[str]:
    """A text in memory as blocks for `cut`, so that `cut` does not copy the rest of it for every piece."""
    for start in range(0, len(text), PIECE_CHARACTERS):
        yield text[start : start + PIECE_CHARACTERS]


def file_cut(file: BinaryIO, size_bytes: int, fraction: float) -> int:
    """The byte where the last `fraction` of a UTF-8 file begins, at the next good cut; `size_bytes` if none."""
    target = int(size_bytes * (1 - fraction))
    start = max(0, target - 2)  # the patterns look two bytes back
    file.seek(start)
    window = file.read(CUT_WINDOW_BYTES)
    for pattern in _FILE_CUTS:
        found = pattern.search(window, target - start)
        if found is not None and start + found.start() < size_bytes:
            return start + found.start()
    return size_bytes
