"""The Llama family in transformers and back: equal logits, greedy texts and gradients for random weights of each type."""

import dataclasses
import json
import shutil
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import tokenizers
import torch
import transformers
from safetensors.torch import load_file
from torch import nn

from handgrad.api.model import load
from handgrad.cli import main
from handgrad.data.tokenizer_loading import load_tokenizer
from handgrad.errors import DataError, UsageError
from handgrad.interop import gemma3 as gemma_files, huggingface, llama as llama_files, sources
from handgrad.memory.rows import flat_elements
from handgrad.models import parameter_table
from handgrad.settings.config import ModelShape
from tests.interop.llama_configs import CONFIGS, LENGTH, YARN, V
from tests.interop.models import random_tokens, their_logits, weights
from tests.interop.parity import (
    angles_in_float64,
    check_gradients,
    check_likeliest,
    check_logits,
    check_same_files,
    check_same_model,
    norms_in_float64,
    theirs,
)
from tests.test_commands import refused

KINDS = list(CONFIGS)


def byte_tokenizer() -> tokenizers.Tokenizer:
    """A byte-level tokenizer with a splitter of its own and two special tokens, as Qwen's is."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocab = {character: i for i, character in enumerate(alphabet)} | {"he": 256, "Ġt": 257}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[("h", "e"), ("Ġ", "t")]))
    digits = tokenizers.pre_tokenizers.Digits(individual_digits=True)
    level = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([digits, level])
    made.decoder = tokenizers.decoders.ByteLevel()
    made.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    return made


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A folder of transformers with random weights of a type, biases and gains among them, made once; Qwen3's in shards."""
    made: dict[str, Path] = {}

    def get(kind: str) -> Path:
        if kind not in made:
            torch.manual_seed(1)
            folder = made[kind] = tmp_path_factory.mktemp(kind)
            model = transformers.AutoModelForCausalLM.from_config(CONFIGS[kind])
            for name, values in model.named_parameters():
                if values.dim() == 1:
                    nn.init.normal_(values, mean=0.0 if name.endswith("bias") else 1.0, std=0.2)
            model.config.eos_token_id = 259
            model.save_pretrained(folder, max_shard_size="30KB" if kind == "qwen3" else "1GB")
            byte_tokenizer().save(str(folder / "tokenizer.json"))
            (folder / "tokenizer_config.json").write_text('{"eos_token": "<|im_end|>", "clean_up": "naïve"}')
            (folder / "chat_template.jinja").write_text("{{ messages }}\n")
        return made[kind]

    return get


