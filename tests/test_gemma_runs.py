"""Runs of Gemma 3: trained, resumed bit by bit, the same on two ranks, continued from, with adapters; and what it does not
do."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from handgrad.api.model import load
from handgrad.errors import UsageError
from handgrad.networks.gemma3 import Gemma3Shape, parse_gemma3
from handgrad.run.open import train
from handgrad.run.settings import run_config
from handgrad.settings.config import RunConfig, check, convert, parse_toml, to_toml
from tests.distributed.runs import Launcher, arguments, same_run
from tests.test_runs import records, same_bits

WINDOWED = "kv_heads=1,head_width=10,feed_forward=44,window=9,full_every=2,score_width=16"


@pytest.fixture
def gemma(config: RunConfig) -> RunConfig:
    return replace(config, architecture="gemma3", gemma3=WINDOWED)


@pytest.mark.parametrize(("precision", "recompute"), [("fp32", 0), ("bf16", 2)])
def test_it_learns_and_resumes_bit_by_bit(gemma: RunConfig, tmp_path: Path, precision: str, recompute: int) -> None:
    whole = replace(gemma, precision=precision, recompute=recompute, out=str(tmp_path / "whole"))
    train(whole)
    losses = [record["loss"] for record in records(whole.out, ("step",))]
    assert losses[-1] < losses[0] - 0.5
    again = replace(whole, out=str(tmp_path / "again"))
    shutil.copytree(whole.out, again.out)
    shutil.rmtree(tmp_path / "again" / "checkpoints" / "step_00000012")
    train(again)  # goes on from step 8
    assert "gemma3, 2 layers" in (tmp_path / "again" / "log.txt").read_text()
    same_bits(whole.out, again.out, 12)


def test_ranks_do_not_matter(launcher: Launcher, shards: Path, tmp_path: Path) -> None:
    settings = {
        "architecture": "gemma3",
        "gemma3": WINDOWED,
        "steps": 3,
        "micro_batch": 4,
        "packing": "masked",
        "recompute": 3,
    }
    launcher.run(1, arguments(shards, tmp_path / "alone", **settings))
    launcher.run(2, arguments(shards, tmp_path / "both", zero=1, **settings))
    same_run(tmp_path / "alone", tmp_path / "both", 3)


def test_its_checkpoint_is_a_model_like_any(gemma: RunConfig, tmp_path: Path) -> None:
    """It speaks, and adapters start from it."""
    train(gemma)
    assert load(gemma.out, device="cpu").generate("the river", max_tokens=5)
    settings = {"init_from": gemma.out, "data": gemma.data, "out": str(tmp_path / "further"), "lora": "rank=4,on=q+down"}
    further = run_config("", "", "", settings)
    assert (further.architecture, further.gemma3, further.channels) == ("gemma3", WINDOWED, 32)
    short = {"steps": 2, "tokens_per_step": 256, "micro_batch": 4, "sequence_length": 32, "sample_tokens": 0}
    train(check(replace(further, **short, eval_tokens=256)))
    before, after = load(gemma.out, device="cpu").weights, load(further.out, device="cpu").weights
    assert before.blocks[0].proj_weight.equal(after.blocks[0].proj_weight)
    assert not before.blocks[0].down_weight.equal(after.blocks[0].down_weight)


@pytest.mark.parametrize("text", ["", WINDOWED, "kv_heads=2,norm_epsilon=1e-05,rotary_base=500000.0,rope_factor=8.0"])
def test_the_text_gives_the_numbers_back(text: str) -> None:
    assert str(parse_gemma3(text)) == text
    config = replace(RunConfig(), architecture="gemma3", gemma3=text)
    read = {name: convert(name, value) for name, value in parse_toml(to_toml(config).encode()).items()}
    assert RunConfig(**read) == config


def test_zeros_stand_for_what_follows_from_the_sizes() -> None:
    whole = Gemma3Shape(kv_heads=4, head_width=256, feed_forward=2560, score_width=256)
    assert parse_gemma3("").resolved(4, 640) == whole
    shape = replace(RunConfig(), architecture="gemma3", num_layers=13).shape(300)
    assert [layer for layer, window in enumerate(shape.windows) if not window] == [5, 11] and shape.window == 512


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"architecture": "gpt2", "gemma3": "window=9"}, "gemma3 is for --architecture gemma3, found 'window=9' with gpt2"),
        ({"gemma3": "sliding_window=9"}, r"a number of gemma3 must be one of .*found 'sliding_window'"),
        ({"gemma3": "kv_heads=5"}, "gemma3 must have kv_heads that divide num_heads 12, found 'kv_heads=5'"),
        ({"gemma3": "head_width=63"}, "an even head_width"),
        ({"gemma3": "window=-1"}, "window, full_every and score_width of 1 or more"),
        ({"gemma3": "score_width=-1"}, "window, full_every and score_width of 1 or more"),
        ({"gemma3": "full_every=0"}, "window, full_every and score_width of 1 or more"),
        ({"gemma3": "rotary_base=nan"}, "rotary_base above 1"),
        ({"gemma3": "window_rotary_base=inf"}, "window_rotary_base above 1"),
        ({"gemma3": "rope_factor=0.5"}, "rope_factor of 1 or more"),
        ({"gemma3": "norm_epsilon=1.0"}, "norm_epsilon between 0 and 1"),
        ({"dropout": 0.1}, "architecture gemma3 has no dropout, found dropout 0.1"),
    ],
)
def test_what_it_does_not_do_is_refused(settings: dict, told: str) -> None:
    with pytest.raises(UsageError, match=told):
        check(RunConfig(**{"architecture": "gemma3"} | settings))
