"""GPT-2 in llm.c's format: a file of parameters, each tensor for all layers before the next, and a file of tokens.

model.bin
    header    [0] 20240326  [1] 3: float32, 5: bf16  [2] maxT  [3] V  [4] L  [5] H  [6] C  [7] Vp
    wte (Vp, C) · wpe (maxT, C) · ln1w (L, C) · ln1b (L, C) · qkvw (L, 3C, C) · qkvb (L, 3C) · attprojw (L, C, C)
    attprojb (L, C) · ln2w (L, C) · ln2b (L, C) · fcw (L, 4C, C) · fcb (L, 4C) · fcprojw (L, C, 4C) · fcprojb (L, C)
    lnfw (C) · lnfb (C)
gpt2_tokenizer.bin
    header    [0] 20240328  [1] 2 (1: without the id of end-of-text)  [2] V  [3] id of end-of-text
    per token    its length in bytes, one byte; its bytes

Matrices are (out, in), as ours. The head is the token embedding; its rows from V to Vp are zero. Other files hold gradients
in the same order. The file of tokens can decode but not encode, so at best it identifies a tokenizer.

Source: llm.c, train_gpt2.cu (`ParameterTensors`, `gpt2_write_to_checkpoint`), train_gpt2.py (`write_model`,
`write_tokenizer`) and llmc/tokenizer.h.
"""

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from handgrad.data.codes import PALETTE
from handgrad.data.llmc_header import HEADER_BYTES, MODEL, TOKENIZER, check_size, make_header, read_header
from handgrad.data.tokenizer import MAX_VOCAB_SIZE, TOKENIZER_FILE, Tokenizer, read_small
from handgrad.data.tokenizer_loading import load_tokenizer
from handgrad.errors import DataError, UsageError
from handgrad.evaluation.load import imported_config
from handgrad.memory.rows import ParameterRow, rounded_up
from handgrad.models import parameter_table
from handgrad.settings.config import VOCABULARY_MULTIPLE, ModelShape
from handgrad.storage.tensor_files import write_file

# Our names in llm.c's order; a block's name stands for all layers.
ORDER = (
    *("wte", "wpe", "ln1_weight", "ln1_bias", "qkv_weight", "qkv_bias", "proj_weight", "proj_bias"),
    *("ln2_weight", "ln2_bias", "fc_weight", "fc_bias", "fcproj_weight", "fcproj_bias", "lnf_weight", "lnf_bias"),
)
VERSIONS = {3: torch.float32, 5: torch.bfloat16}
STORED_AS = {torch.float32: np.dtype("<f4"), torch.bfloat16: np.dtype("<i2")}  # numpy has no bf16: its bits
GPT2_VOCAB_SIZE, LONGEST_TOKEN_BYTES = 50257, 255
Values = Callable[[ParameterRow], Tensor]  # a parameter, or its gradient, with the shape `row.stored_shape`


class Span(NamedTuple):
    """The position of a parameter in the file, in elements; the embedding's includes the padded rows."""

    row: ParameterRow
    offset: int
    elements: int


def layout(shape: ModelShape, padded_vocab_size: int) -> dict[str, Span]:
    """The parameters in llm.c's order, by name."""
    rows = {row.name: row for row in parameter_table(shape)}
    spans: dict[str, Span] = {}
    offset = 0
    for name in ORDER:
        for each in [name] if name in rows else [f"blocks.{layer}.{name}" for layer in range(shape.num_layers)]:
            row = rows.pop(each)
            count = padded_vocab_size if each == "wte" else row.shape[0]
            spans[each] = Span(row, offset, count * math.prod(row.shape[1:]))
            offset += spans[each].elements
    assert not rows, f"llm.c's files do not have {next(iter(rows))}"
    return spans


def count_elements(spans: Mapping[str, Span]) -> int:
    return sum(span.elements for span in spans.values())


# The model.


def read_numbers(path: Path, dtype: torch.dtype, offset_bytes: int, count: int) -> Tensor:
    """`count` numbers of a file, flat, in float32: the mapped file itself if it holds float32. Raises `DataError`."""
    try:
        mapped = np.memmap(path, STORED_AS[dtype], "c", offset_bytes, (count,))
    except (OSError, ValueError) as error:
        raise DataError(f"expected {count} numbers at byte {offset_bytes} of {path}, found {error}") from None
    return torch.from_numpy(mapped).view(dtype).float()


