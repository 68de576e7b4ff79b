"""Runs on pairs of answers on a GPU: they begin at the references, with graphs and without, and leave the same bits."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

import handgrad
from handgrad.run.open import train
from tests.conftest import small_run
from tests.gpu.runs import leave_the_same_bits
from tests.test_preference import LENGTH, PAIRS
from tests.test_runs import records


@pytest.mark.parametrize("lora", ["", "rank=8,alpha=16"])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("architecture", ["gpt2", "llama"])
def test_runs_over_pairs(architecture: str, precision: str, lora: str, shards: Path, tmp_path: Path) -> None:
    """The margins of the first step are bf16's rounding: the references come from rows of another number."""
    sizes = {"architecture": architecture, "channels": 128, "sequence_length": LENGTH, "device": "cuda"}
    base = replace(
        small_run(shards, tmp_path / "base"), **sizes, precision=precision, sample_tokens=0, steps=20, eval_every=0
    )
    train(base)
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, PAIRS)))
    handgrad.prepare(tmp_path / "pairs.jsonl", tmp_path / "pairs", preferences=True, reference=base.out)
    more = {"data": str(tmp_path / "pairs"), "out": str(tmp_path / "run"), "init_from": base.out, "lora": lora}
    config = replace(base, **more, steps=12, tokens_per_step=8 * LENGTH, eval_every=4, learning_rate=1e-3, warmup_steps=0)
    leave_the_same_bits(config)
    validations = records(config.out, ("validation",))
    assert validations[0]["loss"] == pytest.approx(math.log(2), abs=0.02)
    assert validations[-1]["loss"] < validations[0]["loss"] and validations[-1]["margin"] > 0
