"""Adapters in PEFT and back: equal logits for random adapters, in both directions; and what is refused."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from handgrad.api.model import load
from handgrad.cli import main
from handgrad.data.model_tokenizer import vocabulary_files
from handgrad.data.tokenizer import tokenizer_files, tokenizer_record
from handgrad.data.tokenizer_loading import load_tokenizer
from handgrad.errors import DataError, UsageError
from handgrad.evaluation.load import imported_config
from handgrad.interop.adapters import located, read_config
from handgrad.interop.export import export_peft
from handgrad.interop.sources import import_model, open_weights, read_sizes
from handgrad.joins.lora.tables import adapters_of
from handgrad.networks.lora import LoraShape, parse_lora
from handgrad.settings.config import to_dict
from handgrad.storage import checkpoint
from handgrad.storage.checkpoint import Stored
from handgrad.storage.run_files import CHECKPOINTS
from tests.interop.llama_configs import CONFIGS
from tests.interop.models import random_tokens, their_logits
from tests.interop.test_transformers_gemma import CONFIGS as GEMMAS, piece_tokenizer
from tests.interop.test_transformers_llama import byte_tokenizer
from tests.interop.test_transformers_olmo import CONFIGS as OLMOS

peft = pytest.importorskip("peft")  # of the extra `test`

LOGITS = 1e-4  # as beside transformers without adapters, in float32: on some CPUs the sums of both lie further apart

GPT2 = transformers.GPT2Config(
    vocab_size=257,
    n_positions=260,
    n_layer=3,
    n_head=4,
    n_embd=24,
    initializer_range=0.2,
    bos_token_id=256,
    eos_token_id=256,
)
EVERY = ["gpt2", "llama", "qwen2", "qwen3", "smollm3", "gemma3", "olmo3"]
SOME = {"gpt2": "qkv+o", "llama": "q+v", "qwen2": "k+up+down", "qwen3": "q+k+v+o", "smollm3": "q+o+down"}
SOME |= {"gemma3": "q+gate+down", "olmo3": "k+o+up"}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A folder of transformers with random weights of a type, made once."""
    made: dict[str, Path] = {}

    def get(kind: str) -> Path:
        if kind not in made:
            torch.manual_seed(1)
            folder = made[kind] = tmp_path_factory.mktemp(kind)
            config = {"gpt2": GPT2, "gemma3": GEMMAS["4B"], "olmo3": OLMOS["olmo3"]}.get(kind) or CONFIGS[kind]
            model = transformers.AutoModelForCausalLM.from_config(config)
            model.config.eos_token_id = 256 if kind == "gpt2" else 259
            model.save_pretrained(folder)
            if kind == "gpt2":
                for name, content in vocabulary_files(load_tokenizer("bytes"), 260).items():
                    (folder / name).write_bytes(content)
            elif kind == "gemma3":
                piece_tokenizer().save(str(folder / "tokenizer.json"))
            else:
                byte_tokenizer().save(str(folder / "tokenizer.json"))
                (folder / "tokenizer_config.json").write_text('{"eos_token": "<|im_end|>"}')
        return made[kind]

    return get


def adapted_run(base: Path, out: Path, lora: str, origin: dict[str, Any] | None = None) -> Path:
    """A run folder whose checkpoint holds random adapters; `origin`: other words on the weights under them."""
    weights = located(open_weights(str(base)))
    generator = torch.Generator().manual_seed(7)
    rows = [row for adapter in adapters_of(weights.shape, parse_lora(lora)) for row in adapter.rows()]
    tensors = [Stored.of(row.name, 0.3 * torch.randn(row.shape, generator=generator)) for row in rows]
    manifest: dict[str, Any] = {
        "config": to_dict(replace(weights.config, lora=lora, init_from=str(base))),
        "tokenizer": tokenizer_record(weights.tokenizer),
        "init": origin or weights.origin,
    }
    checkpoint.save(out / CHECKPOINTS, 0, tensors, manifest, tokenizer_files(weights.tokenizer))
    return out


def theirs(base: Path, adapters: Path) -> transformers.PreTrainedModel:
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, attn_implementation="sdpa")
    return peft.PeftModel.from_pretrained(model, adapters)


