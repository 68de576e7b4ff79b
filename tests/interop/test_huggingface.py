"""Weights and tokenizers to transformers and back: the same logits, texts, bits and ids."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from handgrad.cli import main
from handgrad.data.model_tokenizer import gpt2_merges, read_vocabulary, vocabulary_files
from handgrad.errors import DataError
from handgrad.interop import gemma3, huggingface, llama as llama_files, olmo, sources
from handgrad.interop.model_card import validation_losses
from handgrad.networks import ModelShape
from handgrad.storage import checkpoint
from tests.interop.models import (
    SIZES,
    TOKENIZERS,
    TRICKY,
    make_checkpoint,
    our_logits,
    random_tokens,
    their_logits,
    weights,
)
from tests.test_commands import refused


@pytest.mark.parametrize("kind", SIZES)
def test_transformers_loads_an_export(kind: str, exported: Callable) -> None:
    run, folder, shape = exported(kind)
    model, found = transformers.GPT2LMHeadModel.from_pretrained(folder, output_loading_info=True)
    assert not any(found.values()), found
    assert model.dtype == torch.float32
    tokens = random_tokens(shape)
    error = (their_logits(model.eval(), tokens) - our_logits(run, tokens)).abs().max()
    assert error <= 1e-4, f"logits differ by {error:.3g}"


def test_the_config_says_what_was_left_out_in_training(exported: Callable, tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "run", "bytes", dropout=0.15)
    assert main(["export", str(tmp_path / "run"), "--to", "hf", str(tmp_path / "hf")]) == 0
    for folder, dropout in ((exported("bytes")[1], 0.0), (tmp_path / "hf", 0.15)):
        config = transformers.AutoConfig.from_pretrained(folder)
        assert [config.resid_pdrop, config.embd_pdrop, config.attn_pdrop] == [dropout] * 3


@pytest.mark.nightly(but=["gpt2-False"])
@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("kind", SIZES)
def test_what_transformers_saves_is_imported(kind: str, sharded: bool, tmp_path: Path) -> None:
    layers, heads, channels, context = SIZES[kind]
    tokenizer = TOKENIZERS[kind]()
    eot = tokenizer.end_of_text
    settings = transformers.GPT2Config(
        vocab_size=tokenizer.vocab_size,
        n_positions=context,
        n_embd=channels,
        n_layer=layers,
        n_head=heads,
        bos_token_id=eot,
        eos_token_id=eot,
    )
    torch.manual_seed(2)
    model = transformers.GPT2LMHeadModel(settings).eval()
    for parameter in model.parameters():
        parameter.data.add_(torch.randn(parameter.shape), alpha=0.2)
    model.save_pretrained(tmp_path / "hf", max_shard_size="20KB" if sharded else "1GB")
    assert (tmp_path / "hf" / huggingface.INDEX_FILE).exists() == sharded
    for name, content in vocabulary_files(tokenizer, context).items():
        (tmp_path / "hf" / name).write_bytes(content)
    transformers.AutoTokenizer.from_pretrained(tmp_path / "hf").save_pretrained(tmp_path / "hf")  # as they write it
    assert main(["import", str(tmp_path / "hf"), "--out", str(tmp_path / "run")]) == 0
    tokens = torch.randint(tokenizer.vocab_size, (context,)).tolist()
    error = (their_logits(model, tokens) - our_logits(tmp_path / "run", tokens)).abs().max()
    assert error <= 1e-4, f"logits differ by {error:.3g}"
    assert checkpoint.find(str(tmp_path / "run")).manifest["tokenizer"]["kind"] == kind


@pytest.mark.parametrize("kind", SIZES)
def test_the_greedy_text_is_the_same(kind: str, exported: Callable, capsys: pytest.CaptureFixture) -> None:
    run, folder, _ = exported(kind)
    prompt, tokenizer = "the old river", TOKENIZERS[kind]()
    model = transformers.GPT2LMHeadModel.from_pretrained(folder).eval()
    start = [tokenizer.end_of_text, *tokenizer.encode(prompt).tolist()]
    inputs = torch.tensor([start])
    ids = model.generate(inputs, attention_mask=torch.ones_like(inputs), do_sample=False, max_new_tokens=55)[0].tolist()
    written = ids[len(start) :]
    assert len(written) >= 50 and len(set(written)) >= 4, "a text worth comparing"
    capsys.readouterr()
    assert main(["sample", str(run), "--prompt", prompt, "--temperature", "0", "--max-tokens", str(len(written))]) == 0
    if tokenizer.end_of_text in written:
        written = written[: written.index(tokenizer.end_of_text)]
    assert capsys.readouterr().out == prompt + tokenizer.decode(written) + "\n"


@pytest.mark.nightly(but=["bpe"])
@pytest.mark.parametrize("kind", SIZES)
def test_export_and_import_give_the_same_bits(kind: str, exported: Callable, tmp_path: Path) -> None:
    run, folder, _ = exported(kind)
    back = tmp_path / "back"
    assert main(["import", str(folder), "--out", str(back)]) == 0
    before, after = weights(run), weights(back)
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    then, now = checkpoint.find(str(run)).manifest, checkpoint.find(str(back)).manifest
    assert then["tokenizer"] == now["tokenizer"], "data prepared for the one serves the other"
    assert now["imported"]["from"] == "hf" and now["step"] == 0
    assert main(["export", str(back), "--to", "hf", str(tmp_path / "again")]) == 0
    for name in (huggingface.WEIGHTS_FILE, huggingface.CONFIG_FILE, "tokenizer.json", "vocab.json", "merges.txt"):
        assert (folder / name).read_bytes() == (tmp_path / "again" / name).read_bytes(), name


def test_bf16(exported: Callable, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Half the bytes; what comes back is the rounding of what went out, and transformers computes in it."""
    run, _, shape = exported("bpe")
    assert main(["export", str(run), "--to", "hf", str(tmp_path / "half"), "--dtype", "bf16"]) == 0
    assert "moves a logit by" in capsys.readouterr().out
    assert main(["import", str(tmp_path / "half"), "--out", str(tmp_path / "run")]) == 0
    before, after = weights(run), weights(tmp_path / "run")
    assert all(torch.equal(before[name].bfloat16().float(), after[name]) for name in before)
    assert transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "half").dtype == torch.bfloat16
    tokens = random_tokens(shape)
    as_float = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "half", dtype=torch.float32).eval()
    assert (their_logits(as_float, tokens) - our_logits(tmp_path / "run", tokens)).abs().max() <= 1e-4


