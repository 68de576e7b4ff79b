"""Vocabularies above 65,536: llm.c's token files of 32 bits, from `prepare` to a batch."""

import struct

import numpy as np
import pytest
import torch

from handgrad.data import writer
from handgrad.data.batches import Batches
from handgrad.data.llmc_header import NARROW, WIDE, header, token_form
from handgrad.data.prepare import PrepareOptions, prepare
from handgrad.data.shards import open_dataset
from handgrad.errors import DataError
from tests.data.chats import made_tokenizer, write_folder
from tests.data.conftest import contents, flip_bit

FILLER = 1 << 16


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_folder(made_tokenizer(None, FILLER), tmp_path_factory.mktemp("wide") / "model")


def test_a_vocabulary_above_65536(tmp_path, make_text, small_units, monkeypatch, model):
    """A smaller one has 16 bits; its tokens come back, and an interrupted attempt goes on to the same bytes."""
    assert token_form(1 << 16) is NARROW and token_form((1 << 16) + 1) is WIDE
    source, text = tmp_path / "a.txt", make_text(20_000)
    source.write_text(text)
    options = [
        PrepareOptions(str(source), tmp_path / name, str(model), shard_tokens=5000, workers=1) for name in ("a", "b")
    ]
    dataset = prepare(options[0]).dataset
    tokenizer, shards = dataset.tokenizer, dataset.splits["train"]
    assert tokenizer.vocab_size == 259 + FILLER + 4 and tokenizer.end_of_text >= 1 << 16 and len(shards) == 4
    content = shards[0].path.read_bytes()
    assert struct.unpack("<3i", content[:12]) == (20240801, 7, 5000) and len(content) == 1024 + 4 * 5000
    everything = np.concatenate([shard.tokens for split in dataset.splits.values() for shard in split])
    assert everything.dtype == np.uint32 and (everything == tokenizer.end_of_text).sum() == 2
    assert tokenizer.decode(everything[everything != tokenizer.end_of_text]) == text
    inputs, targets = torch.empty(2, 9, dtype=torch.int64), torch.empty(2, 9, dtype=torch.int64)
    Batches(shards, 9, 0, shuffle=False).fill(inputs, targets, 0)
    assert inputs[0, 0] == tokenizer.end_of_text and torch.equal(inputs[0, 1:], targets[0, :-1])

    def stop(progress):
        if progress.tokens > 8000:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt, match="go on"):
        prepare(options[1], stop)
    again, tokenize = [], writer.tokenize
    monkeypatch.setattr(writer, "tokenize", lambda *a: again.append(1) or tokenize(*a))
    prepare(options[1])
    assert contents(options[0].out) == contents(options[1].out) and 0 < len(again) < 7


def test_damage_in_32_bits(tmp_path, make_text, model):
    (tmp_path / "a.txt").write_text(make_text(3000))
    folder = prepare(PrepareOptions(str(tmp_path / "a.txt"), tmp_path / "out", str(model))).dataset.folder
    path = folder / "train_000000.bin"
    good = path.read_bytes()
    path.write_bytes(good[:-2])
    with pytest.raises(DataError, match=r"expected \d+ bytes"):
        open_dataset(folder)
    path.write_bytes(header(1)[:8] + good[8:])
    with pytest.raises(DataError, match="expected magic 20240801"):
        _ = open_dataset(folder).splits["train"][0].tokens
    path.write_bytes(good)
    flip_bit(path, 1024 + 4 * 7 + 3)
    with pytest.raises(DataError, match="SHA-256"):
        _ = open_dataset(folder).splits["train"][0].tokens


def test_a_bare_folder_of_llmc_for_llama_3(tmp_path):
    (tmp_path / "tinystories_train.bin").write_bytes(header(3, WIDE) + np.arange(3, dtype="<u4").tobytes())
    with pytest.raises(DataError, match=r"found Llama 3 tokens of llm\.c; prepare their text with --tokenizer") as raised:
        open_dataset(tmp_path)
    assert "\n" not in str(raised.value)