def without_padding(values: Tensor, row: ParameterRow, where: str) -> Tensor:
    """Cuts the padded rows off a parameter's flat numbers. Raises `DataError`: not finite, or padding that is not zero."""
    if not (finite := torch.isfinite(values)).all():
        raise DataError(f"expected finite numbers in {where}, found {int((~finite).sum())} that are not; it diverged")
    stored, padding = values.split([math.prod(row.stored_shape), values.numel() - math.prod(row.stored_shape)])
    if padding.any():
        raise DataError(
            f"expected zeros in the padded rows of {where}, found {int(padding.count_nonzero())} other numbers;"
            " llm.c keeps them zero, so the file is damaged or not llm.c's"
        )
    return stored.view(row.stored_shape)


@dataclass(frozen=True)
class LlmcModel:
    """A model file with a valid header and the size that the header implies."""

    path: Path
    shape: ModelShape
    dtype: torch.dtype
    spans: dict[str, Span]
    named_tokenizer: str

    @functools.cached_property
    def tokenizer(self) -> Tokenizer:
        """The named one, else the one next to the file, else the one of this size. `DataError` if there is none."""
        return tokenizer_beside(self.path, self.shape.vocab_size, self.named_tokenizer)

    def weight(self, row: ParameterRow) -> Tensor:
        """A parameter in float32, (`row.stored_shape`), from the mapped file. `DataError`: non-finite, padding not zero."""
        span = self.spans[row.name]
        values = read_numbers(self.path, self.dtype, HEADER_BYTES + span.offset * self.dtype.itemsize, span.elements)
        return without_padding(values, row, f"{row.name} of {self.path}")


def read_model(path: Path, tokenizer: str = "") -> LlmcModel:
    """Opens a model file; `tokenizer` (gpt2, bytes or a file) replaces the one next to it. Raises `DataError` if it is
    not a model file, or is cut. Reads weights and tokenizer on request."""
    words, size = read_header(path, MODEL, tuple(VERSIONS))
    length, vocab_size, layers, heads, channels, padded = words[2:8]
    shape = ModelShape(vocab_size, length, layers, heads, channels)
    imported_config(shape, str(path))
    if not 1 <= vocab_size <= min(padded, MAX_VOCAB_SIZE):
        raise DataError(
            f"expected a vocabulary of 1 to {MAX_VOCAB_SIZE} tokens, padded to no fewer, in the header of {path},"
            f" found {vocab_size} and {padded}; the file is damaged"
        )
    dtype, spans = VERSIONS[words[1]], layout(shape, padded)
    sizes = f"{shape.num_layers} layers of {shape.channels} channels and {padded} rows of vocabulary"
    check_size(path, HEADER_BYTES + count_elements(spans) * dtype.itemsize, size, sizes)
    return LlmcModel(path, shape, dtype, spans, tokenizer)


def all_bytes(shape: ModelShape, values: Values, dtype: torch.dtype) -> Iterator[memoryview | bytes]:
    """All parameters in llm.c's order, one at a time, the vocabulary padded with zeros."""
    for span in layout(shape, shape.padded_vocab_size).values():
        stored = values(span.row).to(dtype).contiguous().flatten()
        yield stored.view(torch.uint8).numpy().data
        yield bytes((span.elements - stored.numel()) * dtype.itemsize)


def write_model(path: Path, shape: ModelShape, weight: Values, dtype: torch.dtype) -> None:
    """Writes and fsyncs a model file in float32 or bf16. Raises OSError."""
    version = next(number for number, kind in VERSIONS.items() if kind == dtype)
    sizes = shape.sequence_length, shape.vocab_size, shape.num_layers, shape.num_heads, shape.channels
    words = dict(enumerate((MODEL, version, *sizes, shape.padded_vocab_size)))
    write_file(path, itertools.chain([make_header(words)], all_bytes(shape, weight, dtype)))


# The tokens.


