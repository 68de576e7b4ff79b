"""A GPT-2 and a Llama in plain numpy from a GGUF file alone: names, sizes and order of channels by llama.cpp's rules."""

import math
from pathlib import Path
from typing import Any

import gguf
import numpy as np


class GgufModel:
    """`logits` of a token after those before it. No cache: every call is a whole forward in float64."""

    def __init__(self, path: Path):
        self.reader = gguf.GGUFReader(path)
        self.tensors = {t.name: gguf.dequantize(t.data, t.tensor_type).astype(np.float64) for t in self.reader.tensors}
        self.network = self.value("general.architecture")
        self.layers, self.heads = self.size("block_count"), self.size("attention.head_count")

    def value(self, key: str, default: Any = None) -> Any:
        field = self.reader.get_field(key)
        return default if field is None else field.contents()

    def size(self, key: str, default: Any = None) -> Any:
        return self.value(f"{self.network}.{key}", default)

    def linear(self, x: np.ndarray, name: str) -> np.ndarray:
        y = x @ self.tensors[f"{name}.weight"].T
        return y + self.tensors[f"{name}.bias"] if f"{name}.bias" in self.tensors else y

    def norm(self, x: np.ndarray, name: str) -> np.ndarray:
        weight = self.tensors[f"{name}.weight"]
        if self.network == "gpt2":
            x = x - x.mean(-1, keepdims=True)
            epsilon = self.size("attention.layer_norm_epsilon")
        else:
            epsilon = self.size("attention.layer_norm_rms_epsilon")
        y = x / np.sqrt((x * x).mean(-1, keepdims=True) + epsilon) * weight
        return y + self.tensors[f"{name}.bias"] if f"{name}.bias" in self.tensors else y

    def rotated(self, x: np.ndarray) -> np.ndarray:
        """(T, heads, D): ggml's rope, of pairs of neighbours for `llama` and `smollm3`, of halves for the others."""
        width = self.size("rope.dimension_count")
        frequencies = self.size("rope.freq_base") ** (-2 * np.arange(width // 2) / width)
        if "rope_freqs.weight" in self.tensors:
            frequencies = frequencies / self.tensors["rope_freqs.weight"]
        if self.size("rope.scaling.type") == "linear":
            frequencies = frequencies / self.size("rope.scaling.factor")
        scale = 1.0
        if self.size("rope.scaling.type") == "yarn":
            frequencies, scale = self.yarn(frequencies)
        angles = np.arange(len(x))[:, None, None] * frequencies
        cos, sin = scale * np.cos(angles), scale * np.sin(angles)
        found = np.empty_like(x)
        halves = slice(0, width // 2), slice(width // 2, width)
        first, second = (slice(0, None, 2), slice(1, None, 2)) if self.network in ("llama", "smollm3") else halves
        found[..., first] = x[..., first] * cos - x[..., second] * sin
        found[..., second] = x[..., first] * sin + x[..., second] * cos
        return found

    def yarn(self, frequencies: np.ndarray) -> tuple[np.ndarray, float]:
        """ggml's `rope_yarn`: its ramp between two dimensions, and its scale of the magnitude."""
        width, factor = self.size("rope.dimension_count"), self.size("rope.scaling.factor")
        length, base = self.size("rope.scaling.original_context_length"), self.size("rope.freq_base")

        def dimension(turns: float) -> float:
            return width * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(base))

        low = max(0, math.floor(dimension(self.size("rope.scaling.yarn_beta_fast"))))
        high = min(width - 1, math.ceil(dimension(self.size("rope.scaling.yarn_beta_slow"))))
        ramp = 1 - np.clip((np.arange(width // 2) - low) / max(0.001, high - low), 0, 1)
        mixed = frequencies / factor * (1 - ramp) + frequencies * ramp
        return mixed, self.size("rope.scaling.attn_factor") * (1 + 0.1 * math.log(factor))

    def attention(self, x: np.ndarray, layer: str) -> np.ndarray:
        length = len(x)
        if self.network == "gpt2":
            q, k, v = np.split(self.linear(x, f"{layer}.attn_qkv"), 3, axis=-1)
            q, k, v = (part.reshape(length, self.heads, -1) for part in (q, k, v))
        else:
            q, k, v = (self.linear(x, f"{layer}.attn_{part}") for part in "qkv")
            shared = self.size("attention.head_count_kv")
            q = q.reshape(length, self.heads, self.size("attention.key_length"))
            k, v = (part.reshape(length, shared, -1) for part in (k, v))
            if f"{layer}.attn_q_norm.weight" in self.tensors:
                q, k = self.norm(q, f"{layer}.attn_q_norm"), self.norm(k, f"{layer}.attn_k_norm")
            if not (self.network == "smollm3" and (int(layer.split(".")[1]) + 1) % 4 == 0):  # no key says so
                q, k = self.rotated(q), self.rotated(k)
            k, v = (np.repeat(part, self.heads // shared, axis=1) for part in (k, v))
        scores = np.einsum("qhd,khd->hqk", q, k) / math.sqrt(q.shape[-1])
        scores[:, np.triu(np.ones((length, length), dtype=bool), 1)] = -np.inf
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        return self.linear(np.einsum("hqk,khd->qhd", weights, v).reshape(length, -1), f"{layer}.attn_output")

    def feed_forward(self, x: np.ndarray, layer: str) -> np.ndarray:
        up = self.linear(x, f"{layer}.ffn_up")
        if self.network == "gpt2":
            hidden = 0.5 * up * (1 + np.tanh(math.sqrt(2 / math.pi) * (up + 0.044715 * up**3)))
        else:
            gate = self.linear(x, f"{layer}.ffn_gate")
            hidden = gate / (1 + np.exp(-gate)) * up
        return self.linear(hidden, f"{layer}.ffn_down")

    def logits(self, tokens: list[int]) -> np.ndarray:
        x = self.tensors["token_embd.weight"][tokens]
        if self.network == "gpt2":
            x = x + self.tensors["position_embd.weight"][: len(tokens)]
        for number in range(self.layers):
            layer = f"blk.{number}"
            x = x + self.attention(self.norm(x, f"{layer}.attn_norm"), layer)
            x = x + self.feed_forward(self.norm(x, f"{layer}.ffn_norm"), layer)
        head = "output" if "output.weight" in self.tensors else "token_embd"
        return self.norm(x, "output_norm")[-1] @ self.tensors[f"{head}.weight"].T

    def greedy(self, tokens: list[int], count: int) -> list[int]:
        found = list(tokens)
        for _ in range(count):
            found.append(int(self.logits(found).argmax()))
        return found[len(tokens) :]
