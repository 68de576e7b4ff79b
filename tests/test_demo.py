"""The promise of the first two minutes: a small GPT comes within 10 % of the entropy of the source it learns from."""

from pathlib import Path

import pytest

from handgrad.data.shards import open_dataset
from handgrad.settings import presets
from tests.test_runs import records

ROOT = Path(__file__).parents[1]


def test_the_demo_learns_the_stories_to_within_ten_percent_of_their_entropy() -> None:
    """Reads the run that `make train` left, as CI has it do before the tests."""
    if not (ROOT / "runs/demo/metrics.jsonl").exists():
        pytest.skip("no runs/demo: make train makes it")
    floor = open_dataset(ROOT / "shards/stories").floor("validation")
    assert floor is not None and 0.4 < floor < 0.6
    validations = records(ROOT / "runs/demo", ("validation",))
    finished = bool(validations) and validations[-1]["step"] == presets.demo().steps
    assert finished, "runs/demo is unfinished: `make train` resumes it"
    last = validations[-1]
    assert floor < last["loss"] < 1.10 * floor, f"validation loss {last['loss']:.4f} against an entropy of {floor:.4f}"