def test_old_folders(exported: Callable, tmp_path: Path) -> None:
    """As GPT-2 lies on the Hub: no prefix, masks beside the weights, an old tokenizer; and a head that is the embedding.
    float16 is taken as it is."""
    run, folder, _ = exported("gpt2")
    old = shutil.copytree(folder, tmp_path / "old")
    stored = load_file(old / huggingface.WEIGHTS_FILE)
    renamed = {name.removeprefix("transformer."): value.half() for name, value in stored.items()}
    renamed["h.0.attn.bias"] = torch.ones(1, 1, 77, 77).tril()
    renamed["h.0.attn.masked_bias"] = torch.tensor(-1e4)
    renamed["lm_head.weight"] = renamed["wte.weight"].clone()
    save_file(renamed, old / huggingface.WEIGHTS_FILE)
    (old / "tokenizer.json").unlink()
    config = json.loads((old / "config.json").read_text())
    for key in ("n_inner", "dtype", "torch_dtype", "tie_word_embeddings", "scale_attn_by_inverse_layer_idx", "n_positions"):
        del config[key]
    (old / "config.json").write_text(json.dumps(config))
    assert main(["import", str(old), "--out", str(tmp_path / "run")]) == 0
    before, after = weights(run), weights(tmp_path / "run")
    assert all(torch.equal(before[name].half().float(), after[name]) for name in before)
    assert checkpoint.find(str(tmp_path / "run")).manifest["tokenizer"]["kind"] == "gpt2"


