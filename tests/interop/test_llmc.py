"""Files of llm.c, written and read: the layout byte by byte, and the same bits after export and import."""

import json
import math
import struct
from pathlib import Path

import numpy as np
import pytest
import torch

from handgrad.cli import main
from handgrad.interop.llmc import read_tokens, tokenizer_bytes
from handgrad.storage import checkpoint
from tests.interop.models import SIZES, TOKENIZERS, make_checkpoint, our_logits, random_tokens, weights

# llm.c's own order and shapes, without the layers, written down once more from `ParameterTensors`.
THEIRS: tuple[tuple[str, str], ...] = (
    *(("wte", "Vp C"), ("wpe", "T C"), ("ln1_weight", "L C"), ("ln1_bias", "L C"), ("qkv_weight", "L 3C C")),
    *(("qkv_bias", "L 3C"), ("proj_weight", "L C C"), ("proj_bias", "L C"), ("ln2_weight", "L C"), ("ln2_bias", "L C")),
    *(("fc_weight", "L 4C C"), ("fc_bias", "L 4C"), ("fcproj_weight", "L C 4C"), ("fcproj_bias", "L C")),
    *(("lnf_weight", "C"), ("lnf_bias", "C")),
)


def read_as_llmc(path: Path) -> tuple[list[int], dict[str, np.ndarray]]:
    """A float32 model file, parsed by nothing of ours: header and tensors as llm.c points into them."""
    content = path.read_bytes()
    header = list(struct.unpack("<256i", content[:1024]))
    T, _, L, _, C, Vp = header[2:8]
    sizes = {"Vp": Vp, "T": T, "L": L, "C": C, "3C": 3 * C, "4C": 4 * C}
    tensors, start = {}, 1024
    for name, dims in THEIRS:
        shape = tuple(sizes[d] for d in dims.split())
        tensors[name] = np.frombuffer(content, "<f4", math.prod(shape), start).reshape(shape)
        start += 4 * math.prod(shape)
    assert start == len(content)
    return header, tensors


@pytest.mark.parametrize("kind", SIZES)
def test_a_model_file_is_llmcs(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Every byte has the place that llm.c reads it from, and comes back as the same bits."""
    run, shape = make_checkpoint(tmp_path / "run", kind)
    assert main(["export", str(run), "--to", "llmc", str(tmp_path / "c")]) == 0
    assert "every number is the same bits" in capsys.readouterr().out
    header, tensors = read_as_llmc(tmp_path / "c" / "model.bin")
    sizes = [shape.sequence_length, shape.vocab_size, shape.num_layers, shape.num_heads, shape.channels]
    assert header == [20240326, 3, *sizes, -(-shape.vocab_size // 128) * 128] + [0] * 248
    stored = weights(run)
    for name, values in tensors.items():
        for layer in range(shape.num_layers) if f"blocks.0.{name}" in stored else [None]:
            ours = stored[name if layer is None else f"blocks.{layer}.{name}"].numpy()
            theirs = values if layer is None else values[layer]
            assert np.array_equal(theirs[: len(ours)], ours) and not theirs[len(ours) :].any(), name
    assert main(["import", str(tmp_path / "c" / "model.bin"), "--out", str(tmp_path / "back")]) == 0
    after = weights(tmp_path / "back")
    assert stored.keys() == after.keys() and all(torch.equal(stored[name], after[name]) for name in stored)
    then, now = checkpoint.find(str(run)).manifest, checkpoint.find(str(tmp_path / "back")).manifest
    assert then["tokenizer"] == now["tokenizer"] and now["imported"]["from"] == "llm.c" and now["step"] == 0
    tokens, end_of_text = read_tokens(tmp_path / "c" / "gpt2_tokenizer.bin")
    assert tokens == TOKENIZERS[kind]().token_bytes and end_of_text == TOKENIZERS[kind]().end_of_text


def test_the_tokenizer_file_of_gpt2(tmp_path: Path) -> None:
    """As the published gpt2_tokenizer.bin begins and ends; without its end-of-text id (version 1) it reads the same."""
    content = tokenizer_bytes(TOKENIZERS["gpt2"]())
    assert struct.unpack("<4i", content[:16]) == (20240328, 2, 50257, 50256) and not any(content[16:1024])
    assert content[1024:1030] == b'\x01!\x01"\x01#' and content.endswith(b"\x0d<|endoftext|>")
    (tmp_path / "old.bin").write_bytes(struct.pack("<4i", 20240328, 1, 50257, 0) + content[16:])
    assert read_tokens(tmp_path / "old.bin") == (TOKENIZERS["gpt2"]().token_bytes, 50256)


def test_bf16(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Half the bytes; what comes back is the rounding of what went out; rounded again, it is the same file."""
    run, shape = make_checkpoint(tmp_path / "run", "bpe")
    for source, name in ((run, "half"), (tmp_path / "back", "again")):
        assert main(["export", str(source), "--to", "llmc", str(tmp_path / name), "--dtype", "bf16"]) == 0
        told = capsys.readouterr().out
        assert ("moves a logit by 0 at most" in told) == (name == "again") and "moves a logit by" in told
        if name == "half":
            assert main(["import", str(tmp_path / "half" / "model.bin"), "--out", str(tmp_path / "back")]) == 0
    before, after = weights(run), weights(tmp_path / "back")
    assert all(torch.equal(before[name].bfloat16().float(), after[name]) for name in before)
    content = (tmp_path / "half" / "model.bin").read_bytes()
    assert content == (tmp_path / "again" / "model.bin").read_bytes() and struct.unpack("<i", content[4:8]) == (5,)
    first = torch.tensor(np.frombuffer(content, "<i2", shape.channels, 1024)).view(torch.bfloat16)
    assert torch.equal(first, before["wte"][0].bfloat16())


def test_the_same_logits(tmp_path: Path) -> None:
    run, shape = make_checkpoint(tmp_path / "run", "bpe")
    assert main(["export", str(run), "--to", "llmc", str(tmp_path / "c")]) == 0
    named = ["--tokenizer", str(checkpoint.find(str(run)).folder / "tokenizer.json")]
    (tmp_path / "c" / "tokenizer.json").unlink()
    assert main(["import", str(tmp_path / "c" / "model.bin"), "--out", str(tmp_path / "back"), *named]) == 0
    tokens = random_tokens(shape)
    assert torch.equal(our_logits(run, tokens), our_logits(tmp_path / "back", tokens))
    assert json.loads((checkpoint.find(str(tmp_path / "back")).folder / "manifest.json").read_text())["step"] == 0