@pytest.mark.nightly(but=["gemma3-some", "olmo3-all", "llama-all", "smollm3-some", "gpt2-all", "qwen2-some", "qwen3-all"])
@pytest.mark.parametrize("on", ["all", "some"])
@pytest.mark.parametrize("kind", EVERY)
def test_peft_computes_the_same(kind: str, on: str, base: Callable, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    run = adapted_run(base(kind), tmp_path / "run", "rank=3,alpha=7" + (f",on={SOME[kind]}" if on == "some" else ""))
    assert main(["export", str(run), str(tmp_path / "peft"), "--to", "peft"]) == 0
    assert f"the adapters of {base(kind)}" in capsys.readouterr().out
    model = load(str(run), device="cpu")
    tokens = random_tokens(model.shape)[:40]
    logits, plain = model.logits([tokens])[0], load(str(base(kind)), device="cpu").logits([tokens])[0]
    them = theirs(base(kind), tmp_path / "peft")
    found = their_logits(them, tokens)
    with safe_open(tmp_path / "peft" / "adapter_model.safetensors", "pt") as stored:
        assert len(stored.keys()) == sum(".lora_" in name for name, _ in them.named_parameters()), "no other modules there"
    assert (logits - found).abs().max() <= LOGITS and (logits - plain).abs().max() > 0.01
    again = load(str(tmp_path / "peft"), device="cpu")
    assert again.flat.equal(model.flat)


@pytest.mark.parametrize(("rank", "alpha"), [(3, 7.5), (7, 29), (16, 0.25)])
def test_alpha_is_exported_as_it_is(rank: int, alpha: float, base: Callable, tmp_path: Path) -> None:
    """Also a fraction, and where alpha / r, rounded, times r is another number."""
    run = adapted_run(base("llama"), tmp_path / "run", f"rank={rank},alpha={alpha},on=q")
    export_peft(checkpoint.find(str(run)), tmp_path / "peft")
    assert json.loads((tmp_path / "peft" / "adapter_config.json").read_text())["lora_alpha"] == alpha
    assert read_config(tmp_path / "peft")[0] == LoraShape(rank, alpha)
    assert load(str(tmp_path / "peft"), device="cpu").flat.equal(load(str(run), device="cpu").flat)


def test_adapters_too_large_for_float32_are_refused(base: Callable, tmp_path: Path) -> None:
    """In their product, whose factors float32 holds."""
    run = adapted_run(base("llama"), tmp_path / "run", "rank=3,on=q")
    export_peft(checkpoint.find(str(run)), tmp_path / "peft")
    path = tmp_path / "peft" / "adapter_model.safetensors"
    save_file({name: 1e20 * values for name, values in load_file(path).items()}, path)
    with pytest.raises(DataError, match=r"expected finite numbers in blocks\.0\.qkv_weight with its adapter, found others"):
        load(str(tmp_path / "peft"), device="cpu")


@pytest.mark.parametrize("kind", EVERY)
def test_its_own_adapters_are_read(kind: str, base: Callable, tmp_path: Path) -> None:
    targets = ["c_attn", "mlp.c_proj"] if kind == "gpt2" else ["q_proj", "v_proj", "down_proj"]
    model = transformers.AutoModelForCausalLM.from_pretrained(base(kind), dtype=torch.float32, attn_implementation="sdpa")
    made = peft.get_peft_model(model, peft.LoraConfig(r=4, lora_alpha=6, target_modules=targets, task_type="CAUSAL_LM"))
    for name, values in made.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(values, std=0.3)
    made.save_pretrained(tmp_path / "peft")
    ours = load(str(tmp_path / "peft"), device="cpu")
    tokens = random_tokens(ours.shape)[:40]
    logits = their_logits(made, tokens)
    assert (ours.logits([tokens])[0] - logits).abs().max() <= 1e-5 * logits.abs().max()
    assert read_sizes(str(tmp_path / "peft")) == read_sizes(str(base(kind)))
    assert main(["import", str(tmp_path / "peft"), "--out", str(tmp_path / "imported")]) == 0
    assert load(str(tmp_path / "imported"), device="cpu").flat.equal(ours.flat)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"peft_type": "IA3"}, 'expected peft_type "LORA" in .*, found .IA3.; handgrad has no such adapters'),
        ({"use_dora": True}, "expected use_dora false in"),
        ({"init_lora_weights": "pissa_niter_4"}, "expected init_lora_weights true in"),
        ({"alora_invocation_tokens": [5, 6]}, "expected alora_invocation_tokens null in"),
        ({"rank_pattern": {"q_proj": 8}}, "expected rank_pattern {} in"),
        ({"r": 0}, "expected r of 1 or more in"),
        ({"lora_alpha": -1}, "expected lora_alpha above 0 in"),
        ({"lora_alpha": 1e308}, "expected lora_alpha / r of at most 3.4e.38, a float32, in .*, found 1e.308 / 3"),
        ({"base_model_name_or_path": None}, "expected base_model_name_or_path in"),
        ({"r": 5}, "expected base_model.model.* of shape .* in .*adapter_model.safetensors, found"),
        ({"base_model_name_or_path": "/nowhere/at/all"}, "expected weights at /nowhere/at/all.*peft --base MODEL"),
    ],
)
def test_others_are_refused(changes: dict, told: str, base: Callable, tmp_path: Path) -> None:
    run = adapted_run(base("llama"), tmp_path / "run", "rank=3,on=q")
    export_peft(checkpoint.find(str(run)), tmp_path / "peft")
    path = tmp_path / "peft" / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(DataError, match=told):
        open_weights(str(tmp_path / "peft"))


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        ("half", "expected A and B of q of blocks.0.qkv_weight in .*, found A alone"),
        ("nan", "expected finite numbers in base_model.*q_proj.lora_B.weight of .*, found others"),
        ("foreign", "expected adapters of this model's blocks in .*, found also 'base_model.model.lm_head.lora_A.weight'"),
        ("none", "expected adapters in .*, found none"),
    ],
)
def test_damaged_ones_are_refused(damage: str, told: str, base: Callable, tmp_path: Path) -> None:
    run = adapted_run(base("llama"), tmp_path / "run", "rank=3,on=q")
    export_peft(checkpoint.find(str(run)), tmp_path / "peft")
    path = tmp_path / "peft" / "adapter_model.safetensors"
    tensors = load_file(path)
    first = "base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight"
    if damage == "half":
        del tensors[first]
    elif damage == "nan":
        tensors[first][0, 0] = torch.nan
    elif damage == "foreign":
        tensors["base_model.model.lm_head.lora_A.weight"] = torch.zeros(3, 3)
    else:
        tensors = {}
    save_file(tensors, path)
    with pytest.raises(DataError, match=told):
        open_weights(str(tmp_path / "peft"))


