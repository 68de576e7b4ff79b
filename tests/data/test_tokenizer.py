"""Tokenizers: the published vocabulary and splitter, exact round trips, and an identity that travels."""

import functools
import hashlib
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tiktoken
import tokenizers
from hypothesis import given, settings, strategies as st

from handgrad.data import tokenizer as module
from handgrad.data.tokenizer import train_bpe, write_tokenizer
from handgrad.data.tokenizer_loading import load_tokenizer, read_tokenizer
from handgrad.errors import DataError, UsageError

PUBLISHED_PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""
TRICKY = st.text(st.sampled_from("ab'sl 1٣ \t\n\r\x1c\xa0\u2003.!-é中🙂<|>")) | st.text(
    st.characters(exclude_categories=["Cs"])
)


@pytest.fixture(scope="module")
def bpe():
    return train_bpe(["to be or not to be, that is the question " * 50, "the thing that they think" * 20], 280)


@pytest.fixture(scope="module")
def every(bpe):
    return [load_tokenizer("gpt2"), load_tokenizer("bytes"), bpe]


def test_the_vocabulary_is_the_published_one_and_credited():
    sha256 = hashlib.sha256(module.GPT2_FILE.read_bytes()).hexdigest()
    assert sha256 == "306cd27f03c1a714eca7108e03d66b7dc042abe8c258b44c199a7ed9838dd930"
    assert sha256 in (Path(__file__).parents[2] / "NOTICE").read_text()


def test_a_damaged_vocabulary_is_refused(tmp_path, monkeypatch):
    (tmp_path / "damaged").write_bytes(module.GPT2_FILE.read_bytes()[:-1])
    monkeypatch.setattr(module, "GPT2_FILE", tmp_path / "damaged")
    with pytest.raises(DataError, match="SHA-256"):
        module.gpt2_tokenizer.__wrapped__()


def test_gpt2_known_tokens():
    gpt2 = load_tokenizer("gpt2")
    assert gpt2.encode("Hello world, it's 42!").tolist() == [15496, 995, 11, 340, 338, 5433, 0]
    assert gpt2.encode("").tolist() == []
    assert gpt2.encode("a").dtype == np.uint16
    assert (gpt2.vocab_size, gpt2.end_of_text, gpt2.decode([50256])) == (50257, 50256, "<|endoftext|>")


@settings(max_examples=300, deadline=None)
@given(TRICKY)
def test_our_pattern_splits_as_the_published_one(text):
    gpt2 = load_tokenizer("gpt2")
    assert gpt2.encode(text).tolist() == encoding(PUBLISHED_PATTERN).encode_ordinary(text)


@pytest.mark.parametrize(
    "pieces",
    [
        ["they", "'re", " I", "'ve", " we", "'ll", " it", "'s", " I", "'m", " don", "'t", " he", "'d"],
        ["THEY", "'", "RE"],
        ["1234567", " 12345", ",", " \u0663\u0664\u0665\u0666"],
        ["a", "!?", "b", "_", "c", " ", " d", "\n\n", "\n", "e", "  "],
    ],
)
def test_pieces_of_a_text(pieces):
    """GPT-2's: seven contractions in lower case, all digits that stand together, all letters, all other signs. A piece has
    the tokens in the text that its bytes are merged into alone."""
    merged = [token for piece in pieces for token in encoding(r"(?s:.+)").encode_ordinary(piece)]
    assert load_tokenizer("gpt2").encode("".join(pieces)).tolist() == merged


@functools.cache
def encoding(pattern):
    ranks = {token: rank for rank, token in enumerate(load_tokenizer("gpt2").token_bytes[:50256])}
    return tiktoken.Encoding("published", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})


@settings(max_examples=200, deadline=None)
@given(text=TRICKY)
def test_round_trip(every, text):
    for tokenizer in every:
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert tokenizer.decode_bytes(ids) == text.encode()
        assert tokenizer.end_of_text not in ids


def test_a_literal_marker_in_the_text_is_text(every):
    for tokenizer in every:
        ids = tokenizer.encode("a<|endoftext|>b")
        assert tokenizer.end_of_text not in ids and tokenizer.decode(ids) == "a<|endoftext|>b"


def test_runs_of_blanks_of_any_length(every):
    gpt2 = every[0]
    text = "x" + " \n" * 40_000 + "y" + "\t" * 70_000
    plain = encoding(module.GPT2_PATTERN).encode_to_numpy(text, disallowed_special=())
    assert module._LONG_BLANKS.search(text) and np.array_equal(gpt2.encode(text), plain)
    for tokenizer in every:  # tiktoken alone gives up here
        text = "x" + " " * 1_500_000 + "y"
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_what_is_no_text_or_no_token_is_refused(every):
    for tokenizer in every:
        with pytest.raises(DataError, match="surrogate"):
            tokenizer.encode("a\ud800")
        for bad in (-1, tokenizer.vocab_size):
            with pytest.raises(DataError, match=f"found {bad}"):
                tokenizer.decode([0, bad])


