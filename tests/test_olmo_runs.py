"""Runs of OLMo: trained, resumed, on two ranks, continued from, with adapters; and what it does not do."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from handgrad.api.model import load
from handgrad.errors import UsageError
from handgrad.networks.olmo import OlmoShape, parse_olmo
from handgrad.run.open import train
from handgrad.run.settings import run_config
from handgrad.settings.config import RunConfig, check, convert, parse_toml, to_toml
from tests.distributed.runs import Launcher, arguments, same_run
from tests.test_runs import records, same_bits

WINDOWED = "kv_heads=1,feed_forward=44,window=9,full_every=2,rope=yarn,rope_factor=2.0,rope_length=16"


@pytest.fixture
def olmo(config: RunConfig) -> RunConfig:
    return replace(config, architecture="olmo", olmo=WINDOWED)


@pytest.mark.parametrize(("precision", "recompute"), [("fp32", 0), ("bf16", 2)])
def test_it_learns_and_resumes_bit_by_bit(olmo: RunConfig, tmp_path: Path, precision: str, recompute: int) -> None:
    whole = replace(olmo, precision=precision, recompute=recompute, out=str(tmp_path / "whole"))
    train(whole)
    losses = [record["loss"] for record in records(whole.out, ("step",))]
    assert losses[-1] < losses[0] - 0.5
    again = replace(whole, out=str(tmp_path / "again"))
    shutil.copytree(whole.out, again.out)
    shutil.rmtree(tmp_path / "again" / "checkpoints" / "step_00000012")
    train(again)  # goes on from step 8
    assert "olmo, 2 layers" in (tmp_path / "again" / "log.txt").read_text()
    same_bits(whole.out, again.out, 12)


def test_ranks_do_not_matter(launcher: Launcher, shards: Path, tmp_path: Path) -> None:
    settings = {"architecture": "olmo", "olmo": WINDOWED, "steps": 3, "micro_batch": 4, "packing": "masked", "recompute": 3}
    launcher.run(1, arguments(shards, tmp_path / "alone", **settings))
    launcher.run(2, arguments(shards, tmp_path / "both", zero=1, **settings))
    same_run(tmp_path / "alone", tmp_path / "both", 3)


def test_its_checkpoint_is_a_model_like_any(olmo: RunConfig, tmp_path: Path) -> None:
    """It speaks, and adapters start from it."""
    train(olmo)
    assert load(olmo.out, device="cpu").generate("the river", max_tokens=5)
    settings = {"init_from": olmo.out, "data": olmo.data, "out": str(tmp_path / "further"), "lora": "rank=4,on=q+down"}
    further = run_config("", "", "", settings)
    assert (further.architecture, further.olmo, further.channels) == ("olmo", WINDOWED, 32)
    short = {"steps": 2, "tokens_per_step": 256, "micro_batch": 4, "sequence_length": 32, "sample_tokens": 0}
    train(check(replace(further, **short, eval_tokens=256)))
    before, after = load(olmo.out, device="cpu").weights, load(further.out, device="cpu").weights
    assert before.blocks[0].proj_weight.equal(after.blocks[0].proj_weight)
    assert not before.blocks[0].down_weight.equal(after.blocks[0].down_weight)


@pytest.mark.parametrize("text", ["", WINDOWED, "kv_heads=2,feed_forward=96,norm_epsilon=1e-05,rotary_base=10000.0"])
def test_the_text_gives_the_numbers_back(text: str) -> None:
    assert str(parse_olmo(text)) == text
    config = replace(RunConfig(), architecture="olmo", olmo=text)
    read = {name: convert(name, value) for name, value in parse_toml(to_toml(config).encode()).items()}
    assert RunConfig(**read) == config


def test_zeros_stand_for_what_follows_from_the_sizes() -> None:
    assert parse_olmo("").resolved(4, 640) == OlmoShape(kv_heads=4, feed_forward=1728)
    shape = replace(RunConfig(), architecture="olmo", num_layers=9, olmo="window=512").shape(300)
    assert [layer for layer, window in enumerate(shape.windows) if not window] == [3, 7] and shape.window == 512
    assert not any(replace(RunConfig(), architecture="olmo").shape(300).windows)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"architecture": "gpt2", "olmo": "window=9"}, "olmo is for --architecture olmo, found 'window=9' with gpt2"),
        ({"olmo": "sliding_window=9"}, r"a number of olmo must be one of .*found 'sliding_window'"),
        ({"olmo": "kv_heads=5"}, "olmo must have kv_heads that divide num_heads 12, found 'kv_heads=5'"),
        ({"olmo": "feed_forward=-1"}, "feed_forward of 1 or more"),
        ({"olmo": "window=-1"}, "window of 0 or more and full_every of 1 or more"),
        ({"olmo": "full_every=0"}, "window of 0 or more and full_every of 1 or more"),
        ({"olmo": "rotary_base=nan"}, "rotary_base above 1"),
        ({"olmo": "rope=linear"}, "rope of olmo must be one of plain, yarn; found 'linear'"),
        ({"olmo": "rope_factor=8.0"}, "no rope_factor beside rope=plain, which does not read it"),
        ({"olmo": "rope=yarn,rope_factor=0.5"}, "rope_factor of 1 or more"),
        ({"olmo": "rope=yarn,rope_slow=40.0"}, "rope_slow between 0 and rope_fast"),
        ({"olmo": "norm_epsilon=1.0"}, "norm_epsilon between 0 and 1"),
        ({"num_heads": 5}, "channels must be a multiple of num_heads, found 768 and 5"),
        ({"dropout": 0.1}, "architecture olmo has no dropout, found dropout 0.1"),
    ],
)
def test_what_it_does_not_do_is_refused(settings: dict, told: str) -> None:
    with pytest.raises(UsageError, match=told):
        check(RunConfig(**{"architecture": "olmo"} | settings))
