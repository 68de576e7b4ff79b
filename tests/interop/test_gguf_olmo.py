"""`export --to gguf` of an OLMo: llama.cpp's network olmo2, and its text by a forward over the file alone."""

import math
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from handgrad.api.model import load
from handgrad.cli import main
from handgrad.errors import UsageError
from handgrad.interop.olmo import gguf_name
from handgrad.settings.config import ModelShape
from tests.interop.gguf_twin import GgufModel
from tests.interop.models import make_checkpoint
from tests.interop.test_gguf import round_weights

OLMOS = {
    "olmo2": "kv_heads=2,feed_forward=64",
    "olmo3": "feed_forward=60,window=7,rope=yarn,rope_factor=8.0,rope_length=32,rope_scale=1.2079441541679836",
}


class Olmo(GgufModel):
    """A Llama but, by llama.cpp's rules, for norms behind the halves and over all heads together; with a window, three of
    four layers have it, and do not stretch their angles."""

    windowed = False

    def size(self, key: str, default: Any = None) -> Any:
        return default if self.windowed and key.startswith("rope.scaling.") else super().size(key, default)

    def attention(self, x: np.ndarray, layer: str) -> np.ndarray:
        """One token at a time, over the tokens that it sees."""
        window = self.size("attention.sliding_window", 0)
        self.windowed = window > 0 and (int(layer.split(".")[1]) + 1) % 4 != 0
        q, k, v = (self.linear(x, f"{layer}.attn_{part}") for part in "qkv")
        q, k = self.norm(q, f"{layer}.attn_q_norm"), self.norm(k, f"{layer}.attn_k_norm")
        width = x.shape[1] // self.heads
        q, k, v = (part.reshape(len(x), -1, width) for part in (q, k, v))
        q, k = self.rotated(q), self.rotated(k)
        k, v = (np.repeat(part, self.heads // part.shape[1], axis=1) for part in (k, v))
        rows = []
        for place in range(len(x)):
            first = max(0, place + 1 - window) if self.windowed else 0
            scores = np.einsum("hd,khd->hk", q[place], k[first : place + 1]) / math.sqrt(width)
            shares = np.exp(scores - scores.max(-1, keepdims=True))
            shares /= shares.sum(-1, keepdims=True)
            rows.append(np.einsum("hk,khd->hd", shares, v[first : place + 1]).ravel())
        self.windowed = False
        return self.linear(np.stack(rows), f"{layer}.attn_output")

    def logits(self, tokens: list[int]) -> np.ndarray:
        x = self.tensors["token_embd.weight"][tokens]
        for number in range(self.layers):
            layer = f"blk.{number}"
            x = x + self.norm(self.attention(x, layer), f"{layer}.post_attention_norm")
            x = x + self.norm(self.feed_forward(x, layer), f"{layer}.post_ffw_norm")
        return self.norm(x, "output_norm")[-1] @ self.tensors["output.weight"].T


@pytest.mark.nightly(but=["olmo3"])
@pytest.mark.parametrize("kind", OLMOS)
def test_another_forward_over_the_file(kind: str, tmp_path: Path) -> None:
    """Names, sizes, frequencies, windows: greedy text of ours, of the weights as the file has them."""
    settings = {"architecture": "olmo", "sizes": (5, 4, 32, 96), "olmo": OLMOS[kind], "spread": 0.3}
    run, _ = make_checkpoint(tmp_path / "run", "bytes", **settings)
    assert main(["export", str(run), str(tmp_path / "a.gguf"), "--to", "gguf"]) == 0
    twin, ours = Olmo(tmp_path / "a.gguf"), load(run, device="cpu", precision="fp32")
    assert twin.network == "olmo2" and not any(name.endswith("attn_norm.weight") for name in twin.tensors)
    round_weights(ours)
    prompt = [3, 14, 15, 92, 65, 35, 89, 79, 32]
    text = twin.greedy(prompt, 40)
    rows = ours.logits([prompt + text])[0][len(prompt) - 1 : -1].double()
    for place, (row, token) in enumerate(zip(rows, text, strict=True)):
        assert int(row.argmax()) == token, place
        assert np.abs(row.numpy() - twin.logits(prompt + text[:place])).max() < 1e-3  # ours is in float32


def test_the_numbers_of_the_file(tmp_path: Path) -> None:
    run, _ = make_checkpoint(tmp_path / "run", "bytes", architecture="olmo", sizes=(2, 4, 32, 96), olmo=OLMOS["olmo3"])
    assert main(["export", str(run), str(tmp_path / "a.gguf"), "--to", "gguf"]) == 0
    fields = {name: field.contents() for name, field in gguf.GGUFReader(tmp_path / "a.gguf").fields.items()}
    sizes = {name.removeprefix("olmo2."): value for name, value in fields.items() if name.startswith("olmo2.")}
    assert sizes["attention.sliding_window"] == 7 and sizes["attention.head_count_kv"] == 4
    assert sizes["attention.layer_norm_rms_epsilon"] == pytest.approx(1e-6) and sizes["rope.freq_base"] == 500000.0
    assert (sizes["rope.scaling.type"], sizes["rope.scaling.factor"]) == ("yarn", 8.0)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("window=9,full_every=3", "llama.cpp has an OLMo with full_every 4 alone, found 3; use --to hf"),
        ("rope=yarn,rope_factor=2.0,rope_fast=16.0", "rope_fast 32 and rope_slow 1, found rope_fast 16.0"),
    ],
)
def test_networks_that_only_their_name_share(text: str, told: str) -> None:
    with pytest.raises(UsageError, match=told):
        gguf_name(ModelShape(57, 32, 5, 4, 32, "olmo", olmo=text))
    assert gguf_name(ModelShape(57, 32, 5, 4, 32, "olmo", olmo="full_every=3")) == "olmo2"
