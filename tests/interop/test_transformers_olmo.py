"""OLMo 2 and OLMo 3 in transformers and back: equal logits, greedy texts and gradients for random weights of each."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from handgrad.api.model import load
from handgrad.cli import main
from handgrad.networks.olmo import family_of, rotation
from tests.interop.models import random_tokens, their_logits, weights
from tests.interop.parity import (
    angles_in_float64,
    check_gradients,
    check_likeliest,
    check_logits,
    check_same_files,
    check_same_model,
    greedy_text,
    norms_in_float64,
    theirs,
)
from tests.interop.test_transformers_llama import byte_tokenizer
from tests.test_commands import refused

V, LENGTH = 320, 260  # of the vocabulary, of which the tokenizer has fewer; of the context
COMMON: dict[str, Any] = {"vocab_size": V, "max_position_embeddings": LENGTH, "initializer_range": 0.2}
COMMON |= {"hidden_size": 36, "num_attention_heads": 6, "eos_token_id": 259, "pad_token_id": None}
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64, "beta_fast": 32, "beta_slow": 1}
YARN |= {"attention_factor": 1.2079441541679836}  # as published
CONFIGS = {
    "olmo2": transformers.Olmo2Config(
        **COMMON, num_hidden_layers=3, intermediate_size=50, num_key_value_heads=2, rms_norm_eps=1e-6
    ),
    "olmo3": transformers.Olmo3Config(
        **COMMON, num_hidden_layers=9, intermediate_size=33, sliding_window=17, rope_scaling=YARN
    ),
}
KINDS = list(CONFIGS)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A folder of transformers with random weights of a type, made once."""
    made: dict[str, Path] = {}

    def get(kind: str) -> Path:
        if kind not in made:
            torch.manual_seed(1)
            folder = made[kind] = tmp_path_factory.mktemp(kind)
            model = transformers.AutoModelForCausalLM.from_config(CONFIGS[kind])
            for values in model.parameters():
                if values.dim() == 1:
                    nn.init.normal_(values, mean=1.0, std=0.2)
            model.save_pretrained(folder)
            byte_tokenizer().save(str(folder / "tokenizer.json"))
            (folder / "tokenizer_config.json").write_text('{"eos_token": "<|im_end|>"}')
            (folder / "chat_template.jinja").write_text("{{ messages }}\n")
        return made[kind]

    return get


@pytest.mark.parametrize("kind", KINDS)
def test_logits_and_greedy_texts(kind: str, saved: Callable, run: Callable) -> None:
    """Over a context of many windows and, of OLMo 3, two layers that see all of it."""
    model, shape = theirs(saved(kind)), load(run(kind), device="cpu").shape
    assert (shape.window, shape.windows.count(0)) == {"olmo2": (0, 3), "olmo3": (17, 2)}[kind]
    check_likeliest(model, run(kind), check_logits(model, run(kind))[:7])


@pytest.mark.nightly  # test_logits_and_greedy_texts has shorter ones
@pytest.mark.parametrize("kind", KINDS)
def test_greedy_texts_with_the_cache(kind: str, saved: Callable, run: Callable) -> None:
    """200 tokens, or up to the end of the text, after a prompt longer than a window, by both programs' generation."""
    ours, prompt = load(run(kind), device="cpu"), "the other hen is in the den of hens"
    start = ours.tokens(prompt)
    assert len(start) > ours.shape.window
    written = greedy_text(theirs(saved(kind)), start)
    ends = written.index(259) if 259 in written else 200
    assert len(set(written)) > 10 and ends > 50
    assert ours.generate(prompt, max_tokens=200, temperature=0) == ours.tokenizer.decode(written[:ends])


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_equal_theirs(kind: str, saved: Callable, run: Callable) -> None:
    """In float64, with their norms and angles in float64 as well."""
    model, shape = theirs(saved(kind), torch.float64), load(run(kind), device="cpu").shape

    def rotary(x: Tensor, position_ids: Tensor, layer_type: str = "full_attention") -> tuple[Tensor, Tensor]:
        turn = rotation(family_of(shape), shape.head_width, 3 if layer_type == "full_attention" else 0)
        return angles_in_float64(position_ids, turn["frequencies"], turn["scale"])

    norms_in_float64(model)
    model.model.rotary_emb.forward = rotary
    check_gradients(model, run(kind))


@pytest.mark.parametrize("kind", KINDS)
def test_export_gives_the_folder_back(kind: str, saved: Callable, run: Callable, tmp_path: Path) -> None:
    """Type, sizes, weights bit by bit, tokenizer files as they came; and what transformers computes of it."""
    assert main(["export", str(run(kind)), "--to", "hf", str(tmp_path / "hf")]) == 0
    keys = "rope_parameters", *(("layer_types", "sliding_window") if kind == "olmo3" else ())
    check_same_model(theirs(saved(kind)), theirs(tmp_path / "hf"), load(run(kind), device="cpu").shape, *keys)
    check_same_files(saved(kind), tmp_path / "hf")
    assert main(["import", str(tmp_path / "hf"), "--out", str(tmp_path / "again")]) == 0
    ours, again = weights(run(kind)), weights(tmp_path / "again")
    assert ours.keys() == again.keys() and all(torch.equal(ours[name], again[name]) for name in ours)
    card = (tmp_path / "hf" / "README.md").read_text()
    assert f"- {kind}\n" in card and "# An OLMo of" in card


