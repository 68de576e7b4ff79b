"""The modern network in transformers, by the code that its exported folder brings: the same logits, texts and bits."""

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import dynamic_module_utils

from handgrad.api.model import load
from handgrad.cli import main
from handgrad.interop import export, sources
from handgrad.interop.modern import CODE
from tests.interop.models import TOKENIZERS, TRICKY, make_checkpoint, our_logits, random_tokens, their_logits, weights
from tests.techniques import toggled
from tests.test_commands import refused

SIZES = (3, 2, 36, 90)  # layers, heads, channels, context
NEW = "residual_scalars,input_scalars,value_embeddings"
# The names of techniques that are not as by default.
MOST = "softcap,embedding_norm,untied_head,zero_init"
TOGGLED = ("", "rotary,qk_norm", MOST, "qk_norm,softcap", NEW, "input_scalars,untied_head")
PROMPT = "the old river"


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[Path, Path]]:
    """(run folder, exported folder) of a model with other techniques than by default, made once."""
    made: dict[tuple[str, str], tuple[Path, Path]] = {}

    def get(names: str = "", kind: str = "bpe") -> tuple[Path, Path]:
        if (names, kind) not in made:
            root = tmp_path_factory.mktemp("modern")
            run, _ = make_checkpoint(root / "run", kind, sizes=SIZES, architecture="modern", techniques=toggled(names))
            assert main(["export", str(run), "--to", "hf", str(root / "hf")]) == 0
            made[names, kind] = run, root / "hf"
        return made[names, kind]

    return get


@pytest.fixture(autouse=True)
def code_of_the_folders_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers copies a folder's code to a cache of its own; here to one of the test."""
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    for name in [name for name in sys.modules if name.partition(".")[0] == "transformers_modules"]:
        monkeypatch.delitem(sys.modules, name)


def theirs(folder: Path, dtype: torch.dtype = torch.float32) -> transformers.PreTrainedModel:
    model, found = transformers.AutoModelForCausalLM.from_pretrained(
        folder, trust_remote_code=True, dtype=dtype, output_loading_info=True
    )
    assert not any(found.values()), found
    return model.eval()


@pytest.mark.parametrize("names", TOGGLED)
def test_its_logits_are_ours(names: str, exported: Callable) -> None:
    run, folder = exported(names)
    config = json.loads((folder / "config.json").read_text())
    tokens = random_tokens(load(run, device="cpu").shape)
    for dtype, largest in ((torch.float32, 1e-4), (torch.float64, 1e-10)):
        model = theirs(folder, dtype)
        assert model.dtype == dtype and model.config.techniques == config["techniques"] == toggled(names)
        found, ours = their_logits(model, tokens), our_logits(run, tokens, dtype)
        error = (found - ours).abs().max()
        assert error <= largest, f"logits differ by {error:.3g}"
    tied = model.head.weight is model.wte.weight
    assert tied == ("untied_head" in names)


@pytest.mark.nightly(but=["residual_scalars,input_scalars,value_embeddings", "rotary,qk_norm"])
@pytest.mark.parametrize("names", (*TOGGLED[:3], NEW))
def test_the_greedy_text_is_ours_with_the_cache_and_without(names: str, exported: Callable) -> None:
    run, folder = exported(names)
    model, ours, tokenizer = theirs(folder), load(run, device="cpu"), TOKENIZERS["bpe"]()
    start = [tokenizer.end_of_text, *tokenizer.encode(PROMPT).tolist()]
    inputs = torch.tensor([start])
    options = {"do_sample": False, "max_new_tokens": SIZES[3] - len(start), "attention_mask": torch.ones_like(inputs)}
    ids, whole = (model.generate(inputs, use_cache=cached, **options)[0].tolist() for cached in (True, False))
    static = model.generate(inputs, cache_implementation="static", **options)[0].tolist()
    assert ids == whole == static
    written = ids[len(start) :]
    assert len(set(written)) >= 4, "a text worth comparing"
    text = ours.generate(PROMPT, max_tokens=len(written), temperature=0)
    if tokenizer.end_of_text in written:
        written = written[: written.index(tokenizer.end_of_text)]
    assert text == tokenizer.decode(written)


