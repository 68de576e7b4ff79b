"""Runs of the modern network: trained, resumed bit by bit, evaluated, sampled, continued from; and what it does not do."""

import math
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from handgrad.api.model import load
from handgrad.errors import UsageError
from handgrad.interop.export import export_llmc
from handgrad.networks.modern import DEPTHS as MODERN
from handgrad.run.open import train
from handgrad.run.settings import run_config
from handgrad.settings.config import RunConfig, check
from handgrad.settings.presets import preset
from handgrad.storage.checkpoint import find
from tests.techniques import toggled
from tests.test_runs import records, same_bits

NEW = "residual_scalars,input_scalars,value_embeddings"
MODERN_RUN = {
    "architecture": "modern",
    "techniques": toggled(""),
    "optimizer": "muon",
    "learning_rate": 3e-3,
    "warmup_steps": 2,
}


@pytest.fixture
def modern(config: RunConfig) -> RunConfig:
    return replace(config, **MODERN_RUN)


@pytest.mark.nightly(but=["fp8", "new"])
@pytest.mark.parametrize(
    "settings",
    [
        {"precision": "fp32"},
        {"precision": "bf16"},
        {"precision": "fp8"},
        {"precision": "bf16", "techniques": toggled(NEW)},
        {"techniques": toggled(NEW), "optimizer": "adamw", "recompute": 2},
    ],
    ids=["fp32", "bf16", "fp8", "new", "new, adamw"],
)
def test_it_learns_and_resumes_bit_by_bit(modern: RunConfig, tmp_path: Path, settings: dict) -> None:
    whole = replace(modern, **settings, out=str(tmp_path / "whole"))
    train(whole)
    losses = [record["loss"] for record in records(whole.out, ("step",))]
    assert losses[0] == pytest.approx(math.log(257), abs=1e-3), "a head of zeros guesses"
    assert losses[-1] < losses[0] - 0.7
    again = replace(whole, out=str(tmp_path / "again"))
    shutil.copytree(whole.out, again.out)
    shutil.rmtree(tmp_path / "again" / "checkpoints" / "step_00000012")
    train(again)  # goes on from step 8
    (header,) = [line for line in (tmp_path / "again" / "log.txt").read_text().splitlines() if "model  " in line][:1]
    assert whole.shape(257).variant + "2 layers" in header
    same_bits(whole.out, again.out, 12)


@pytest.mark.parametrize("names", ["rotary,qk_norm", "softcap,embedding_norm,untied_head,zero_init", NEW])
def test_each_list_of_techniques_is_a_run_of_its_own(modern: RunConfig, tmp_path: Path, names: str) -> None:
    train(replace(modern, steps=3, save_every=0, eval_every=0, techniques=toggled(names), out=str(tmp_path / "a")))
    train(replace(modern, steps=3, save_every=0, eval_every=0, out=str(tmp_path / "b")))
    one, other = (records(tmp_path / name, ("step",))[-1]["loss"] for name in "ab")
    assert math.isfinite(one) and one != other


def test_its_checkpoint_is_a_model_like_any(modern: RunConfig, tmp_path: Path) -> None:
    train(modern)
    model = load(modern.out, device="cpu")
    tokens = model.tokens("the river walks over")
    losses, logits = model.losses([tokens])[0], model.logits([tokens])[0]
    assert logits.abs().max() < 15, "the soft cap"
    picked = logits.log_softmax(-1)[:-1].gather(1, torch.tensor(tokens[1:]).unsqueeze(1))
    assert (picked[:, 0] + losses).abs().max() < 1e-4
    assert model.generate("the river", max_tokens=5)
    with pytest.raises(UsageError, match=r"llm.c has no network like .*'s \(modern\), only GPT-2's"):
        export_llmc(find(modern.out), tmp_path / "llmc")
    further = run_config("", "", "", {"init_from": modern.out, "data": modern.data, "out": str(tmp_path / "further")})
    assert further.architecture == "modern" and further.channels == 32
    with pytest.raises(UsageError, match=r"architecture is modern in .* and gpt2 in this run"):
        train(replace(further, **MODERN_RUN | {"architecture": "gpt2"}, steps=1, tokens_per_step=256, micro_batch=4))


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"architecture": "modern", "techniques": "qknorm"}, "techniques must be .*rotary.*qk_norm"),
        ({"architecture": "modern", "channels": 6, "num_heads": 2}, "turn pairs of channels, found heads of 3"),
        (
            {"architecture": "modern", "precision": "fp8", "channels": 40, "num_heads": 2},
            "channels must be a multiple of 16",
        ),
        ({"architecture": "modern", "precision": "fp8", "dropout": 0.1}, "modern has no dropout"),
        ({"architecture": "modern", "dropout": 0.1}, "modern has no dropout, found dropout 0.1"),
        ({"architecture": "modem"}, "architecture must be .*modern"),
    ],
)
def test_what_it_does_not_do_is_refused(settings: dict, told: str) -> None:
    with pytest.raises(UsageError, match=told):
        check(RunConfig(**settings))


@pytest.mark.parametrize("name", MODERN)
def test_presets_follow_from_their_depth(name: str) -> None:
    config = check(preset(name))
    assert config.num_layers == MODERN[name] and config.channels == 64 * MODERN[name] == 128 * config.num_heads
    tokens, width = config.steps * config.tokens_per_step, config.channels
    parameters = 12 * config.num_layers * width**2 + 50257 * width
    assert tokens == pytest.approx(20 * parameters, rel=0.001)
    assert config.optimizer == "muon" and config.architecture == "modern"
    assert config.learning_rate * math.sqrt(width) == pytest.approx(3e-3 * math.sqrt(768))
    if MODERN[name] > 4:
        smaller = preset(f"m{MODERN[name] - 2}")
        assert config.tokens_per_step >= smaller.tokens_per_step and config.micro_batch <= smaller.micro_batch