# A change of olmo3's config.json, and what the line says of it.
REFUSED: dict[str, tuple[dict[str, object], str]] = {
    "an unknown key": ({"moe_layers": [3]}, "expected the keys of an OLMo in {}, found also 'moe_layers': [3]"),
    "clipping": ({"clip_qkv": 8.0}, "expected clip_qkv null in {}, found 8.0"),
    "a bias": ({"attention_bias": True}, "expected attention_bias false in {}, found True"),
    "a tied head": ({"tie_word_embeddings": True}, "expected tie_word_embeddings false in {}, found True"),
    "another activation": ({"hidden_act": "gelu"}, 'expected hidden_act "silu" in {}, found'),
    "wider heads": ({"head_dim": 8}, "expected head_dim of hidden_size / num_attention_heads, 6, in {}, found 8"),
    "layers in another order": (
        {"layer_types": ["full_attention"] * 2 + ["sliding_attention"] * 7},
        "expected layer_types of 9 layers with one of full_attention in every 1 in {}, found",
    ),
    "two bases": (
        {"rope_parameters": {"sliding_attention": {"rope_theta": 1e4}, "full_attention": YARN | {"rope_theta": 5e5}}},
        "expected rope_theta of sliding_attention of 500000.0, as of full_attention, in {}, found 10000.0",
    ),
    "a base of some layers": (
        {"rope_parameters": None, "rope_theta": 1e4},
        "expected rope_theta of sliding_attention of 10000.0, as of full_attention, in {}, found 500000.0",
    ),
    "stretched windows": (
        {"rope_parameters": {"sliding_attention": YARN | {"rope_theta": 5e5}}},
        "expected rope_type default in {}, found 'yarn'",
    ),
    "another rope": (
        {"rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}}},
        "expected rope_type default or yarn in {}, found 'linear'",
    ),
    "a stretched window by an older name": (
        {"rope_parameters": {"sliding_attention": {"type": "yarn", "factor": 8.0, "rope_theta": 5e5}}},
        "expected rope_type default in {}, found 'yarn'",
    ),
    "a number of a window's rope": (
        {"rope_parameters": {"sliding_attention": {"factor": 8.0, "rope_theta": 5e5}}},
        "expected the keys of an OLMo's sliding_attention in {}, found also 'factor': 8.0",
    ),
    "another rope by an older name": (
        {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": None},
        "expected rope_type default or yarn in {}, found 'linear'",
    ),
    "tables that are a word": ({"rope_parameters": "yarn"}, "expected rope_parameters as an object in {}, found 'yarn'"),
    "a table that is a list": (
        {"rope_parameters": {"full_attention": [1]}},
        "expected full_attention as an object in {}, found [1]",
    ),
    "a scaling that is a word": ({"rope_scaling": "yarn"}, "expected rope_scaling as an object in {}, found 'yarn'"),
    "layers that are a number": ({"layer_types": 3}, "expected layer_types of 9 layers with one of full_attention"),
    "heads of an odd width": ({"hidden_size": 42, "head_dim": 7}, "olmo must have heads of an even width up to 1024"),
    "an unknown number of rope": (
        {"rope_parameters": {"full_attention": YARN | {"long_factor": [1.0]}}},
        "expected the keys of an OLMo's rope_parameters in {}, found also 'long_factor': [1.0]",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_handgrad_lacks_is_named(name: str, saved: Callable, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    folder, (change, told) = shutil.copytree(saved("olmo3"), tmp_path / "hf"), REFUSED[name]
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | change))
    capsys.readouterr()  # of the library that saved it
    line = refused(capsys, 65, "import", str(folder), "--out", str(tmp_path / "run"))
    assert told.format(folder / "config.json") in line


@pytest.mark.parametrize(
    "change",
    [
        {"rope_parameters": None, "rope_theta": 500000, "rope_scaling": YARN},  # as the published file has it
        {"rope_parameters": None, "rope_scaling": None, "layer_types": None, "sliding_window": 11},
        {"layer_types": ["full_attention"] * 9},
        {"rms_norm_eps": None, "num_key_value_heads": None},
    ],
)
def test_keys_that_move_the_logits(change: dict, saved: Callable, tmp_path: Path) -> None:
    """Both programs read them alike. A key that is null is left out."""
    folder = shutil.copytree(saved("olmo3"), tmp_path / "hf")
    config = json.loads((folder / "config.json").read_text()) | change
    (folder / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    ours = load(str(folder), device="cpu")
    tokens = random_tokens(ours.shape)
    assert (ours.logits([tokens])[0] - their_logits(theirs(folder), tokens)).abs().max() <= 1e-4
