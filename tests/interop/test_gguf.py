"""`export --to gguf`: the file's tensors and metadata by the package's reader, and its text by a forward of its own."""

import builtins
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from tokenizers import Regex, Tokenizer as Library, decoders, models, pre_tokenizers

import handgrad
from handgrad.api.model import Model, load
from handgrad.cli import main
from handgrad.data.model_tokenizer import model_tokenizer
from handgrad.data.tokenizer import Tokenizer
from handgrad.data.tokenizer_loading import load_tokenizer
from handgrad.errors import StorageError, UsageError
from handgrad.interop import gguf_file
from handgrad.interop.gguf_file import in_halves, interleaved
from handgrad.interop.llama import gguf_name
from handgrad.settings.config import ModelShape
from tests.interop.gguf_twin import GgufModel
from tests.interop.models import bpe, make_checkpoint
from tests.test_commands import refused

CHAT = "{% for message in messages %}{{ message.content }}{% endfor %}"
LLAMA3 = "rope=llama3,rope_factor=8.0,rope_length=24,rotary_base=5000.0"
YARN = "rope=yarn,rope_factor=4.0,rope_length=24,rope_fast=32.0,rope_scale=1.3"
FAMILIES = {
    "gpt2": {"architecture": "gpt2", "sizes": (2, 2, 32, 96)},
    "llama": {"architecture": "llama", "sizes": (2, 4, 32, 96), "llama": f"kv_heads=2,feed_forward=64,tied,{LLAMA3}"},
    "qwen2": {"architecture": "llama", "sizes": (2, 4, 32, 96), "llama": f"kv_heads=1,feed_forward=40,qkv_bias,{YARN}"},
    "smollm3": {
        "architecture": "llama",
        "sizes": (5, 4, 32, 96),
        "llama": "kv_heads=2,feed_forward=64,tied,nope_interval=4",
    },
    "qwen3": {
        "architecture": "llama",
        "sizes": (2, 3, 32, 96),
        "llama": "head_width=14,feed_forward=64,qk_norm,rope=linear,rope_factor=2.0,norm_epsilon=1e-06",
    },
}


def library(*, splits: list | None = None) -> Library:
    """A byte-level tokenizer with special tokens: by default of SmolLM's splitter."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {character: i for i, character in enumerate(alphabet)} | {"he": 256, "Ġt": 257}
    made = Library(models.BPE(vocab=vocab, merges=[("h", "e"), ("Ġ", "t")]))
    level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.pre_tokenizer = pre_tokenizers.Sequence(splits or [pre_tokenizers.Digits(individual_digits=True), level])
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    made.add_tokens(["<think>"])
    return made


def words(others: dict[str, str] | None = None, end: int = 259, **how: Any) -> Tokenizer:
    """That tokenizer with rows of the vocabulary beside its tokens."""
    files = {"tokenizer_config.json": '{"eos_token": "<|im_end|>"}', "chat_template.jinja": CHAT}
    return model_tokenizer(library(**how).to_str().encode(), files if others is None else others, 270, end, "a test")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A folder with random weights of a family, made once."""
    made: dict[str, Path] = {}

    def get(family: str) -> Path:
        if family not in made:
            settings = FAMILIES[family]
            tokenizer = bpe() if family == "gpt2" else words()
            made[family], _ = make_checkpoint(tmp_path_factory.mktemp(family) / "run", tokenizer, spread=0.5, **settings)
        return made[family]

    return get


def stored(path: Path) -> dict[str, np.ndarray]:
    return {t.name: gguf.dequantize(t.data, t.tensor_type) for t in gguf.GGUFReader(path).tensors}


