"""Runs on rewards on a GPU: sampler and trainer compute the same bits, and a stopped run leaves the same."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

from handgrad.run.open import train
from tests.conftest import small_run
from tests.gpu.runs import leave_the_same_bits
from tests.test_runs import records


@pytest.mark.parametrize("updates", [1, 2])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize(
    ("architecture", "lora"),
    [("gpt2", ""), ("gpt2", "rank=8,alpha=16"), ("llama", ""), ("llama", "rank=8,alpha=16"), ("modern", "")],
)
def test_runs_on_rewards(architecture: str, precision: str, lora: str, updates: int, shards: Path, tmp_path: Path) -> None:
    sizes = {"architecture": architecture, "channels": 128, "sequence_length": 192, "device": "cuda"}
    base = replace(
        small_run(shards, tmp_path / "base"), **sizes, precision=precision, sample_tokens=0, steps=20, eval_every=0
    )
    base = replace(base, tokens_per_step=4 * 192)
    train(base)
    (tmp_path / "reward.py").write_text("def odd(row, answer):\n    return sum(map(ord, answer)) % 2.0\n")
    reward = f"{tmp_path / 'reward.py'}:odd"  # differs within a group: micro-batches of equal groups have no pass
    more = {"objective": "reward", "reward": reward, "data": "questions:copy+edge", "rollouts": 4, "updates": updates}
    more |= {"out": str(tmp_path / "run"), "init_from": base.out, "lora": lora, "answer_tokens": 24}
    config = replace(base, **more, steps=12, tokens_per_step=16 * 192, eval_every=4, eval_tokens=240, warmup_steps=0)
    leave_the_same_bits(config)
    sampled = records(config.out, ("rollouts",))
    assert len(sampled) == 12 // updates and all(line["difference"] == 0 for line in sampled)
    assert all(line["equal_groups"] < 1 for line in sampled)
    print(architecture, precision, lora, [line["passes"] for line in sampled], [line["answer_tokens"] for line in sampled])