@pytest.mark.parametrize("kind", SIZES)
def test_tokenizers_are_the_same(kind: str, exported: Callable, tmp_path: Path) -> None:
    _, folder, _ = exported(kind)
    ours = TOKENIZERS[kind]()
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    text = "".join(TRICKY) + "".join(map(chr, range(32, 0x2100))) + " \U0001f600"
    for sample in (*TRICKY, text):
        ids = ours.encode(sample).tolist()
        assert theirs(sample, add_special_tokens=False)["input_ids"] == ids, repr(sample[:40])
        assert theirs.decode(ids) == sample
    assert theirs.eos_token_id == ours.end_of_text and len(theirs) == ours.vocab_size
    assert theirs("<|endoftext|>", add_special_tokens=False)["input_ids"] == [ours.end_of_text]
    assert read_vocabulary(folder).sha256 == ours.sha256
    if kind != "bytes":  # without its tokenizer.json, from the two files that GPT-2 came with
        for name in ("vocab.json", "merges.txt"):
            shutil.copy(folder / name, tmp_path / name)
        again = read_vocabulary(tmp_path)
        assert again.kind == kind and again.encode(text).tolist() == ours.encode(text).tolist()


def test_gpt2_has_its_published_merges() -> None:
    """The beginning and the number of merges.txt as OpenAI published it."""
    merges = gpt2_merges()
    assert merges[:6] == (("Ġ", "t"), ("Ġ", "a"), ("h", "e"), ("i", "n"), ("r", "e"), ("o", "n"))
    assert len(merges) == 50_000 and merges[-1] == ("Ġg", "azed")