def of_ours(model: Model, name: str) -> torch.Tensor:
    """The weights that a tensor of the file holds, by the table in the docs, with q and k in llama.cpp's order."""
    shape, w = model.shape, model.weights
    if name in ("token_embd.weight", "position_embd.weight", "output.weight"):
        field = {"token_embd.weight": "wte", "position_embd.weight": "wpe", "output.weight": "head"}[name]
        return getattr(w, field)[: shape.vocab_size]
    if name.startswith("output_norm"):
        return getattr(
            w, "lnf_" + {"weight": "weight" if shape.architecture == "gpt2" else "gain", "bias": "bias"}[name[12:]]
        )
    _, layer, tensor, kind = name.split(".")
    block = w.blocks[int(layer)]
    if shape.architecture == "gpt2":
        field = {"attn_qkv": "qkv", "attn_output": "proj", "ffn_up": "fc", "ffn_down": "fcproj"}
        field |= {"attn_norm": "ln1", "ffn_norm": "ln2"}
        return getattr(block, f"{field[tensor]}_{kind}")
    if tensor in ("attn_norm", "ffn_norm", "attn_q_norm", "attn_k_norm"):
        field = {"attn_norm": "norm1", "ffn_norm": "norm2", "attn_q_norm": "q", "attn_k_norm": "k"}
        return getattr(block, f"{field[tensor]}_gain")
    if tensor in ("attn_output", "ffn_down"):
        return getattr(block, {"attn_output": "proj_weight", "ffn_down": "down_weight"}[tensor])
    if tensor in ("ffn_gate", "ffn_up"):
        return block.gate_up_weight.chunk(2)[tensor == "ffn_up"]
    D, K = shape.head_width, shape.family.kv_heads
    parts = dict(zip("qkv", getattr(block, f"qkv_{kind}").split([shape.num_heads * D, K * D, K * D]), strict=True))
    return parts[tensor[-1]]


def in_their_order(values: torch.Tensor, width: int) -> torch.Tensor:
    """Row by row: of each head the pairs (i, i + D/2) become neighbours."""
    order = [
        head + i + half * width // 2 for head in range(0, len(values), width) for i in range(width // 2) for half in (0, 1)
    ]
    return values[order]


