"""Runs of Gemma 3 and OLMo, most of whose layers may have a window: trained, resumed bit by bit, the same on two ranks,
continued from, with adapters; and what they refuse."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from handgrad.api.model import load
from handgrad.errors import UsageError
from handgrad.networks.gemma3 import Gemma3Shape, parse_gemma3
from handgrad.networks.olmo import OlmoShape, parse_olmo
from handgrad.run.open import train
from handgrad.run.settings import run_config
from handgrad.settings.config import RunConfig, check, convert, parse_toml, to_toml
from tests.distributed.runs import Launcher, arguments, same_run
from tests.test_runs import records, same_bits

WINDOWED = {
    "gemma3": "kv_heads=1,head_width=10,feed_forward=44,window=9,full_every=2,score_width=16",
    "olmo": "kv_heads=1,feed_forward=44,window=9,full_every=2,rope=yarn,rope_factor=2.0,rope_length=16",
}
PARSE = {"gemma3": parse_gemma3, "olmo": parse_olmo}


def of_network(network: str) -> dict[str, str]:
    """The settings of a small member."""
    return {"architecture": network, network: WINDOWED[network]}


@pytest.mark.nightly(but=["gemma3-bf16-2", "olmo-fp32-0"])
@pytest.mark.parametrize(("precision", "recompute"), [("fp32", 0), ("bf16", 2)])
@pytest.mark.parametrize("network", WINDOWED)
def test_it_learns_and_resumes_bit_by_bit(
    network: str, config: RunConfig, tmp_path: Path, precision: str, recompute: int
) -> None:
    settings = {**of_network(network), "precision": precision, "recompute": recompute}
    whole = replace(config, **settings, out=str(tmp_path / "whole"))
    train(whole)
    losses = [record["loss"] for record in records(whole.out, ("step",))]
    assert losses[-1] < losses[0] - 0.5
    again = replace(whole, out=str(tmp_path / "again"))
    shutil.copytree(whole.out, again.out)
    shutil.rmtree(tmp_path / "again" / "checkpoints" / "step_00000012")
    train(again)  # goes on from step 8
    assert f"{network}, 2 layers" in (tmp_path / "again" / "log.txt").read_text()
    same_bits(whole.out, again.out, 12)


@pytest.mark.nightly(but=["gemma3"])
@pytest.mark.parametrize("network", WINDOWED)
def test_ranks_do_not_matter(network: str, launcher: Launcher, shards: Path, tmp_path: Path) -> None:
    settings = {**of_network(network), "steps": 3, "micro_batch": 4, "packing": "masked", "recompute": 3}
    launcher.run(1, arguments(shards, tmp_path / "alone", **settings))
    launcher.run(2, arguments(shards, tmp_path / "both", zero=1, **settings))
    same_run(tmp_path / "alone", tmp_path / "both", 3)


@pytest.mark.nightly(but=["olmo"])
@pytest.mark.parametrize("network", WINDOWED)
def test_its_checkpoint_is_a_model_like_any(network: str, config: RunConfig, tmp_path: Path) -> None:
    """It speaks, and adapters start from it."""
    first = replace(config, **of_network(network))
    train(first)
    assert load(first.out, device="cpu").generate("the river", max_tokens=5)
    settings = {"init_from": first.out, "data": first.data, "out": str(tmp_path / "further"), "lora": "rank=4,on=q+down"}
    further = run_config("", "", "", settings)
    assert (further.architecture, getattr(further, network), further.channels) == (network, WINDOWED[network], 32)
    short = {"steps": 2, "tokens_per_step": 256, "micro_batch": 4, "sequence_length": 32, "sample_tokens": 0}
    train(check(replace(further, **short, eval_tokens=256)))
    before, after = load(first.out, device="cpu").weights, load(further.out, device="cpu").weights
    assert before.blocks[0].proj_weight.equal(after.blocks[0].proj_weight)
    assert not before.blocks[0].down_weight.equal(after.blocks[0].down_weight)


TEXTS = [
    *((network, text) for network, text in WINDOWED.items()),
    *((network, "") for network in WINDOWED),
    ("gemma3", "kv_heads=2,norm_epsilon=1e-05,rotary_base=500000.0,rope_factor=8.0"),
    ("olmo", "kv_heads=2,feed_forward=96,norm_epsilon=1e-05,rotary_base=10000.0"),
]


@pytest.mark.parametrize(("network", "text"), TEXTS)
def test_the_text_gives_the_numbers_back(network: str, text: str) -> None:
    assert str(PARSE[network](text)) == text
    config = replace(RunConfig(), **{"architecture": network, network: text})
    read = {name: convert(name, value) for name, value in parse_toml(to_toml(config).encode()).items()}
    assert RunConfig(**read) == config


def test_zeros_stand_for_what_follows_from_the_sizes() -> None:
    assert parse_gemma3("").resolved(4, 640) == Gemma3Shape(kv_heads=4, feed_forward=2560, score_width=256)
    assert parse_olmo("").resolved(4, 640) == OlmoShape(kv_heads=4, feed_forward=1728)


@pytest.mark.parametrize(
    ("network", "layers", "text", "full"), [("gemma3", 13, "", [5, 11]), ("olmo", 9, "window=512", [3, 7])]
)
def test_some_layers_see_all_tokens(network: str, layers: int, text: str, full: list[int]) -> None:
    shape = replace(RunConfig(), **{"architecture": network, network: text}, num_layers=layers).shape(300)
    assert [layer for layer, window in enumerate(shape.windows) if not window] == full and shape.window == 512


def test_olmo_2_has_no_window() -> None:
    assert not any(replace(RunConfig(), architecture="olmo").shape(300).windows)


REFUSED: dict[str, list[tuple[dict, str]]] = {
    "gemma3": [
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
    "olmo": [
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
        ({"num_heads": 256}, "an even width up to 1024, found 768 channels in 256 heads; choose another --num-heads"),
    ],
}


@pytest.mark.parametrize(
    ("network", "settings", "told"), [(network, *row) for network, rows in REFUSED.items() for row in rows]
)
def test_what_it_does_not_do_is_refused(network: str, settings: dict, told: str) -> None:
    with pytest.raises(UsageError, match=told):
        check(RunConfig(**{"architecture": network} | settings))
