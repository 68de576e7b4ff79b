"""Runs of the Llama family: trained, resumed bit by bit, the same on several ranks, evaluated, sampled, continued from; the
text of its numbers; and what it does not do."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from handgrad.api.model import load
from handgrad.errors import UsageError
from handgrad.interop.export import export_llmc
from handgrad.networks.llama import LlamaShape, parse_llama
from handgrad.run.open import train
from handgrad.run.settings import run_config
from handgrad.settings.config import RunConfig, check, convert, parse_toml, to_toml
from handgrad.storage.checkpoint import find
from tests.distributed.runs import Launcher, arguments, same_run
from tests.test_runs import records, same_bits

GROUPED = "kv_heads=1,tied,rotary_base=500000.0"
EVERYTHING = (
    "kv_heads=1,head_width=10,feed_forward=44,qkv_bias,qk_norm,rope=yarn,rope_factor=2.0,rope_length=16,rope_scale=1.1"
)


@pytest.fixture
def llama(config: RunConfig) -> RunConfig:
    return replace(config, architecture="llama", llama=GROUPED)


FP8 = "kv_heads=1,head_width=24,feed_forward=48,qkv_bias,qk_norm,rope=llama3,rope_length=16"  # in multiples of 16


@pytest.mark.parametrize(("precision", "text"), [("fp32", GROUPED), ("bf16", EVERYTHING), ("fp8", FP8)])
def test_it_learns_and_resumes_bit_by_bit(llama: RunConfig, tmp_path: Path, precision: str, text: str) -> None:
    whole = replace(llama, llama=text, precision=precision, out=str(tmp_path / "whole"))
    train(whole)
    losses = [record["loss"] for record in records(whole.out, ("step",))]
    assert losses[-1] < losses[0] - 0.5
    again = replace(whole, out=str(tmp_path / "again"))
    shutil.copytree(whole.out, again.out)
    shutil.rmtree(tmp_path / "again" / "checkpoints" / "step_00000012")
    train(again)  # goes on from step 8
    (header,) = [line for line in (tmp_path / "again" / "log.txt").read_text().splitlines() if "model  " in line][:1]
    assert "llama, 2 layers" in header
    same_bits(whole.out, again.out, 12)


IN_FP8 = {"precision": "fp8", "fp8_head": "forward,dgrad", "fp8_window": 2, "fp8_count_every": 2, "recompute": 1}


OTHERS = {"adamw": {}, "muon": {"optimizer": "muon"}, "fp8": IN_FP8, "muon in fp8": {"optimizer": "muon", **IN_FP8}}


@pytest.mark.nightly(but=["muon in fp8"])
@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)
def test_ranks_do_not_matter(other: dict, launcher: Launcher, shards: Path, tmp_path: Path) -> None:
    settings = {"architecture": "llama", "llama": "kv_heads=1,qkv_bias,qk_norm", "steps": 4, "micro_batch": 4, **other}
    launcher.run(1, arguments(shards, tmp_path / "alone", **settings))
    for ranks, zero in ((2, 1), (4, 2)):
        launcher.run(ranks, arguments(shards, tmp_path / f"run{ranks}", zero=zero, **settings))
        same_run(tmp_path / "alone", tmp_path / f"run{ranks}", 4)


def test_its_checkpoint_is_a_model_like_any(llama: RunConfig, tmp_path: Path) -> None:
    train(llama)
    model = load(llama.out, device="cpu")
    tokens = model.tokens("the river walks over")
    losses, logits = model.losses([tokens])[0], model.logits([tokens])[0]
    picked = logits.log_softmax(-1)[:-1].gather(1, torch.tensor(tokens[1:]).unsqueeze(1))
    assert (picked[:, 0] + losses).abs().max() < 1e-4
    assert model.generate("the river", max_tokens=5)
    with pytest.raises(UsageError, match=r"llm.c has no network like .*'s \(llama\), only GPT-2's"):
        export_llmc(find(llama.out), tmp_path / "llmc")
    further = run_config("", "", "", {"init_from": llama.out, "data": llama.data, "out": str(tmp_path / "further")})
    assert (further.architecture, further.llama, further.channels) == ("llama", GROUPED, 32)
    short = {"steps": 1, "tokens_per_step": 256, "micro_batch": 4, "sequence_length": 32, "sample_tokens": 0}
    train(check(replace(further, **short, eval_tokens=256)))
    with pytest.raises(UsageError, match=r"llama is kv_heads=1,.*tied.* in .* and kv_heads=2,.* in this run"):
        train(replace(further, **short, llama="kv_heads=2", out=str(tmp_path / "other")))


# The text of the numbers.


@pytest.mark.parametrize("text", ["", GROUPED, EVERYTHING, "norm_epsilon=1e-06,rope=llama3,rope_factor=8.0"])
def test_the_text_gives_the_numbers_back(text: str) -> None:
    assert str(parse_llama(text)) == text
    config = replace(RunConfig(), architecture="llama", llama=text)
    read = {name: convert(name, value) for name, value in parse_toml(to_toml(config).encode()).items()}
    assert RunConfig(**read) == config


def test_zeros_stand_for_what_follows_from_the_sizes() -> None:
    assert parse_llama("").resolved(6, 96) == LlamaShape(kv_heads=6, head_width=16, feed_forward=256)
    named, shorter = (replace(RunConfig(), architecture="llama", llama=text).shape(300) for text in ("kv_heads=12", ""))
    assert named == shorter and named.head_width == 64 and named.feed_forward == 2048


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"architecture": "gpt2", "llama": "tied"}, "llama is for --architecture llama, found 'tied' with gpt2"),
        ({"llama": "kvheads=2"}, r"a number of llama must be one of .*did you mean kv_heads"),
        ({"llama": "kv_heads"}, "llama must be like .*found 'kv_heads'"),
        ({"llama": "tied=yes"}, "llama must be like .*found 'tied=yes'"),
        ({"llama": "kv_heads=5"}, "llama must have kv_heads that divide num_heads 12, found 'kv_heads=5'"),
        ({"llama": "head_width=63"}, "an even head_width"),
        ({"llama": "rotary_base=nan"}, "rotary_base above 1"),
        ({"llama": "rope=linear,rope_factor=0.5"}, "llama must have rope_factor of 1 or more, found"),
        ({"llama": "rope_factor=8.0"}, "llama must have no rope_factor beside rope=plain, which does not read it, found"),
        ({"llama": "rope=linear,rope_factor=2.0,rope_length=16"}, "no rope_length beside rope=linear"),
        ({"llama": "rope=llama3,rope_factor=2.0,rope_scale=0.5"}, "no rope_scale beside rope=llama3"),
        ({"llama": "rope=longrope"}, "rope of llama must be one of plain, linear, llama3, yarn"),
        ({"num_heads": 7}, "channels must be a multiple of num_heads, found 768 and 7"),
        (
            {"precision": "fp8", "llama": "feed_forward=1000"},
            "feed_forward in multiples of 16 for precision fp8, found 1000",
        ),
        ({"dropout": 0.1}, "architecture llama has no dropout, found dropout 0.1"),
    ],
)
def test_what_it_does_not_do_is_refused(settings: dict, told: str) -> None:
    with pytest.raises(UsageError, match=told):
        check(RunConfig(**{"architecture": "llama"} | settings))