def test_a_cut_character_decodes_to_a_replacement(every):
    for tokenizer in every:
        first = next(i for i, token in enumerate(tokenizer.token_bytes) if token == b"\xe6")
        assert tokenizer.decode([first]) == "\ufffd"


def test_a_trained_vocabulary(bpe):
    assert bpe.kind == "bpe" and bpe.vocab_size == 280 and bpe.end_of_text == 279
    assert len(bpe.encode("the question that they think")) < 14
    assert train_bpe(["abc"], 1000).vocab_size == 257  # nothing repeats: no merges
    long = train_bpe(["a" * 4096 + "b"] * 2, 1000)  # learnt in cuts
    assert any(token == b"aa" for token in long.token_bytes) and b"ab" not in long.token_bytes
    for size in (256, 65537):
        with pytest.raises(UsageError):
            train_bpe(["abc"], size)


def test_training_is_deterministic_across_processes(bpe):
    code = (
        "from handgrad.data.tokenizer import train_bpe;"
        "print(train_bpe(['to be or not to be, that is the question ' * 50, 'the thing that they think' * 20], 280).sha256)"
    )
    for hash_seed in ("1", "2"):
        run = subprocess.run(
            [sys.executable, "-c", code], env={"PYTHONHASHSEED": hash_seed}, capture_output=True, text=True
        )
        assert run.stdout.strip() == bpe.sha256, run.stderr


def test_the_tokenizers_library_reads_our_file_and_agrees(bpe, make_text):
    text = make_text(20_000)
    theirs = tokenizers.Tokenizer.from_str(bpe.json_bytes.decode())
    assert theirs.encode(text).ids == bpe.encode(text).tolist()
    assert theirs.token_to_id("<|endoftext|>") == bpe.end_of_text
    assert theirs.decode(theirs.encode(text).ids) == text


def test_the_identity_travels(every, tmp_path):
    for tokenizer in every:
        record = json.loads(json.dumps(write_tokenizer(tokenizer, tmp_path)))
        again = read_tokenizer(tmp_path, record)
        assert again.sha256 == tokenizer.sha256 and np.array_equal(again.encode("that is"), tokenizer.encode("that is"))
        for key, wrong in (("sha256", "0" * 64), ("vocab_size", 5), ("end_of_text", 1), ("kind", "gpt3")):
            with pytest.raises(DataError):
                read_tokenizer(tmp_path, record | {key: wrong})


def test_another_tokenizer_file_in_the_folder_is_refused(bpe, tmp_path):
    record = write_tokenizer(bpe, tmp_path)
    write_tokenizer(train_bpe(["something else"], 300), tmp_path)
    with pytest.raises(DataError, match="sha256"):
        read_tokenizer(tmp_path, record)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(DataError, match="no such file"):
        read_tokenizer(tmp_path, record)


def test_loading_by_path(bpe, tmp_path):
    write_tokenizer(bpe, tmp_path)
    assert load_tokenizer(str(tmp_path / "tokenizer.json")).sha256 == load_tokenizer(str(tmp_path)).sha256 == bpe.sha256
    with pytest.raises(UsageError, match="gpt3"):
        load_tokenizer("gpt3")


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (["model", "type"], "Unigram", "BPE model"),
        (["model", "dropout"], 0.1, "dropout"),
        (["normalizer"], {"type": "Lowercase"}, "normalizer"),
        (["pre_tokenizer", "add_prefix_space"], True, "splitter"),
        (["pre_tokenizer", "type"], "Whitespace", "ByteLevel"),
        (["added_tokens"], [], "only added token"),
        (["added_tokens", 0, "id"], 7, "gaps"),
        (["model", "vocab", "zz"], 299.0, "gaps"),
        (["model", "vocab", "\u4e2d"], 280, "alphabet"),
        (["model", "merges"], [["a"]], "merges"),
        (["model", "merges"], [["a", "\u0143"]], "merges"),
        (["model", "merges"], 3, "vocab, merges"),
    ],
)
def test_a_tokenizer_that_is_not_ours_is_refused(bpe, tmp_path, path, value, message):
    tables = json.loads(bpe.json_bytes)
    place = tables
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    (tmp_path / "tokenizer.json").write_text(json.dumps(tables))
    with pytest.raises(DataError, match=message):
        load_tokenizer(str(tmp_path))
