"""Gemma 3 in transformers and back: equal logits, greedy texts and gradients for random weights."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors
from torch import Tensor, nn
from transformers.models.gemma3 import modeling_gemma3

from handgrad.api.model import load
from handgrad.cli import main
from handgrad.data.chat_template import ChatTemplate
from handgrad.data.model_tokenizer import vocabulary_rows
from handgrad.data.tokenizer_loading import load_tokenizer
from handgrad.errors import DataError, UsageError
from handgrad.interop import gemma3 as gemma_files, sources
from handgrad.models.gemma3 import embed, embedding_scale
from handgrad.networks.gemma3 import family_of, rotation
from handgrad.ops import reference
from handgrad.settings.config import ModelShape
from tests.interop.models import TRICKY, random_tokens, their_logits, weights
from tests.interop.parity import (
    angles_in_float64,
    check_gradients,
    check_logits,
    check_same_files,
    check_same_model,
    greedy_text,
    norms_in_float64,
    theirs,
)
from tests.test_commands import refused

V, LENGTH = 380, 260  # of the vocabulary, of which the tokenizer has fewer; of the context, longer than a window
COMMON: dict[str, Any] = {"vocab_size": V, "max_position_embeddings": LENGTH, "initializer_range": 0.2}
COMMON |= {"num_hidden_layers": 13, "intermediate_size": 50, "hidden_size": 36, "num_attention_heads": 4}
CONFIGS = {
    "270M": transformers.Gemma3TextConfig(
        **COMMON, num_key_value_heads=1, head_dim=14, sliding_window=9, query_pre_attn_scalar=14
    ),
    "4B": transformers.Gemma3TextConfig(
        **COMMON,
        num_key_value_heads=2,
        head_dim=10,
        sliding_window=11,
        query_pre_attn_scalar=7,
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    ),
}
KINDS = list(CONFIGS)
IMAGE = "<image_soft_token>"
# As Gemma's: no turn of the system, whose message begins the first turn of the user; roles take turns.
TEMPLATE = """{{ bos_token }}{% if messages[0].role == 'system' %}{% set said = messages[0].content + '\n\n' %}
{%- set rest = messages[1:] %}{% else %}{% set said = '' %}{% set rest = messages %}{% endif %}
{%- for message in rest %}
{%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must take turns') }}{% endif %}
{{- '<start_of_turn>' + ('model' if message.role == 'assistant' else message.role) + '\n' }}
{{- (said if loop.first else '') + message.content | trim + '<end_of_turn>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"""


def piece_tokenizer() -> tokenizers.Tokenizer:
    """A tokenizer by Gemma's rules: SentencePiece's BPE with a token for each byte, and tokens of blanks and newlines."""
    special = ["<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>"]
    letters = [chr(code) for code in range(33, 91)] + list("▁é你abdefhijklmnoprstuvwxyzcgq")
    merges = [
        ("t", "h"),
        ("h", "e"),
        ("t", "he"),
        ("th", "e"),
        ("▁", "t"),
        ("▁t", "he"),
        ("▁", "the"),
        ("i", "n"),
        ("▁", "▁"),
    ]
    tokens = [*special, *(f"<0x{byte:02X}>" for byte in range(256)), *letters, *map("".join, merges)]
    vocab = {token: number for number, token in enumerate(dict.fromkeys(tokens))}
    made = tokenizers.Tokenizer(
        models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    made.normalizer = normalizers.Replace(" ", "▁")
    made.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    made.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", vocab["<bos>"])])
    made.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    made.add_tokens([AddedToken("\n\n", normalized=False)])
    return made


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A folder of transformers with random weights, made once: of 4B as a model with images has it."""
    made: dict[str, Path] = {}

    def get(kind: str) -> Path:
        if kind not in made:
            torch.manual_seed(1)
            folder = made[kind] = tmp_path_factory.mktemp("gemma") / kind
            model = transformers.AutoModelForCausalLM.from_config(CONFIGS[kind])
            for name, values in model.named_parameters():
                if values.dim() == 1:  # a block moves the stream, or a text would repeat one token
                    nn.init.normal_(values, mean=3.0 if ".post_" in name else 0.0, std=0.2)
            model.get_input_embeddings().weight.data[[1, 5]] = 0  # no text ends
            model.config.bos_token_id, model.config.eos_token_id = 2, [1, 5]
            model.save_pretrained(folder)
            piece_tokenizer().save(str(folder / "tokenizer.json"))
            named = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>", "unk_token": "<unk>"}
            (folder / "tokenizer_config.json").write_text(json.dumps(named))
            (folder / "chat_template.jinja").write_text(TEMPLATE)
        return made[kind]

    return get


@pytest.mark.parametrize("kind", KINDS)
def test_logits(kind: str, saved: Callable, run: Callable) -> None:
    """Over a context of several windows and two layers that see all of it."""
    model = theirs(saved(kind))
    assert model.config.layer_types.count("full_attention") == 2
    assert len(check_logits(model, run(kind))) > 4 * model.config.sliding_window


@pytest.mark.nightly(but=["4B"])
@pytest.mark.parametrize("kind", KINDS)
def test_greedy_texts_with_the_cache(kind: str, saved: Callable, run: Callable) -> None:
    """200 tokens after a prompt longer than a window, by both programs' generation."""
    ours, prompt = load(run(kind), device="cpu"), "the other inn is in the den of hens"
    start = [2, *ours.tokenizer.encode(prompt).tolist()]
    assert len(start) > ours.shape.window
    written = greedy_text(theirs(saved(kind)), start)
    assert len(set(written)) > 10 and not {1, 5} & {*written}
    assert ours.generate(prompt, max_tokens=200, temperature=0) == ours.tokenizer.decode(written)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_equal_theirs(kind: str, saved: Callable, run: Callable) -> None:
    """In float64, with their norms and angles in float64 as well."""
    model, family = theirs(saved(kind), torch.float64), family_of(load(run(kind), device="cpu").shape)

    def rotary(x: Tensor, position_ids: Tensor, layer_type: str) -> tuple[Tensor, Tensor]:
        turn = rotation(family, model.config.layer_types.index(layer_type))
        return angles_in_float64(position_ids, turn["frequencies"], 1.0)

    norms_in_float64(model, plus=1)
    model.model.rotary_emb.forward = rotary
    model.model.embed_tokens.padding_idx = None  # else the padding token's lookups train nothing
    check_gradients(model, run(kind))


def test_the_embedding_is_scaled_as_theirs() -> None:
    """In bf16 the root of 640 channels is 25.25, in float32 25.2982216."""
    for dtype, scale in ((torch.bfloat16, 25.25), (torch.float32, 25.298221588134766)):
        embedding = modeling_gemma3.Gemma3TextScaledWordEmbedding(5, 640, 0, embed_scale=640**0.5).to(dtype)
        x = torch.empty(5, 640, dtype=dtype)
        embed(reference.token_embedding_forward, x, torch.arange(5)[None], embedding.weight.detach())
        assert embedding_scale(x) == scale and torch.equal(x, embedding(torch.arange(5)))


@pytest.mark.nightly(but=["270M-dtype0", "4B-dtype1"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_export_gives_the_folder_back(kind: str, dtype: torch.dtype, saved: Callable, tmp_path: Path) -> None:
    """Type, sizes, weights bit by bit, tokenizer files as they came; and what transformers computes of it."""
    before = theirs(saved(kind), dtype)
    folder = shutil.copytree(saved(kind), tmp_path / "theirs")
    before.save_pretrained(folder)
    name = {torch.float32: "fp32", torch.bfloat16: "bf16"}[dtype]
    assert main(["import", str(folder), "--out", str(tmp_path / "run")]) == 0
    assert main(["export", str(tmp_path / "run"), "--to", "hf", "--dtype", name, str(tmp_path / "hf")]) == 0
    after = theirs(tmp_path / "hf", dtype)
    keys = "rope_parameters", "layer_types", "sliding_window", "query_pre_attn_scalar", "head_dim"
    check_same_model(before, after, load(str(tmp_path / "run"), device="cpu").shape, *keys)
    assert type(after.config) is transformers.Gemma3TextConfig
    check_same_files(saved(kind), tmp_path / "hf")
    card = (tmp_path / "hf" / "README.md").read_text()
    assert "- gemma3_text\n" in card and "# A Gemma 3 of" in card


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_a_model_with_images_gives_its_text_model(
    prefix: str, saved: Callable, run: Callable, tmp_path: Path, capsys
) -> None:
    """By both versions' names of tensors, with the sizes that its file leaves out; one line tells of the vision tower."""
    folder = shutil.copytree(saved("4B"), tmp_path / "hf")
    text = json.loads((folder / "config.json").read_text())
    kept = ("hidden_size", "intermediate_size", "num_hidden_layers", "sliding_window", "num_attention_heads", "vocab_size")
    sizes = {key: text[key] for key in (*kept, "head_dim", "num_key_value_heads", "query_pre_attn_scalar")}
    sizes |= {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "max_position_embeddings": LENGTH}
    images = {"model_type": "siglip_vision_model", "hidden_size": 8}
    whole = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "eos_token_id": [1, 5]}
    whole |= {"image_token_index": 262144, "mm_tokens_per_image": 4, "vision_config": images}
    (folder / "config.json").write_text(json.dumps(whole | {"text_config": {"model_type": "gemma3_text", **sizes}}))
    stored = load_file(folder / "model.safetensors")
    renamed = {name.replace("model.", prefix, 1): values for name, values in stored.items()}
    seeing = {"vision_tower.layers.0.weight": torch.ones(3), "multi_modal_projector.norm.weight": torch.ones(2)}
    renamed |= {("model." if prefix.startswith("model.") else "") + name: values for name, values in seeing.items()}
    save_file(renamed, folder / "model.safetensors", {"format": "pt"})
    capsys.readouterr()
    assert main(["import", str(folder), "--out", str(tmp_path / "run")]) == 0
    told = capsys.readouterr().err
    assert told.count("\n") == 1 and f"{folder} has a vision tower of 2 tensors; handgrad leaves it aside" in told
    ours, right = weights(tmp_path / "run"), weights(run("4B"))
    assert ours.keys() == right.keys() and all(torch.equal(ours[name], right[name]) for name in right)
    assert sources.read_sizes(str(folder)) == sources.read_sizes(str(run("4B")))
    assert load_tokenizer(str(folder)).vocab_size == V


def test_sizes_that_the_file_leaves_out() -> None:
    """They are transformers' defaults."""
    assert vocabulary_rows({"model_type": "gemma3", "text_config": {}}) == 262208
    path, of_every_model = Path("config.json"), transformers.PreTrainedConfig().to_dict()
    spelt = {key: value for key, value in transformers.Gemma3TextConfig().to_dict().items() if key not in of_every_model}
    assert gemma_files.read_shape({}, path) == gemma_files.read_shape(spelt, path)


def test_the_models_tokenizer(saved: Callable, run: Callable) -> None:
    """Their ids, text's bytes back, special tokens in a text as text, a token before a text."""
    ours, library = load(run("270M"), device="cpu").tokenizer, piece_tokenizer()
    library.encode_special_tokens = True
    for text in (*TRICKY, "the  then\n\nit  is"):
        assert ours.encode(text).tolist() == library.encode(text, add_special_tokens=False).ids
        assert ours.decode(ours.encode(text)) == text
    assert ours.decode(ours.encode("a▁b")) == "a b", "the one character that does not come back"
    assert ours.begins == (2,) and ours.end_of_text == 1 and ours.vocab_size == V and ours.token_bytes[379] == b""
    assert 4 not in ours.encode("<start_of_turn>") and ours.decode([4]) == "<start_of_turn>"


def test_the_token_of_images_has_no_row(saved: Callable, tmp_path: Path) -> None:
    """As in the published files, whose tokenizer has one token more than the text model rows."""
    folder = shutil.copytree(saved("270M"), tmp_path / "hf")
    made = piece_tokenizer()
    made.add_tokens([f"<unused{number}>" for number in range(V - made.get_vocab_size())])
    made.add_special_tokens([IMAGE])
    assert made.token_to_id(IMAGE) == V
    made.save(str(folder / "tokenizer.json"))
    assert load(str(folder), device="cpu").tokenizer.vocab_size == V
    made.add_special_tokens(["<another>"])
    made.save(str(folder / "tokenizer.json"))
    with pytest.raises(DataError, match=f"a vocab_size of {V + 2} or more"):
        load(str(folder), device="cpu")


def test_chats_are_rendered_as_theirs(saved: Callable, run: Callable) -> None:
    """The system's message in the user's first turn; the model's turns, and their ends, are trained."""
    library = transformers.AutoTokenizer.from_pretrained(saved("270M"))
    template = ChatTemplate(load(run("270M"), device="cpu").tokenizer)
    said = [
        ("system", "be brief"),
        ("user", " the other "),
        ("assistant", "it is\n\nin"),
        ("user", "why?"),
        ("assistant", "no"),
    ]
    messages = [{"role": role, "content": content} for role, content in said]
    for talk in (messages, messages[1:], messages[1:3]):
        assert template.render(talk) == library.apply_chat_template(talk)["input_ids"]
        asked = library.apply_chat_template(talk[:-1], add_generation_prompt=True)["input_ids"]
        assert template.render(talk[:-1], True) == asked
    tokens, stretches = template.conversation(messages)
    trained = [template.tokenizer.decode(tokens[first:end]) for first, end in stretches]
    assert trained == ["it is\n\nin<end_of_turn>", "no<end_of_turn>"]
    assert template.end_tokens == {1, 5}
    with pytest.raises(DataError, match="roles must take turns"):
        template.render(messages[1:2] * 2)


REFUSED: dict[str, tuple[dict[str, object], str]] = {
    "cap of scores": ({"attn_logit_softcapping": 50.0}, "expected attn_logit_softcapping null in"),
    "cap of logits": ({"final_logit_softcapping": 30.0}, "expected final_logit_softcapping null in"),
    "activation": ({"hidden_activation": "silu"}, 'expected hidden_activation "gelu_pytorch_tanh" in'),
    "bias": ({"attention_bias": True}, "expected attention_bias false in"),
    "both directions": ({"use_bidirectional_attention": True}, "expected use_bidirectional_attention false in"),
    "a key of its own": ({"altup_num_inputs": 4}, "found also 'altup_num_inputs': 4; take it out if it changes no logits"),
    "layers": ({"layer_types": ["full_attention", "sliding_attention"]}, "expected layer_types of 13 layers with one of"),
    "rope": ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "expected rope_type default or linear in"),
    "rope of windows": (
        {"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0}}},
        "expected rope_type default in",
    ),
    "tables that are a word": ({"rope_parameters": "linear"}, "expected rope_parameters as an object in"),
    "layers that are a number": ({"layer_types": 3}, "expected layer_types of"),
    "a text model that is a number": ({"text_config": 3}, "expected text_config as an object in"),
    "part of a rope": ({"rope_scaling": {"partial_rotary_factor": 0.5}}, "found also 'partial_rotary_factor': 0.5; take"),
    "Gemma 2": ({"model_type": "gemma2"}, "found 'gemma2'; handgrad lacks its cap of attention's scores"),
    "Gemma 3n": ({"model_type": "gemma3n_text"}, "found 'gemma3n_text'; handgrad lacks its embeddings in every layer"),
    "Gemma 4": ({"model_type": "gemma4"}, "found 'gemma4'; handgrad lacks its layers that share keys and values"),
    "Qwen3.5": ({"model_type": "qwen3_5_text"}, "found 'qwen3_5_text'; handgrad lacks its linear attention"),
    "gpt-oss": ({"model_type": "gpt_oss"}, "found 'gpt_oss'; handgrad lacks its experts and attention sinks"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_handgrad_lacks_is_named(name: str, saved: Callable, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    folder, (change, told) = shutil.copytree(saved("270M"), tmp_path / "hf"), REFUSED[name]
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | change))
    capsys.readouterr()  # of the library that saved it
    line = refused(capsys, 65, "import", str(folder), "--out", str(tmp_path / "run"))
    assert told in line and line.count("\n") == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "change",
    [
        {"rope_parameters": None, "rope_theta": 1e6, "rope_local_base_freq": 777.0, "rope_scaling": None},  # old
        {"rope_parameters": None, "rope_scaling": {"rope_type": "linear", "factor": 4.0}},
        {"layer_types": None, "sliding_window_pattern": 3},
        {"layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 3 + ["sliding_attention"]},
        {"query_pre_attn_scalar": 40},
        {"layer_types": ["full_attention"] * 13, "unsloth_fixed": True},
    ],
)
def test_other_settings(change: dict[str, object], saved: Callable, tmp_path: Path) -> None:
    """In the forms of old and new files: their logits, which are not those without the change."""
    folder = shutil.copytree(saved("270M"), tmp_path / "hf")
    plain = load(str(folder), device="cpu")
    config = json.loads((folder / "config.json").read_text())
    content = {key: value for key, value in (config | change).items() if key not in change or value is not None}
    (folder / "config.json").write_text(json.dumps(content))
    ours, tokens = load(str(folder), device="cpu"), random_tokens(plain.shape)
    logits = their_logits(theirs(folder), tokens)
    assert (ours.logits([tokens])[0] - logits).abs().max() <= 1e-4
    assert (plain.logits([tokens])[0] - logits).abs().max() > 1e-2


@pytest.mark.parametrize(
    ("channels", "gemma3", "told"), [(38, "head_width=8", "no multiple of num_heads, found 38 and 4; train another")]
)
def test_networks_that_they_do_not_load(channels: int, gemma3: str, told: str) -> None:
    with pytest.raises(UsageError, match=told):
        gemma_files.their_config(ModelShape(V, 16, 1, 4, channels, "gemma3", gemma3=gemma3), 0.0)
