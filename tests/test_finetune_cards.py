"""The smallest card for each finetuning: the pages have the tables that the plan makes, and the plan is a run's own."""

import json

import pytest

from benchmarks.finetune_cards import METHODS, PAGE, README, Method, in_short, needed, section, tables, usable
from tests.figure_values import ROOT

MEASURED = {
    "SmolLM2-135M": "smollm2-135m",
    "Qwen3-0.6B": "qwen3-0_6b",
    "Llama-3.2-1B": "llama-3_2-1b",
    "Qwen2.5-1.5B": "qwen2_5-1_5b",
}
CONTENDERS = {
    "full": Method("", 2),
    "lora": Method("", 2, lora=True),
    "lora-fp8": Method("", 2, lora=True, precision="fp8"),
}


@pytest.mark.nightly  # the plans of three cards for each recipe: test_planning.py has the plans
def test_the_tables_are_the_plans() -> None:
    """`python -m benchmarks.finetune_cards` writes them anew."""
    assert section(tables()) in PAGE.read_text() and section(in_short()) in README.read_text()


@pytest.mark.parametrize("model", MEASURED)
def test_a_card_holds_what_ran_under_its_cap(model: str) -> None:
    """At recompute 2, on an H200 whose memory was capped; its attention takes other scratch."""
    record = json.loads((ROOT / "benchmarks" / "results" / f"h200-lora-cap-{MEASURED[model]}.json").read_text())
    for name, row in record["figures"][model].items():
        size = needed(model, CONTENDERS[name])
        assert size == pytest.approx(sum(row["plan_bytes"].values()), rel=0.1)
        assert {cap: size <= usable(int(cap)) for cap in row["fits_gib"]} == row["fits_gib"]


def test_every_option_saves_memory() -> None:
    for group in (METHODS[:3], METHODS[3:]):
        sizes = [needed("Qwen3-4B", method) for method in group]
        assert sizes == sorted(sizes, reverse=True) and sizes[0] > sizes[-1]