def test_from_a_run_to_transformers_and_back(shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """train, export, import, evaluate, sample, train on: the whole way, and the card says what was trained."""
    from tests.test_commands import SMALL

    run, folder, back = tmp_path / "run", tmp_path / "hf", str(tmp_path / "back")
    assert main(["train", *SMALL, "--data", str(shards), "--out", str(run)]) == 0
    assert main(["export", str(run), "--to", "hf", str(folder)]) == 0
    assert "are the same bits" in capsys.readouterr().out
    card = (folder / "README.md").read_text()
    losses = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    last = [record["loss"] for record in losses if record["kind"] == "validation"][-1]
    identity = checkpoint.find(str(run)).manifest["identity"]["data"]
    assert "1,024 in 4 steps" in card and f"| 4 | {last:.4f} |" in card and f"`{identity}`" in card
    several = sum(record["kind"] == "validation" for record in losses) > 1
    assert several and "](curve.png)" in card and (folder / "curve.png").read_bytes().startswith(b"\x89PNG")
    found = validation_losses(checkpoint.find(str(run)))
    with (run / "metrics.jsonl").open("ab") as metrics:
        metrics.write(b'{"kind": "step", "st')  # cut by a kill
    assert len(found) > 1 and validation_losses(checkpoint.find(str(run))) == found
    assert main(["import", str(folder), "--out", back]) == 0
    capsys.readouterr()
    told = []
    for model in (str(run), back):
        assert main(["evaluate", model, "--data", str(shards)]) == 0
        told.append(capsys.readouterr().out.split("\n", 1)[1])
    assert told[0] == told[1]
    assert "give --data DIR" in refused(capsys, 64, "evaluate", back)
    assert main(["train", *SMALL, "--data", str(shards), "--out", str(tmp_path / "on"), "--init-from", back]) == 0
    lines = map(json.loads, (tmp_path / "on" / "metrics.jsonl").read_text().splitlines())
    first = next(line for line in lines if line["kind"] == "step")
    assert first["loss"] < 5.4, "it goes on where the weights were, below the loss of guessing"
    assert main(["export", back, "--to", "hf", str(tmp_path / "again")]) == 0
    assert "Imported from" in (tmp_path / "again" / "README.md").read_text()


def test_the_card_loads_the_model(exported: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    """The code in a card runs, in the folder."""
    folder = exported("bytes")[1]
    code = (folder / "README.md").read_text().split("```python\n")[1].split("```")[0]
    monkeypatch.chdir(folder)
    exec(compile(code, "card", "exec"), {})


def test_a_tokenizer_that_is_named(exported: Callable, tmp_path: Path) -> None:
    folder = shutil.copytree(exported("bpe")[1], tmp_path / "hf")
    for name in ("tokenizer.json", "vocab.json", "merges.txt"):
        (folder / name).rename(tmp_path / name)
    with pytest.raises(DataError, match="--tokenizer"):
        sources.import_model(str(folder), tmp_path / "run")
    named = str(tmp_path / "tokenizer.json")
    assert main(["import", str(folder), "--out", str(tmp_path / "run"), "--tokenizer", named]) == 0
    assert checkpoint.find(str(tmp_path / "run")).manifest["tokenizer"]["kind"] == "bpe"


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "smollm3", "mistral"])
def test_what_a_file_leaves_out_is_their_default(kind: str) -> None:
    sizes = {"vocab_size": 99, "max_position_embeddings": 64, "num_hidden_layers": 1, "num_attention_heads": 64}
    content = {"model_type": kind, **sizes, "hidden_size": 2048, "intermediate_size": 128}
    config = transformers.AutoConfig.for_model(**content)
    family = llama_files.read_shape(content, Path("config.json")).family
    assert family.kv_heads == config.num_key_value_heads and family.norm_epsilon == config.rms_norm_eps
    assert family.head_width == (getattr(config, "head_dim", None) or 32) and family.tied == config.tie_word_embeddings
    assert family.rotary_base == config.rope_parameters["rope_theta"]
    assert family.window == (config.sliding_window if kind == "mistral" else 0)
    assert family.nope_interval == (config.no_rope_layer_interval if kind == "smollm3" else 0)


@pytest.mark.parametrize(("base", "length"), [(1e4, 131072), (1e6, 32768), (1e4, 64)])
def test_yarn_of_any_length(base: float, length: int) -> None:
    """Of heads of 128: the slowest pair turns several times within the length, once, or never."""
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": length, "rope_theta": base}
    config = transformers.LlamaConfig(
        hidden_size=512, num_attention_heads=4, rope_parameters=rope, max_position_embeddings=4 * length
    )
    expected, scale = ROPE_INIT_FUNCTIONS["yarn"](config, torch.device("cpu"))
    family = llama_files.read_shape(config.to_dict(), Path("config.json")).family
    ours = torch.tensor(family.frequencies, dtype=torch.float64)
    assert ((expected.double() / ours) - 1).abs().max() < 1e-6 and family.rope_scale == pytest.approx(scale, rel=1e-6)


@pytest.mark.parametrize(
    ("family", "text"),
    [
        (gemma3, ""),
        (olmo, "window=8"),
        (olmo, "window=8,full_every=9"),
        (olmo, "full_every=2"),
        (llama_files, "nope_interval=4"),
        (llama_files, "nope_interval=9"),
    ],
)
def test_an_interval_above_the_layers_comes_back(family: ModuleType, text: str) -> None:
    """A network of two layers has no layer at it, so the config's list of layers does not show it."""
    name = family.__name__.rpartition(".")[2]
    shape = ModelShape(97, 32, 2, 2, 32, name, **{name: text})  # type: ignore[arg-type]
    content = json.loads(json.dumps(family.their_config(shape, 0.0)))
    assert family.read_shape(content, Path("config.json")) == shape
