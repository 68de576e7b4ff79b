"""A refusal names settings that help: random configurations, planned for GPUs that are not here, follow its remedies to the
end."""

import random
import re
from typing import Any

import pytest

import handgrad
from handgrad.errors import HandgradError
from handgrad.settings.config import FIELDS

CASES = 8  # configurations of a test, of which about half are refused at first
LONGEST = 8  # remedies, one after the other; three is usual


def draw(chosen: random.Random) -> dict[str, Any]:
    """Settings of a small run, most of them about its batch."""
    settings: dict[str, Any] = {
        "architecture": chosen.choice(("gpt2", "modern", "llama")),
        "num_layers": 2,
        "num_heads": chosen.choice((2, 3, 4)),
        "channels": chosen.choice((48, 64, 72, 768)),
        "sequence_length": chosen.choice((24, 64, 100, 1024)),
        "micro_batch": chosen.choice((1, 2, 3, 8)),
        "tokens_per_step": chosen.choice((96, 4096, 9216, 65536)),
        "precision": chosen.choice(("auto", "fp8", "bf16", "fp16")),
        "zero": chosen.choice((0, 1, 2)),
        "gpu": chosen.choice(("h100", "a100", "t4")),
        "gpus": chosen.choice((1, 2, 4, 8)),
        "vocab_size": 300,
    }
    others: dict[str, Any] = {
        "batch_schedule": "2:9216,4:65536",
        "lanes": 8,
        "optimizer": "muon",
        "learning_rate": 0.0,
        "offload": True,
        "eval_stride": 60,
        "packing": "whole",
        "keep_every": 7,
        "fp8_head": "wgrad",
        "head_chunk_tokens": 50,
        "dropout": 0.1,
    }
    return settings | {name: value for name, value in others.items() if chosen.random() < 0.15}


def remedies(line: str) -> dict[str, str]:
    """The settings that a line names with their values: `--micro-batch 2` is micro_batch 2."""
    named = re.findall(r"--([a-z0-9-]+) ([^\s;,)`-][^\s;,)`]*)", line)
    return {setting: value for flag, value in named if (setting := flag.replace("-", "_")) in FIELDS}


@pytest.mark.parametrize("seed", range(12))
def test_remedies_come_to_an_end(seed: int) -> None:
    chosen = random.Random(seed)
    for settings in (draw(chosen) for _ in range(CASES)):
        told: list[str] = []
        while len(told) < LONGEST:
            try:
                handgrad.plan(**settings)
                break
            except HandgradError as error:
                told.append(str(error))
            assert "\n" not in told[-1]
            found = remedies(told[-1])
            if not found:
                break
            assert any(str(settings.get(name)) != value for name, value in found.items()), told
            settings |= found
        else:
            pytest.fail(f"{settings}: " + "; then ".join(told))