@pytest.mark.nightly(but=["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("kind", KINDS)
def test_logits_and_greedy_texts(kind: str, saved: Callable, run: Callable) -> None:
    model = theirs(saved(kind))
    check_likeliest(model, run(kind), check_logits(model, run(kind))[:7])


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_equal_theirs(kind: str, saved: Callable, run: Callable) -> None:
    """In float64, with their norms and angles in float64 as well."""
    model, family = theirs(saved(kind), torch.float64), load(run(kind), device="cpu").shape.family
    norms_in_float64(model)
    model.model.rotary_emb.forward = lambda x, position_ids: angles_in_float64(
        position_ids, family.frequencies, family.rope_scale
    )
    check_gradients(model, run(kind))


@pytest.mark.parametrize("kind", KINDS)
def test_frequencies_are_theirs(kind: str, saved: Callable, run: Callable) -> None:
    """To float32, in which they make them."""
    rotary, family = theirs(saved(kind)).model.rotary_emb, load(run(kind), device="cpu").shape.family
    ours = torch.tensor(family.frequencies, dtype=torch.float64)
    assert ((rotary.inv_freq.double() / ours) - 1).abs().max() < 1e-6
    assert rotary.attention_scaling == pytest.approx(family.rope_scale, rel=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_export_gives_the_folder_back(kind: str, saved: Callable, run: Callable, tmp_path: Path) -> None:
    """Type, sizes, weights bit by bit, tokenizer files as they came; and what transformers computes of it."""
    assert main(["export", str(run(kind)), "--to", "hf", str(tmp_path / "hf")]) == 0
    check_same_model(theirs(saved(kind)), theirs(tmp_path / "hf"), load(run(kind), device="cpu").shape)
    check_same_files(saved(kind), tmp_path / "hf")
    assert main(["import", str(tmp_path / "hf"), "--out", str(tmp_path / "again")]) == 0
    ours, again = weights(run(kind)), weights(tmp_path / "again")
    assert ours.keys() == again.keys() and all(torch.equal(ours[name], again[name]) for name in ours)
    card = (tmp_path / "hf" / "README.md").read_text()
    assert f"- {kind}\n" in card and "# A Llama of" in card


@pytest.mark.parametrize(
    "name, content, told",
    [
        ("chat_template.jinja", b"\xff\xfe", "expected UTF-8 in {}, found other bytes"),
        ("added_tokens.json", b'{"a": [1]}', "expected the added token 'a' ("),
        ("config.json", b"\xff", "expected JSON in {}, found"),
    ],
)
def test_a_damaged_file_is_named(name: str, content: bytes, told: str, saved: Callable, tmp_path: Path, capsys) -> None:
    made = shutil.copytree(saved("llama"), tmp_path / "hf")
    (made / name).write_bytes(content)
    capsys.readouterr()  # of the library that made the folder
    assert told.format(made / name) in refused(capsys, 65, "import", str(made), "--out", str(tmp_path / "run"))


@pytest.mark.parametrize("pad, kept", [(258, 258), (None, None), (V, None), ("258", None)])
def test_the_padding_token_comes_back(pad: object, kept: int | None, saved: Callable, tmp_path: Path) -> None:
    """In config.json, by which transformers leaves a row of the embedding untrained; that of generation may be another."""
    made = shutil.copytree(saved("llama"), tmp_path / "hf")
    content = json.loads((made / "config.json").read_text())
    (made / "config.json").write_text(json.dumps(content | {"pad_token_id": pad}))
    (made / "generation_config.json").write_text('{"eos_token_id": 259, "pad_token_id": 259}')
    for command in (
        ["import", made, "--out", tmp_path / "run"],
        ["export", tmp_path / "run", tmp_path / "back", "--to", "hf"],
    ):
        assert main([*map(str, command)]) == 0
    assert json.loads((tmp_path / "back" / "config.json").read_text()).get("pad_token_id") == kept
    names = {path.name for path in (tmp_path / "back").iterdir()}
    assert names >= {path.name for path in made.iterdir()}
    assert (tmp_path / "back" / "generation_config.json").read_bytes() == (made / "generation_config.json").read_bytes()
    assert (
        load(str(tmp_path / "back"), device="cpu").tokenizer.others == load(str(made), device="cpu").tokenizer.others
        or not kept
    )


def test_a_tied_head_that_is_stored_is_read(saved: Callable, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    from safetensors.torch import save_file

    folder = shutil.copytree(saved("llama"), tmp_path / "hf")
    stored = load_file(folder / "model.safetensors")
    assert "lm_head.weight" not in stored
    stored["lm_head.weight"] = stored["model.embed_tokens.weight"].clone()
    save_file(stored, folder / "model.safetensors")
    assert main(["import", str(folder), "--out", str(tmp_path / "run")]) == 0
    stored["lm_head.weight"][3, 5] += 1
    save_file(stored, folder / "model.safetensors")
    told = refused(capsys, 65, "import", str(folder), "--out", str(tmp_path / "other"))
    assert "expected lm_head.weight equal to model.embed_tokens.weight" in told


def test_the_models_tokenizer(saved: Callable, run: Callable) -> None:
    """Their ids, text's bytes back, special tokens in a text as text, and rows of the vocabulary without a token."""
    ours, library = load(run("qwen2"), device="cpu").tokenizer, byte_tokenizer()
    for text in ("the he, 1234 there\n", "naïve 你好 👩‍👩‍👧", "", "   \n\t x"):
        assert ours.encode(text).tolist() == library.encode(text, add_special_tokens=False).ids
        assert ours.decode(ours.encode(text)) == text
    marked = ours.encode("<|im_end|>")
    assert 259 not in marked and ours.decode(marked) == "<|im_end|>" and ours.decode([259]) == "<|im_end|>"
    assert ours.vocab_size == V and ours.end_of_text == 259 and ours.token_bytes[300] == b""


def test_its_weights_are_finetuned_on_text_of_its_tokenizer(run: Callable, saved: Callable, tmp_path: Path) -> None:
    """Prepared with the tokenizer of the folder or of the run, trained, and exported with the files that came."""
    (tmp_path / "text.txt").write_text("the other there is the 42nd\n" * 900)
    for number, source in enumerate((saved("qwen3"), run("qwen3"))):
        shards, out = tmp_path / f"shards{number}", tmp_path / f"out{number}"
        prepared = [
            "prepare",
            str(tmp_path / "text.txt"),
            "--out",
            str(shards),
            "--tokenizer",
            str(source),
            "--workers",
            "1",
        ]
        assert main(prepared) == 0
        sizes = ["--sequence-length", "32", "--steps", "3", "--tokens-per-step", "64", "--micro-batch", "2"]
        watched = ["--eval-tokens", "64", "--sample-tokens", "3", "--device", "cpu", "--log-every", "1"]
        command = ["train", "--init-from", str(run("qwen3")), "--data", str(shards), "--out", str(out)]
        assert main([*command, *sizes, *watched]) == 0
    assert main(["export", str(out), "--to", "hf", str(tmp_path / "hf")]) == 0
    assert (tmp_path / "hf" / "chat_template.jinja").read_text() == "{{ messages }}\n"
    config = theirs(tmp_path / "hf").config
    assert config.max_position_embeddings == LENGTH, "that of the weights, not of the rows that it was finetuned on"


REFUSED: dict[str, tuple[dict[str, object], str]] = {
    "another type": (
        {"model_type": "qwen3_moe"},
        '"handgrad_modern", "llama", "qwen2", "qwen3", "smollm3", "mistral", "gemma3_text", "gemma3", "olmo2", "olmo3" in',
    ),
    "sliding window": ({"use_sliding_window": True}, "expected use_sliding_window false in"),
    "layers with windows": ({"layer_types": ["full_attention", "sliding_attention"]}, "expected layer_types of full_atten"),
    "layers that are a number": ({"layer_types": 1}, "expected layer_types of full_attention in"),
    "a scale that is a word": (
        {"rope_parameters": {"rope_type": "yarn", "factor": 8.0, "mscale": "x", "mscale_all_dim": 1.0}},
        "expected mscale above 0 in",
    ),
    "activation": ({"hidden_act": "gelu"}, 'expected hidden_act "silu" in'),
    "bias of o": ({"attention_bias": True}, "expected attention_bias false in"),
    "bias of the MLP": ({"mlp_bias": True}, "expected mlp_bias false in"),
    "rope": (
        {"rope_parameters": {"rope_type": "longrope"}},
        'expected rope_type "default" or "linear" or "llama3" or "yarn"',
    ),
    "half a rope": ({"rope_parameters": {"rope_type": "llama3", "factor": 8}}, "expected low_freq_factor above 0 in"),
    "rope by layers": (
        {"rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 4.0}}},
        "expected rope_parameters as one object for all layers in",
    ),
    "both directions": ({"is_causal": False}, "expected is_causal true in"),
    "part of the heads": ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "expected partial_rotary_factor 1.0 in"),
    "neighbours turn": ({"rope_interleaved": True}, "expected rope_interleaved false in"),
    "quantised": (
        {"quantization_config": {"bits": 4}},
        "found {'bits': 4}; give the model in 16 or 32 bits (under adapters",
    ),
    "heads": ({"num_key_value_heads": 4}, "kv_heads that divide num_heads 6"),
    "no size": ({"intermediate_size": None}, "expected intermediate_size of 1 or more in"),
    "epsilon": ({"rms_norm_eps": -1}, "expected rms_norm_eps above 0 in"),
    "small vocabulary": ({"vocab_size": 100}, "found 100; for added tokens call model.resize_token_embeddings(260) in"),
    "other sizes": ({"num_hidden_layers": 4}, "expected a tensor model.layers.3.self_attn.q_proj.weight of shape (36, 36)"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_handgrad_lacks_is_named(name: str, saved: Callable, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    folder, (change, told) = shutil.copytree(saved("llama"), tmp_path / "hf"), REFUSED[name]
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | change))
    capsys.readouterr()  # of the library that saved it
    assert told in refused(capsys, 65, "import", str(folder), "--out", str(tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_other_lists_of_rotating_layers_are_refused(saved: Callable, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    folder = shutil.copytree(saved("smollm3"), tmp_path / "hf")
    config = json.loads((folder / "config.json").read_text())
    assert config["no_rope_layers"] == [1, 0, 1, 0, 1]
    capsys.readouterr()  # of the library that saved it
    for layers in ([1, 0, 1, 0, 0], [0, 1, 1, 1, 1], [1, 0, 1, 0], "all", [1, 0, 1, 0, 2]):
        (folder / "config.json").write_text(json.dumps(config | {"no_rope_layers": layers}))
        line = refused(capsys, 65, "import", str(folder), "--out", str(tmp_path / "run"))
        assert "expected no_rope_layers with a 0 at every so manyth layer and 1 elsewhere in" in line


@pytest.mark.parametrize(
    ("files", "kind", "key", "listed"),
    [(llama_files, "smollm3", "no_rope_layers", [1, 0]), (gemma_files, "gemma3_text", "layer_types", ["full_attention"])],
)
def test_a_list_of_layers_is_not_made_to_be_compared(
    files: ModuleType, kind: str, key: str, listed: list, tmp_path: Path
) -> None:
    """A small file may ask for a million layers; with a billion the list would fill the memory."""
    content = {"model_type": kind, "vocab_size": 260, "num_hidden_layers": 1_000_000, key: listed}
    content |= {"hidden_size": 36, "num_attention_heads": 6, "intermediate_size": 36, "max_position_embeddings": 64}
    tracemalloc.start()
    try:
        with pytest.raises(DataError, match=f"expected {key}"):
            files.read_shape(content, tmp_path / "config.json")
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


LINEAR = {"rope_type": "linear", "factor": 4.0}


@pytest.mark.parametrize(
    "change",
    [
        {"rope_scaling": LINEAR},  # beside the rope_parameters of a newer version, as model cards say to add it
        {"rope_scaling": YARN, "original_max_position_embeddings": 32},
        {"rope_parameters": {"rope_type": "yarn", "factor": 2.0}},  # its length is the context's
        {"rope_scaling": YARN | {"mscale": 2.0, "mscale_all_dim": 0.5}},
        {"rope_scaling": YARN | {"mscale": 2.0}},  # without the other it counts for nothing
        {"rope_parameters": None, "rope_theta": 777.0, "rope_scaling": {"type": "linear", "factor": 2.0}},  # old
    ],
)
def test_settings_of_frequencies_that_stand_twice(change: dict, saved: Callable, tmp_path: Path) -> None:
    folder = shutil.copytree(saved("qwen3"), tmp_path / "hf")
    config = json.loads((folder / "config.json").read_text())
    plain = load(str(folder), device="cpu")
    (folder / "config.json").write_text(json.dumps(config | change))
    ours, tokens = load(str(folder), device="cpu"), random_tokens(plain.shape)
    logits = their_logits(theirs(folder), tokens)
    assert (ours.logits([tokens])[0] - logits).abs().max() <= 1e-4
    assert (plain.logits([tokens])[0] - logits).abs().max() > 0.1


def test_sizes_are_read_without_weights(saved: Callable, run: Callable) -> None:
    for kind in KINDS:
        assert sources.read_sizes(str(saved(kind))) == sources.read_sizes(str(run(kind)))


def test_parameters_of_published_sizes() -> None:
    """As published: https://huggingface.co/Qwen/Qwen2.5-1.5B and https://huggingface.co/meta-llama/Llama-3.2-1B."""
    qwen = {"vocab_size": 151936, "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28}
    qwen |= {"num_attention_heads": 12, "num_key_value_heads": 2, "tie_word_embeddings": True, "rope_theta": 1e6}
    meta = {"vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16}
    meta |= {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64, "tie_word_embeddings": True}
    for kind, config, parameters in (("qwen2", qwen, 1_543_714_304), ("llama", meta, 1_235_814_400)):
        content = {"model_type": kind, "max_position_embeddings": 131072, **config}
        shape = llama_files.read_shape(content, Path("config.json"))
        table = parameter_table(shape)
        assert sum(row.stored_rows * row.elements // row.shape[0] for row in table) == parameters
        assert flat_elements(table) >= parameters


@pytest.mark.nightly(but=["smollm3"])
@pytest.mark.parametrize("kind", KINDS)
def test_greedy_texts_with_the_cache(kind: str, saved: Callable, run: Callable) -> None:
    """200 tokens after a prompt, by both programs' generation."""
    ours = load(run(kind), device="cpu")
    start = [ours.tokenizer.end_of_text, *ours.tokenizer.encode("the other").tolist()]
    options = {"do_sample": False, "max_new_tokens": 200, "pad_token_id": 0}
    inputs = torch.tensor([start])
    written = theirs(saved(kind)).generate(inputs, attention_mask=torch.ones_like(inputs), eos_token_id=259, **options)
    written = written[0, len(start) :].tolist()
    text = ours.generate("the other", max_tokens=200, temperature=0)
    assert len(set(written)) > 10 and text == ours.tokenizer.decode(token for token in written if token != 259)


@pytest.mark.parametrize(
    "content, begins", [('{"bos_token_id": 5}', 5), ('{"bos_token_id": [5]}', 257), ("{}", 257), ("[", 257)]
)
def test_the_first_token_is_the_models_own(content: str, begins: int) -> None:
    tokenizer = dataclasses.replace(load_tokenizer("bytes"), others={huggingface.GENERATION_FILE: content}, end_of_text=257)
    assert huggingface.begin_token(tokenizer) == begins


@pytest.mark.parametrize(
    ("channels", "llama", "told"),
    [(36, "qk_norm,qkv_bias", "qk_norm and qkv_bias, found both"), (38, "head_width=8", "found 38 and 4; train one with")],
)
def test_networks_that_they_do_not_load(channels: int, llama: str, told: str) -> None:
    with pytest.raises(UsageError, match=told):
        llama_files.their_config(ModelShape(V, 16, 1, 4, channels, "llama", llama=llama), 0.0)
