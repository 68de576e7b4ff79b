"""The modern network in transformers, by the code that its exported folder brings: the same logits, texts and bits."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from transformers import dynamic_module_utils

from handgrad import checkpoint
from handgrad.api.model import load
from handgrad.cli import main
from handgrad.interop.huggingface_modern import CODE
from tests.interop.models import TOKENIZERS, make_checkpoint, our_logits, random_tokens, their_logits, weights
from tests.test_commands import refused

SIZES = (3, 2, 36, 90)  # layers, heads, channels, context
WITHOUT = ("", "rotary, qk_norm", "softcap,embedding_norm,untied_head,zero_init", "qk_norm,softcap")
PROMPT = "the old river"


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[Path, Path]]:
    """(run folder, exported folder) of a model without some techniques, made once."""
    made: dict[tuple[str, str], tuple[Path, Path]] = {}

    def get(without: str = "", kind: str = "bpe") -> tuple[Path, Path]:
        if (without, kind) not in made:
            root = tmp_path_factory.mktemp("modern")
            run, _ = make_checkpoint(root / "run", kind, sizes=SIZES, architecture="modern", without=without)
            assert main(["export", str(run), "--to", "hf", str(root / "hf")]) == 0
            made[without, kind] = run, root / "hf"
        return made[without, kind]

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


@pytest.mark.parametrize("without", WITHOUT)
def test_its_logits_are_ours(without: str, exported: Callable) -> None:
    run, folder = exported(without)
    config = json.loads((folder / "config.json").read_text())
    tokens = random_tokens(checkpoint_shape(run))
    for dtype, largest in ((torch.float32, 1e-4), (torch.float64, 1e-10)):
        model = theirs(folder, dtype)
        assert model.dtype == dtype and model.config.without == config["without"] == without
        found, ours = their_logits(model, tokens), our_logits(run, tokens, dtype)
        error = (found - ours).abs().max()
        assert error <= largest, f"logits differ by {error:.3g}"
    tied = model.head.weight is model.wte.weight
    assert tied == ("untied_head" in without)


def checkpoint_shape(run: Path):
    return load(run, device="cpu").shape


@pytest.mark.parametrize("without", WITHOUT[:3])
def test_the_greedy_text_is_ours_with_the_cache_and_without(without: str, exported: Callable) -> None:
    run, folder = exported(without)
    model, ours, tokenizer = theirs(folder), load(run, device="cpu", precision="fp32"), TOKENIZERS["bpe"]()
    start = [tokenizer.end_of_text, *tokenizer.encode(PROMPT).tolist()]
    inputs = torch.tensor([start])
    options = {"do_sample": False, "max_new_tokens": SIZES[3] - len(start), "attention_mask": torch.ones_like(inputs)}
    ids, whole = (model.generate(inputs, use_cache=cached, **options)[0].tolist() for cached in (True, False))
    assert ids == whole
    written = ids[len(start) :]
    assert len(set(written)) >= 4, "a text worth comparing"
    text = ours.generate(PROMPT, max_tokens=len(written), temperature=0)
    if tokenizer.end_of_text in written:
        written = written[: written.index(tokenizer.end_of_text)]
    assert text == tokenizer.decode(written)