def tokenizer_bytes(tokenizer: Tokenizer) -> bytes:
    """The content of the file. Raises `UsageError` if a token is too long for it, or for another
    model's tokenizer, as no file next to it could encode."""
    if tokenizer.kind in ("model", PALETTE):
        owner = "pictures'" if tokenizer.kind == PALETTE else "another model's"
        raise UsageError(f"expected the tokenizer gpt2, bytes or bpe for llm.c, found {owner}; `export --to hf` writes it")
    if (longest := max(map(len, tokenizer.token_bytes))) > LONGEST_TOKEN_BYTES:
        raise UsageError(
            f"expected tokens of at most {LONGEST_TOKEN_BYTES} bytes for llm.c's tokenizer file, found one of {longest};"
            " train the tokenizer on other text"
        )
    words = {0: TOKENIZER, 1: 2, 2: tokenizer.vocab_size, 3: tokenizer.end_of_text}
    return make_header(words) + b"".join(bytes([len(token)]) + token for token in tokenizer.token_bytes)


def read_tokens(path: Path) -> tuple[tuple[bytes, ...], int]:
    """(the bytes of every token, the id of end-of-text) of a tokenizer file. Raises `DataError`."""
    words, _ = read_header(path, TOKENIZER, (1, 2))
    count, end_of_text = words[2], words[3] if words[1] == 2 else GPT2_VOCAB_SIZE - 1
    if not 0 <= end_of_text < count <= MAX_VOCAB_SIZE:
        raise DataError(
            f"expected at most {MAX_VOCAB_SIZE} tokens and an end-of-text among them in {path}, found {count} and"
            f" {end_of_text}; the file is damaged"
        )
    content, tokens, start = read_small(path), [], HEADER_BYTES
    for number in range(count):
        if not (length := content[start] if start < len(content) else 0) or start + 1 + length > len(content):
            raise DataError(f"expected {count} tokens of 1 byte or more in {path}, found the end or none at {number}")
        tokens.append(content[start + 1 : start + 1 + length])
        start += 1 + length
    if start != len(content):
        raise DataError(f"expected {start} bytes for {count} tokens in {path}, found {len(content)}; copy it again")
    return tuple(tokens), end_of_text


def tokenizer_beside(path: Path, vocab_size: int, named: str) -> Tokenizer:
    """The tokenizer of the model file at `path`: the one `named`; else a `tokenizer.json` next to it; else GPT-2's or
    bytes, by the size of the vocabulary. A `*tokenizer.bin` next to the model must hold its tokens. Raises `DataError`
    if there is none, or if another model's is there."""
    if named:
        tokenizer = load_tokenizer(named)
    elif (path.parent / TOKENIZER_FILE).is_file():
        tokenizer = load_tokenizer(str(path.parent / TOKENIZER_FILE))
    else:
        # A model saved with its padding has more rows than GPT-2 has tokens: another vocabulary.
        if vocab_size not in (sizes := {kind.vocab_size: kind for kind in map(load_tokenizer, ("gpt2", "bytes"))}):
            hint = "; its rows are padded" if vocab_size == rounded_up(GPT2_VOCAB_SIZE, VOCABULARY_MULTIPLE) else ""
            raise DataError(
                f"expected the {GPT2_VOCAB_SIZE} tokens of GPT-2 in {path}, found {vocab_size}{hint};"
                " name the model's tokenizer with --tokenizer gpt2, bytes or FILE"
            )
        tokenizer = sizes[vocab_size]
    if tokenizer.vocab_size != vocab_size:
        raise DataError(
            f"expected a tokenizer of {vocab_size} tokens as {path} says, found one of {tokenizer.vocab_size}"
            f" ({tokenizer.kind}); name the model's own with --tokenizer gpt2, bytes or FILE"
        )
    beside = sorted(path.parent.glob("*tokenizer.bin"))
    if not named and len(beside) == 1 and read_tokens(beside[0]) != (tokenizer.token_bytes, tokenizer.end_of_text):
        raise DataError(
            f"expected the tokens of {tokenizer.kind} in {beside[0]}, found others; it decodes but cannot encode, so name"
            " the model's tokenizer with --tokenizer gpt2, bytes or FILE"
        )
    return tokenizer
