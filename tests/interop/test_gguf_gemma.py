"""`export --to gguf` of a Gemma 3: gains of 1 + w, a SentencePiece, and its text by a forward over the file alone."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from handgrad.api.model import load
from handgrad.cli import main
from handgrad.data.model_tokenizer import model_tokenizer
from handgrad.errors import UsageError
from handgrad.interop.gemma3 import gguf_name
from handgrad.interop.gguf_file import export_gguf
from handgrad.settings.config import ModelShape
from handgrad.storage.checkpoint import find
from tests.interop.gguf_twin import GgufModel
from tests.interop.models import make_checkpoint
from tests.interop.test_gguf import round_weights, stored
from tests.interop.test_transformers_gemma import TEMPLATE, V, piece_tokenizer

GEMMA = "kv_heads=2,head_width=14,feed_forward=64,window=7,rope_factor=8.0"
NAMED = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>", "unk_token": "<unk>"}


class Gemma(GgufModel):
    """A Llama but, by llama.cpp's rules, for five of six layers, which have a window, and base 10000 without a scale."""

    windowed = False

    def size(self, key: str, default: Any = None) -> Any:
        if self.windowed and key.startswith("rope."):
            return {"rope.freq_base": 10000.0}.get(key, default)
        return super().size(key, default)

    def rotated(self, x: np.ndarray) -> np.ndarray:
        half = x.shape[-1] // 2
        frequencies = self.size("rope.freq_base") ** (-np.arange(half) / half) / self.size("rope.scaling.factor", 1.0)
        angles = np.arange(len(x))[:, None, None] * frequencies
        first, second = x[..., :half], x[..., half:]
        cos, sin = np.cos(angles), np.sin(angles)
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], -1)

    def attention(self, x: np.ndarray, layer: str) -> np.ndarray:
        """One token at a time, over the tokens that it sees; a window has a base of its own."""
        self.windowed = (int(layer.split(".")[1]) + 1) % 6 != 0
        q, k, v = (self.linear(x, f"{layer}.attn_{part}") for part in "qkv")
        width = super().size("attention.key_length")
        q, k, v = (part.reshape(len(x), -1, width) for part in (q, k, v))
        q, k = (self.rotated(self.norm(part, f"{layer}.attn_{name}_norm")) for name, part in (("q", q), ("k", k)))
        k, v = (np.repeat(part, self.heads // part.shape[1], axis=1) for part in (k, v))
        rows = []
        for place in range(len(x)):
            first = max(0, place + 1 - super().size("attention.sliding_window")) if self.windowed else 0
            scores = np.einsum("hd,khd->hk", q[place], k[first : place + 1]) / math.sqrt(width)
            shares = np.exp(scores - scores.max(-1, keepdims=True))
            shares /= shares.sum(-1, keepdims=True)
            rows.append(np.einsum("hk,khd->hd", shares, v[first : place + 1]).ravel())
        self.windowed = False
        return self.linear(np.stack(rows), f"{layer}.attn_output")

    def logits(self, tokens: list[int]) -> np.ndarray:
        x = self.tensors["token_embd.weight"][tokens] * math.sqrt(self.size("embedding_length"))
        for number in range(self.layers):
            layer = f"blk.{number}"
            half = self.attention(self.norm(x, f"{layer}.attn_norm"), layer)
            x = x + self.norm(half, f"{layer}.post_attention_norm")
            a = self.norm(x, f"{layer}.ffn_norm")
            gate, up = self.linear(a, f"{layer}.ffn_gate"), self.linear(a, f"{layer}.ffn_up")
            gelu = 0.5 * gate * (1 + np.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)))
            x = x + self.norm(self.linear(gelu * up, f"{layer}.ffn_down"), f"{layer}.post_ffw_norm")
        return self.norm(x, "output_norm")[-1] @ self.tensors["token_embd.weight"].T


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with random weights, of 13 layers: two see all tokens."""
    files = {"tokenizer_config.json": json.dumps(NAMED), "chat_template.jinja": TEMPLATE}
    words = model_tokenizer(piece_tokenizer().to_str().encode(), files, V, 1, "a test")
    settings = {"architecture": "gemma3", "sizes": (13, 4, 32, 96), "gemma3": GEMMA, "spread": 0.4}
    return make_checkpoint(tmp_path_factory.mktemp("gemma") / "run", words, **settings)[0]


def test_another_forward_over_the_file(run: Path, tmp_path: Path) -> None:
    """Names, sizes, gains, frequencies, windows: greedy text of ours, of the weights as the file has them."""
    assert main(["export", str(run), str(tmp_path / "a.gguf"), "--to", "gguf"]) == 0
    twin, ours = Gemma(tmp_path / "a.gguf"), load(run, device="cpu", precision="fp32")
    assert twin.network == "gemma3" and "output.weight" not in twin.tensors
    round_weights(ours)
    prompt = [3, 14, 15, 92, 65, 35]
    text = twin.greedy(prompt, 40)
    rows = ours.logits([prompt + text])[0][len(prompt) - 1 : -1].double()
    for place, (row, token) in enumerate(zip(rows, text, strict=True)):
        assert int(row.argmax()) == token, place
        assert np.abs(row.numpy() - twin.logits(prompt + text[:place])).max() < 1e-3  # ours is in float32


def test_every_gain_is_there_as_one_and_w(run: Path, tmp_path: Path) -> None:
    """And w again once the export reads it, to tell how far the rounding moves a logit."""
    done = export_gguf(find(run), tmp_path / "a", "bf16")
    assert 0 < done.rounding < 1
    found, w = stored(tmp_path / "a"), load(run, device="cpu", precision="fp32").weights
    names = {"attn_norm": "norm1", "post_attention_norm": "after1", "ffn_norm": "norm2", "post_ffw_norm": "after2"}
    for name, ours in (names | {"attn_q_norm": "q", "attn_k_norm": "k"}).items():
        assert torch.equal(torch.tensor(found[f"blk.3.{name}.weight"]), 1 + getattr(w.blocks[3], f"{ours}_gain")), name
    assert torch.equal(torch.tensor(found["output_norm.weight"]), 1 + w.lnf_gain)
    assert torch.equal(torch.tensor(found["token_embd.weight"]), w.wte[:V].bfloat16().float())


def test_metadata_and_tokenizer(run: Path, tmp_path: Path) -> None:
    """Pieces with blanks as their own character, the score of a token from its first merge, types, ids, the template."""
    assert main(["export", str(run), str(tmp_path / "a"), "--to", "gguf"]) == 0
    fields = {name: field.contents() for name, field in gguf.GGUFReader(tmp_path / "a").fields.items()}
    sizes = {name.removeprefix("gemma3."): value for name, value in fields.items() if name.startswith("gemma3.")}
    found = [sizes[f"attention.{name}"] for name in ("sliding_window", "key_length", "value_length", "head_count_kv")]
    assert found == [7, 14, 14, 2] and sizes["context_length"] == 96
    assert (sizes["rope.freq_base"], sizes["rope.scaling.type"], sizes["rope.scaling.factor"]) == (1e6, "linear", 8)
    tokens, types, scores = (fields[f"tokenizer.ggml.{name}"] for name in ("tokens", "token_type", "scores"))
    library = piece_tokenizer()
    assert tokens[:357] == [library.id_to_token(number) for number in range(357)] and tokens[379] == "[PAD379]"
    kinds = {name: types[library.token_to_id(name)] for name in ("<bos>", "<unk>", "<0x41>", "▁the", "\n\n")}
    assert kinds == {"<bos>": 3, "<unk>": 2, "<0x41>": 6, "▁the": 1, "\n\n": 4} and types[379] == 5
    by_score = sorted(range(357), key=lambda number: -scores[number])
    assert [tokens[number] for number in by_score[:7]] == ["th", "he", "the", "▁t", "▁the", "in", "▁▁"]
    assert fields["tokenizer.ggml.model"] == "llama" and fields["tokenizer.ggml.add_space_prefix"] is False
    assert fields["tokenizer.ggml.add_bos_token"] is True and "tokenizer.ggml.merges" not in fields
    ids = [fields[f"tokenizer.ggml.{name}_token_id"] for name in ("bos", "eos", "unknown", "padding")]
    assert ids == [2, 1, 3, 0] and fields["tokenizer.chat_template"] == TEMPLATE


@pytest.mark.parametrize(
    ("text", "layers", "told"),
    [
        ("full_every=3", 13, "full_every 6 alone, found 3; use --to hf"),
        ("window_rotary_base=500.0", 13, "window_rotary_base 10000.0 alone, found 500.0; use --to hf"),
        ("score_width=8", 13, "score_width 256 alone, found 8; use --to hf"),
        ("", 62, "score_width 8 alone, found 256; use --to hf"),
    ],
)
def test_networks_that_only_their_name_share(text: str, layers: int, told: str) -> None:
    with pytest.raises(UsageError, match=f"llama.cpp computes a Gemma 3 with {told}"):
        gguf_name(ModelShape(57, 32, layers, 4, 32, "gemma3", gemma3=text))
    assert gguf_name(dataclasses.replace(ModelShape(57, 32, 62, 4, 32, "gemma3", gemma3="score_width=8"))) == "gemma3"
