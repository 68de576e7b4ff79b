"""GPT-2 as llm.c keeps it: one file, a header and the parameters, each tensor for all layers before the next.

    header    [0] 20240326  [1] 3: float32, 5: bf16  [2] maxT  [3] V  [4] L  [5] H  [6] C  [7] Vp
    wte (Vp, C) · wpe (maxT, C) · ln1w (L, C) · ln1b (L, C) · qkvw (L, 3C, C) · qkvb (L, 3C) · attprojw (L, C, C)
    attprojb (L, C) · ln2w (L, C) · ln2b (L, C) · fcw (L, 4C, C) · fcb (L, 4C) · fcprojw (L, C, 4C) · fcprojb (L, C)
    lnfw (C) · lnfb (C)

Matrices are (out, in), as ours. The head is the token embedding. Gradients, moments and master weights lie in other files
in the same order. The embedding's rows from V to Vp are zero in all of them: llm.c starts them so, its softmax leaves them
out, so they never get a gradient, and a decay of zero is zero.

Source: llm.c, train_gpt2.cu (`ParameterTensors`, `gpt2_write_to_checkpoint`) and train_gpt2.py (`write_model`).
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

from handgrad.data.llmc_header import HEADER_BYTES, MODEL, check_size, make_header, read_header
from handgrad.data.tokenizer import MAX_VOCAB_SIZE, Tokenizer
from handgrad.errors import DataError
from handgrad.evaluation.load import imported_config
from handgrad.interop.llmc_tokenizer import tokenizer_beside
from handgrad.memory.rows import ParameterRow
from handgrad.models import parameter_table
from handgrad.settings.config import ModelShape
from handgrad.storage.tensor_files import write_file

# Our names in their order; a block's name stands for all layers.
ORDER = (
    *("wte", "wpe", "ln1_weight", "ln1_bias", "qkv_weight", "qkv_bias", "proj_weight", "proj_bias"),
    *("ln2_weight", "ln2_bias", "fc_weight", "fc_bias", "fcproj_weight", "fcproj_bias", "lnf_weight", "lnf_bias"),
)
VERSIONS = {3: torch.float32, 5: torch.bfloat16}
STORED_AS = {torch.float32: np.dtype("<f4"), torch.bfloat16: np.dtype("<i2")}  # numpy has no bf16: its bits
Values = Callable[[ParameterRow], Tensor]  # a parameter, or its gradient or moment, with the shape `row.stored_shape`


class Span(NamedTuple):
    """The position of a parameter among all of them, in elements; the embedding's includes the padded rows."""

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


# Reading.


def read_numbers(path: Path, dtype: torch.dtype, offset_bytes: int, count: int) -> Tensor:
    """`count` numbers of a file, flat, in float32: the mapped file itself if it holds float32. Raises `DataError`."""
    try:
        mapped = np.memmap(path, STORED_AS[dtype], "c", offset_bytes, (count,))
    except (OSError, ValueError) as error:
        raise DataError(f"expected {count} numbers at byte {offset_bytes} of {path}, found {error}") from None
    return torch.from_numpy(mapped).view(dtype).float()


def without_padding(values: Tensor, row: ParameterRow, where: str) -> Tensor:
    """Cuts the padded rows off a parameter's flat numbers: -> `row.stored_shape`.

    Raises `DataError` if one is not finite, or a padded row is not zero.
    """
    finite = torch.isfinite(values)
    if not finite.all():
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
        """The named one, or the one beside the file, or the one of this size. `DataError` if there is none."""
        return tokenizer_beside(self.path, self.shape.vocab_size, self.named_tokenizer)

    def weight(self, row: ParameterRow) -> Tensor:
        """A parameter in float32, (`row.stored_shape`), from the mapped file. `DataError`: non-finite, or padding that is
        not zero."""
        span = self.spans[row.name]
        values = read_numbers(self.path, self.dtype, HEADER_BYTES + span.offset * self.dtype.itemsize, span.elements)
        return without_padding(values, row, f"{row.name} of {self.path}")


def read_model(path: Path, tokenizer: str = "") -> LlmcModel:
    """Opens a model file; `tokenizer` (gpt2, bytes or a file) replaces the one beside it.

    Raises `DataError` if it is none, or not whole. Reads weights and tokenizer on request.
    """
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


# Writing.


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