def test_a_base_beside_its_adapters(base: Callable, tmp_path: Path) -> None:
    run = adapted_run(base("llama"), tmp_path / "run", "rank=3,on=q")
    export_peft(checkpoint.find(str(run)), tmp_path / "peft")
    path = tmp_path / "peft" / "adapter_config.json"
    (tmp_path / "peft" / "its_base").symlink_to(base("llama"))
    path.write_text(json.dumps(json.loads(path.read_text()) | {"base_model_name_or_path": "its_base"}))
    assert read_config(tmp_path / "peft") == (parse_lora("rank=3,alpha=6"), "its_base")
    assert open_weights(str(tmp_path / "peft")).shape == open_weights(str(base("llama"))).shape


def test_the_base_of_an_imported_run_is_its_source(base: Callable, tmp_path: Path) -> None:
    assert main(["import", str(base("llama")), "--out", str(tmp_path / "imported")]) == 0
    run = adapted_run(tmp_path / "imported", tmp_path / "run", "rank=3,on=q")
    export_peft(checkpoint.find(str(run)), tmp_path / "peft")
    assert read_config(tmp_path / "peft")[1] == str(base("llama"))


def test_a_base_that_is_given(base: Callable, tmp_path: Path) -> None:
    run = adapted_run(base("llama"), tmp_path / "run", "rank=3,on=q")
    export_peft(checkpoint.find(str(run)), tmp_path / "peft")
    path = tmp_path / "peft" / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"base_model_name_or_path": "/nowhere/at/all"}))
    words = ["--base", str(base("llama")), "--out", str(tmp_path / "imported")]
    assert main(["import", str(tmp_path / "peft"), *words]) == 0
    assert load(str(tmp_path / "imported"), device="cpu").flat.equal(load(str(run), device="cpu").flat)
    with pytest.raises(UsageError, match=r"--base goes with adapters of PEFT, found .* without adapter_config\.json"):
        import_model(str(base("llama")), tmp_path / "other", base="gpt2")


def test_without_adapters_there_is_nothing_to_export(base: Callable, tmp_path: Path) -> None:
    assert main(["import", str(base("llama")), "--out", str(tmp_path / "run")]) == 0
    with pytest.raises(UsageError, match=r"has no adapters, they come from train --lora; --to hf writes its weights"):
        export_peft(checkpoint.find(str(tmp_path / "run")), tmp_path / "peft")
    assert imported_config(open_weights(str(tmp_path / "run")).shape).lora == ""


def forge_base(folder: Path, base: Path | str) -> None:
    """Adapters in a folder, of the weights at `base`, none of which is read."""
    folder.mkdir()
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "base_model_name_or_path": str(base)}
    (folder / "adapter_config.json").write_text(json.dumps(config))


@pytest.mark.fault(54)
def test_adapters_on_each_other_are_refused(base: Callable, tmp_path: Path) -> None:
    """A circle of two by other spellings of their paths, adapters on themselves, and a run's among them."""
    forge_base(tmp_path / "a", tmp_path / "b" / ".." / "b")
    forge_base(tmp_path / "b", tmp_path / "a")
    forge_base(tmp_path / "own", tmp_path / "own")
    for name, told in (("a", "a on .*b on .*a"), ("b", "b on .*a on .*b"), ("own", "own on .*own")):
        for read in (open_weights, read_sizes):
            with pytest.raises(DataError, match=f"expected adapters on weights, found adapters on each other: .*{told};"):
                read(str(tmp_path / name))
    weights = located(open_weights(str(base("llama"))))
    run = adapted_run(
        base("llama"), tmp_path / "run", "rank=3,on=q", origin={**weights.origin, "path": str(tmp_path / "c")}
    )
    forge_base(tmp_path / "c", run)
    with pytest.raises(DataError, match=r"found adapters on each other: .*run on .*c on .*run;"):
        open_weights(str(run))