def test_the_cache_takes_one_token_per_step(exported: Callable) -> None:
    """Generation reads a prompt once, then each token alone; padding on the left changes nothing, nor does a prompt in
    pieces."""
    model, tokens = theirs(exported()[1]), random_tokens(load(exported()[0], device="cpu").shape)
    lengths = []
    model.wte.register_forward_hook(lambda module, inputs, output: lengths.append(inputs[0].shape[1]))
    inputs = torch.tensor([tokens[:20]])
    alone = model.generate(
        inputs, attention_mask=torch.ones_like(inputs), do_sample=False, max_new_tokens=6, eos_token_id=-1
    )
    assert lengths == [20, 1, 1, 1, 1, 1]
    padded = torch.cat([torch.zeros(1, 7, dtype=torch.int64), inputs], dim=1)
    mask = (torch.arange(27) >= 7).to(torch.int64).unsqueeze(0)
    options = {"do_sample": False, "max_new_tokens": 6, "eos_token_id": -1}
    both = torch.cat([padded, torch.tensor([tokens[20:47]])])
    beside = model.generate(both, attention_mask=torch.cat([mask, torch.ones_like(mask)]), **options)
    assert beside[0, 27:].tolist() == alone[0, 20:].tolist()
    with torch.no_grad():
        for cache in (None, transformers.StaticCache(config=model.config, max_cache_len=40)):
            first = model(inputs[:, :13], past_key_values=cache, use_cache=True)
            rest = model(inputs[:, 13:], past_key_values=first.past_key_values)
            torch.testing.assert_close(rest.logits, model(inputs).logits[:, 13:], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(rest.logits[:, -2:], model(inputs, logits_to_keep=2).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("names", TOGGLED[::2])
def test_its_loss_is_ours_and_has_gradients(names: str, exported: Callable) -> None:
    """With labels it is the mean loss of each next token; a fine-tuner can take its gradient."""
    run, folder = exported(names)
    model, ours = theirs(folder), load(run, device="cpu")
    tokens = random_tokens(ours.shape)
    ids = torch.tensor([tokens])
    loss = model(ids, labels=ids).loss
    assert abs(loss.item() - ours.losses([tokens])[0].mean()) < 1e-4
    loss.backward()
    assert all(parameter.grad.abs().max() > 0 for parameter in model.parameters())
    assert torch.equal(model(ids, return_dict=False)[0], model(ids).logits)


def test_the_folder_brings_its_code_and_our_numbers(exported: Callable, tmp_path: Path) -> None:
    """The code verbatim; the weights under torch's names, bit for bit, in the folder and after an import of it."""
    run, folder = exported()
    code = sorted(CODE.glob("*.py"))
    assert [path.name for path in code] == ["configuration_handgrad.py", "modeling_handgrad.py"]
    assert all((folder / path.name).read_bytes() == path.read_bytes() for path in code)
    before, stored = weights(run), load_file(folder / "model.safetensors")
    assert len(before) == 2 + 4 * SIZES[0]
    assert {f"{name.removesuffix('_weight')}.weight" for name in before} == stored.keys()
    for name, values in before.items():
        assert torch.equal(values, stored[f"{name.removesuffix('_weight')}.weight"]), name
    back = tmp_path / "back"
    assert main(["import", str(folder), "--out", str(back)]) == 0
    after = weights(back)
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    assert main(["export", str(back), "--to", "hf", str(tmp_path / "again")]) == 0
    names = {path.name for path in folder.iterdir()} - {"README.md"}
    assert names == {path.name for path in (tmp_path / "again").iterdir()} - {"README.md"}
    assert all((folder / name).read_bytes() == (tmp_path / "again" / name).read_bytes() for name in names)


def test_what_transformers_saves_is_imported(exported: Callable, tmp_path: Path) -> None:
    """Weights, sizes and code, also tied and in bf16."""
    run, folder = exported(TOGGLED[2])
    saved = tmp_path / "saved"
    theirs(folder, torch.bfloat16).save_pretrained(saved)
    transformers.AutoTokenizer.from_pretrained(folder).save_pretrained(saved)
    assert (saved / "modeling_handgrad.py").is_file()
    assert main(["import", str(saved), "--out", str(tmp_path / "back")]) == 0
    before, after = weights(run), weights(tmp_path / "back")
    assert all(torch.equal(before[name].bfloat16().float(), after[name]) for name in before)
    assert load(tmp_path / "back", device="cpu").shape == load(run, device="cpu").shape
    assert sources.read_sizes(str(saved)) == sources.read_sizes(str(run)), "as `train --init-from` asks for them"


@pytest.mark.parametrize("kind", ["bpe", "bytes"])
def test_the_card_loads_the_model_and_its_tokenizer(kind: str, exported: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    _, folder = exported("qk_norm,softcap" if kind == "bpe" else "", kind)
    card = (folder / "README.md").read_text()
    assert "\n- custom_code\n" in card and "# A modern network of" in card
    names = ("rotary", *(["qk_norm", "softcap"] if kind == "bytes" else []), "embedding_norm", "zero_init", "untied_head")
    assert f"| techniques | {', '.join(names)} |" in card
    assert card.count("trust_remote_code=True") == 2, "without it the tokenizer's loader waits for an answer as well"
    monkeypatch.chdir(folder)
    exec(compile(card.split("```python\n")[1].split("```")[0], "card", "exec"), {})
    theirs_, ours = transformers.AutoTokenizer.from_pretrained(folder), TOKENIZERS[kind]()
    for text in TRICKY:
        assert theirs_(text, add_special_tokens=False)["input_ids"] == ours.encode(text).tolist()


def test_a_number_that_does_not_read_back_leaves_nothing(
    exported: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    write = export.write_weights

    def flipped(path: Path, *rest: object) -> None:
        write(path, *rest)
        stored = load_file(path)
        stored["blocks.1.fc.weight"][3, 5] += 1e-3
        save_file(stored, path)

    monkeypatch.setattr(export, "write_weights", flipped)
    assert "gave other numbers" in refused(capsys, 74, "export", str(exported()[0]), "--to", "hf", str(tmp_path / "hf"))
    assert not (tmp_path / "hf").exists()


def test_an_older_folder_has_what_it_did_not_leave_out(exported: Callable, tmp_path: Path) -> None:
    """Its config.json names the techniques that are missing, of those that there were."""
    run, folder = exported("qk_norm,softcap")
    older = shutil.copytree(folder, tmp_path / "hf")
    config = json.loads((older / "config.json").read_text())
    del config["techniques"]
    (older / "config.json").write_text(json.dumps(config | {"without": "qk_norm,softcap"}))
    assert main(["import", str(older), "--out", str(tmp_path / "back")]) == 0
    assert load(tmp_path / "back", device="cpu").shape == load(run, device="cpu").shape


def test_llmc_has_no_such_network(exported: Callable, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    told = refused(capsys, 64, "export", str(exported()[0]), "--to", "llmc", str(tmp_path / "c"))
    assert "llm.c has no network like " in told and "(modern)" in told and not (tmp_path / "c").exists()


@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        ("softcap", 30.0, "expected softcap 15.0 in"),
        ("rotary_base", 500000.0, "expected rotary_base 10000.0 in"),
        ("techniques", "bias", "its sizes are invalid: techniques must be"),
        ("techniques", ["rotary"], r"expected techniques as text in"),
        ("techniques", "rotary,qk_norm", "expected the tensors of a modern network in"),
        ("techniques", f"untied_head,{NEW}", "expected a tensor blocks.0.value_embedding.weight of shape"),
        ("hidden_size", 37, "channels must be a multiple of num_heads"),
        ("num_hidden_layers", 4, "expected a tensor blocks.3.qkv.weight of shape"),
    ],
)
def test_other_networks_are_refused(
    key: str, value: object, told: str, exported: Callable, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    folder = shutil.copytree(exported()[1], tmp_path / "hf")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {key: value}))
    assert told in refused(capsys, 65, "import", str(folder), "--out", str(tmp_path / "run"))
    assert not (tmp_path / "run").exists()
