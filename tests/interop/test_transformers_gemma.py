"""Gemma 3 in transformers and back: equal logits, greedy texts and gradients for random weights."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
import transformers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors
from torch import nn

from handgrad.api.model import load
from handgrad.cli import main
from tests.interop.models import our_logits, random_tokens, their_logits
from tests.interop.test_transformers_llama import theirs

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
            for values in model.parameters():
                if values.dim() == 1:
                    nn.init.normal_(values, std=0.2)
            model.get_input_embeddings().weight.data[[1, 5]] = 0  # no text ends
            model.config.bos_token_id, model.config.eos_token_id = 2, [1, 5]
            model.save_pretrained(folder)
            piece_tokenizer().save(str(folder / "tokenizer.json"))
            named = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>", "unk_token": "<unk>"}
            (folder / "tokenizer_config.json").write_text(json.dumps(named))
            (folder / "chat_template.jinja").write_text(TEMPLATE)
        return made[kind]

    return get


@pytest.fixture(scope="module")
def run(saved: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The imported folder."""
    made: dict[str, Path] = {}

    def get(kind: str) -> Path:
        if kind not in made:
            made[kind] = tmp_path_factory.mktemp("gemma") / "run"
            assert main(["import", str(saved(kind)), "--out", str(made[kind])]) == 0
        return made[kind]

    return get


@pytest.mark.parametrize("kind", KINDS)
def test_logits_and_greedy_texts(kind: str, saved: Callable, run: Callable) -> None:
    """Over a context of several windows and two layers that see all of it."""
    model, ours = theirs(saved(kind)), load(run(kind), device="cpu")
    tokens = random_tokens(ours.shape)
    logits = their_logits(model, tokens)
    assert model.config.layer_types.count("full_attention") == 2
    assert len(tokens) > 4 * model.config.sliding_window
    assert (our_logits(run(kind), tokens) - logits).abs().max() <= 1e-4
    assert (ours.logits([tokens])[0] - logits).abs().max() <= 1e-4


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_texts_with_the_cache(kind: str, saved: Callable, run: Callable) -> None:
    """200 tokens after a prompt, by both programs' generation."""
    ours = load(run(kind), device="cpu")
    start = [2, *ours.tokenizer.encode("the other").tolist()]
    options = {"do_sample": False, "max_new_tokens": 200, "pad_token_id": 0, "eos_token_id": None}
    inputs = torch.tensor([start])
    written = theirs(saved(kind)).generate(inputs, attention_mask=torch.ones_like(inputs), **options)
    written = written[0, len(start) :].tolist()
    text = ours.generate("the other", max_tokens=200, temperature=0)
    assert len(written) == 200 and len(set(written)) > 10 and not {1, 5} & {*written}
    assert text == ours.tokenizer.decode(written)