@pytest.mark.nightly(but=["gpt2", "llama", "qwen3"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_tensor(family: str, run: Callable, tmp_path: Path) -> None:
    """f16 and bf16: each number rounded once; q8_0: within half a step of its block. Vectors stay as they are."""
    model = load(run(family), device="cpu", precision="fp32")
    for kind, dtype in (("f16", torch.float16), ("bf16", torch.bfloat16), ("q8_0", None)):
        assert main(["export", str(run(family)), str(tmp_path / kind), "--to", "gguf", "--dtype", kind]) == 0
        found = stored(tmp_path / kind)
        assert len(found) == len(set(found)) and ("output.weight" in found) == (family in ("qwen2", "qwen3"))
        if family == "llama":
            assert found.pop("rope_freqs.weight").shape == (4,)
        for name, values in found.items():
            ours = of_ours(model, name)
            if family in ("llama", "smollm3") and name.split(".")[-2] in ("attn_q", "attn_k"):
                ours = in_their_order(ours, model.shape.head_width)
            there = torch.from_numpy(values.copy())
            assert there.shape == ours.shape, name
            if ours.dim() == 1 or name == "position_embd.weight":
                assert torch.equal(there, ours), name
            elif dtype:
                assert torch.equal(there, ours.to(dtype).float()), name
            elif ours.shape[1] % 32:
                assert torch.equal(there, ours.half().float()), name
            else:
                blocks = ours.reshape(-1, 32)
                step = blocks.abs().amax(1, keepdim=True) / 127
                bound = step * (0.501 + 127 * 2**-11)  # half a step, and the step itself is rounded to float16
                assert ((there.reshape(-1, 32) - blocks).abs() <= bound).all(), name


def test_interleaved_rows() -> None:
    values = torch.arange(12.0).view(12, 1)  # 2 heads of 6
    assert interleaved(values, 2).flatten().tolist() == [0, 3, 1, 4, 2, 5, 6, 9, 7, 10, 8, 11]
    assert torch.equal(in_halves(interleaved(values, 2), 2), values)


@pytest.mark.nightly(but=["smollm3", "qwen2", "gpt2"])
@pytest.mark.parametrize("family", FAMILIES)
def test_another_forward_over_the_file(family: str, run: Callable, tmp_path: Path) -> None:
    """Names, sizes, order of the channels, frequencies: greedy text of ours, of the weights as the file has them."""
    assert main(["export", str(run(family)), str(tmp_path / "a.gguf"), "--to", "gguf"]) == 0
    twin, ours = GgufModel(tmp_path / "a.gguf"), load(run(family), device="cpu", precision="fp32")
    assert twin.network == family
    round_weights(ours)
    prompt = [3, 14, 15, 92, 65]
    text = twin.greedy(prompt, 60)
    rows = ours.logits([prompt + text])[0][len(prompt) - 1 : -1].double()
    for place, (row, token) in enumerate(zip(rows, text, strict=True)):
        assert int(row.argmax()) == token, place
        assert np.abs(row.numpy() - twin.logits(prompt + text[:place])).max() < 1e-3  # ours is in float32
    assert len(set(text)) > 8


def round_weights(model: Model) -> None:
    """To float16, where the file has it."""
    for row in model.table:
        if len(row.shape) == 2 and row.name != "wpe":
            row.stored(model.flat).copy_(row.stored(model.flat).half())


def test_metadata(run: Callable, tmp_path: Path) -> None:
    found = {}
    for family in FAMILIES:
        assert main(["export", str(run(family)), str(tmp_path / family), "--to", "gguf"]) == 0
        fields = gguf.GGUFReader(tmp_path / family).fields
        found[family] = {name: field.contents() for name, field in fields.items()}
    gpt2, llama, qwen2, qwen3 = (found[family] for family in ("gpt2", "llama", "qwen2", "qwen3"))
    assert gpt2["gpt2.attention.layer_norm_epsilon"] == pytest.approx(1e-5) and gpt2["gpt2.context_length"] == 96
    assert (gpt2["gpt2.block_count"], gpt2["gpt2.embedding_length"], gpt2["gpt2.feed_forward_length"]) == (2, 32, 128)
    assert gpt2["gpt2.attention.head_count"] == 2 and gpt2["general.file_type"] == 1
    assert (llama["llama.attention.head_count"], llama["llama.attention.head_count_kv"]) == (4, 2)
    assert llama["llama.attention.layer_norm_rms_epsilon"] == pytest.approx(1e-5)
    assert llama["llama.rope.freq_base"] == 5000 and "llama.rope.scaling.type" not in llama
    assert qwen2["qwen2.rope.scaling.type"] == "yarn" and qwen2["qwen2.rope.scaling.original_context_length"] == 24
    assert qwen2["qwen2.rope.scaling.yarn_beta_fast"] == 32 and qwen2["qwen2.rope.scaling.yarn_beta_slow"] == 1
    assert qwen3["qwen3.attention.key_length"] == qwen3["qwen3.attention.value_length"] == 14
    assert qwen3["qwen3.rope.dimension_count"] == 14 and qwen3["qwen3.rope.scaling.factor"] == 2
    assert qwen3["qwen3.attention.layer_norm_rms_epsilon"] == pytest.approx(1e-6)


def test_the_tokenizer(run: Callable, tmp_path: Path) -> None:
    """Tokens in their alphabet, types, merges, ids and the chat template."""
    assert main(["export", str(run("llama")), str(tmp_path / "a"), "--to", "gguf"]) == 0
    fields = {name: field.contents() for name, field in gguf.GGUFReader(tmp_path / "a").fields.items()}
    tokens, types = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    inside = library()
    assert tokens[:261] == [inside.id_to_token(i) for i in range(261)] and tokens[261] == "[PAD261]" and len(tokens) == 270
    assert types == [1] * 258 + [3, 3, 4] + [5] * 9
    assert fields["tokenizer.ggml.merges"] == ["h e", "Ġ t"] and fields["tokenizer.ggml.pre"] == "smollm"
    assert fields["tokenizer.ggml.eos_token_id"] == 259 and "tokenizer.ggml.bos_token_id" not in fields
    assert fields["tokenizer.ggml.model"] == "gpt2" and fields["tokenizer.chat_template"] == CHAT
    assert fields["tokenizer.ggml.add_bos_token"] is False, "the default of llama.cpp depends on the splitter"
    assert main(["export", str(run("gpt2")), str(tmp_path / "b"), "--to", "gguf"]) == 0
    fields = {name: field.contents() for name, field in gguf.GGUFReader(tmp_path / "b").fields.items()}
    end = bpe().end_of_text
    assert fields["tokenizer.ggml.tokens"][end] == "<|endoftext|>" and fields["tokenizer.ggml.token_type"][end] == 3
    assert fields["tokenizer.ggml.bos_token_id"] == fields["tokenizer.ggml.eos_token_id"] == end
    assert fields["tokenizer.ggml.add_bos_token"] is True and fields["tokenizer.ggml.pre"] == "gpt-2"


def pre(*steps: Any) -> dict[str, Any]:
    return json.loads(library(splits=list(steps)).to_str())


def test_splitters() -> None:
    """By the names that llama.cpp has for them; one that it lacks is an error of one line."""
    plain = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    for pattern, name in gguf_file.PATTERNS.items():
        assert gguf_file.splitter(pre(pre_tokenizers.Split(Regex(pattern), "isolated"), plain)) == name
    assert gguf_file.splitter(pre(pre_tokenizers.ByteLevel(add_prefix_space=False))) == "gpt-2"
    for other in ((pre_tokenizers.Split(Regex("a|b"), "isolated"), plain), (pre_tokenizers.Whitespace(), plain)):
        with pytest.raises(UsageError, match=r"splitter that llama.cpp has"):
            gguf_file.splitter(pre(*other))


def test_words_of_gpt2_and_bytes() -> None:
    """Vocabularies without a file of their own. llama.cpp refuses one without merges: bytes have one that leads nowhere."""
    for kind in ("gpt2", "bytes"):
        writer = gguf.GGUFWriter(None, "gpt2")
        gguf_file.add_tokenizer(writer, load_tokenizer(kind))
        fields = {name: value.value for name, value in writer.kv_data[0].items()}
        tokens, merges = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.merges"]
        assert len(tokens) == load_tokenizer(kind).vocab_size and tokens[-1] == "<|endoftext|>"
        assert merges[0] == {"gpt2": "Ġ t", "bytes": "~ ~"}[kind] and ("~~" in tokens) == (kind == "gpt2")


def test_what_cannot_be_written(
    run: Callable, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    modern, _ = make_checkpoint(tmp_path / "modern", "bytes", architecture="modern", sizes=(2, 2, 32, 64))
    out = str(tmp_path / "x.gguf")
    assert "no network like the modern one" in refused(capsys, 64, "export", str(modern), out, "--to", "gguf")
    told = refused(capsys, 64, "export", str(run("llama")), out, "--to", "gguf", "--dtype", "fp32")
    assert "--dtype of --to gguf" in told and "f16, bf16, q8_0" in told
    assert "--dtype of --to hf" in refused(capsys, 64, "export", str(run("llama")), out, "--to", "hf", "--dtype", "q8_0")
    large, _ = make_checkpoint(tmp_path / "large", "bytes", spread=1e5)
    assert "above 65504" in refused(capsys, 64, "export", str(large), out, "--to", "gguf")
    assert main(["export", str(large), out, "--to", "gguf", "--dtype", "bf16"]) == 0
    assert "already exists" in refused(capsys, 64, "export", str(large), out, "--to", "gguf")
    real = builtins.__import__

    def without(name: str, *how: Any) -> Any:
        if name == "gguf":
            raise ImportError(name)
        return real(name, *how)

    monkeypatch.setattr(builtins, "__import__", without)
    told = refused(capsys, 64, "export", str(run("llama")), str(tmp_path / "y"), "--to", "gguf")
    assert "pip install gguf" in told
    assert sorted(path.name for path in tmp_path.iterdir()) == ["large", "modern", "x.gguf"]


@pytest.mark.parametrize(
    "family, told",
    [
        (
            "rope=yarn,rope_factor=4.0,rope_fast=16.0",
            "rope_fast 32 and rope_slow 1, found rope_fast 16.0 and rope_slow 1.0",
        ),
        ("rope=yarn,rope_factor=4.0,rope_fast=32.0,rope_slow=2.0", "found rope_fast 32.0 and rope_slow 2.0"),
        ("qk_norm,rope=llama3,rope_factor=8.0", "rope=llama3 in the network llama alone, found it in a qwen3"),
        ("qkv_bias,rope=llama3,rope_factor=8.0", "rope=llama3 in the network llama alone, found it in a qwen2"),
        ("qkv_bias,head_width=16", "found head_width 16 of 2 heads in 16 channels"),
    ],
)
def test_networks_that_only_their_names_share(family: str, told: str) -> None:
    """llama.cpp fails to load such a file, or computes another model of it."""
    with pytest.raises(UsageError, match=told):
        gguf_name(ModelShape(57, 32, 1, 2, 16, "llama", llama=family))


def test_a_disk_that_returns_other_bytes(run: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = gguf_file.write

    def damaged(writer: Any, path: Path, *given: Any) -> None:
        write(writer, path, *given)
        content = bytearray(path.read_bytes())
        content[-40] ^= 1
        path.write_bytes(content)

    monkeypatch.setattr(gguf_file, "write", damaged)
    with pytest.raises(StorageError, match=r"gave another .* than was written"):
        handgrad.export(run("qwen3"), tmp_path / "x", to="gguf")
    assert list(tmp_path.iterdir()) == []


def test_what_the_command_says(run: Callable, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert main(["export", str(run("llama")), str(tmp_path / "a"), "--to", "gguf", "--dtype", "q8_0"]) == 0
    told = capsys.readouterr().out
    assert "of weights in q8_0" in told and "every number is the same bits" in told and "moves a logit by" in told
    assert handgrad.export(run("llama"), tmp_path / "b", to="gguf").rounding < 1
