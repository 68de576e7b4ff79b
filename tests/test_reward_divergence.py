"""Training on rewards beside the weights that it began with: the divergence from them, which changes no bits."""

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from handgrad.api.model import load
from handgrad.cli import main
from handgrad.data.prompts import open_prompts, prompts_of
from handgrad.run.open import open_run, train
from handgrad.settings.config import RunConfig
from tests.test_rewards import base, folder, rewarded  # noqa: F401 (fixtures)
from tests.test_runs import records, tensors


def test_the_divergence_from_the_start(base: RunConfig, folder: Path, tmp_path: Path) -> None:  # noqa: F811
    """0 before the first update, then the mean of k3 over the answers of the last step, by the start's own
    probabilities. The run's bits are those without it."""
    config = rewarded(base, folder, tmp_path / "run", learning_rate=1e-2)
    train(config)
    first, middle, last = records(tmp_path / "run", ("validation",))
    assert first["kl"] == 0.0 and 0.0 < middle["kl"] < last["kl"]
    assert f"KL {last['kl']:.4f} from the start" in (tmp_path / "run" / "log.txt").read_text()
    start, total, tokens = load(base.out, device="cpu"), 0.0, 0
    (prompts,) = prompts_of(open_prompts(config.data, base.out), "train")
    for line in map(json.loads, (tmp_path / "run" / "rollouts" / "step_00000005.jsonl").read_text().splitlines()):
        prompt = prompts.prompts[line["prompt"]]
        (losses,) = start.losses([[*prompt, *line["answer"]]])
        for now, then in zip(line["losses"], losses[len(prompt) - 1 :].tolist(), strict=True):
            total, tokens = total + math.exp(now - then) - 1 - (now - then), tokens + 1
    assert last["kl"] == pytest.approx(total / tokens, rel=1e-3)
    assert main(["report", config.out]) == 0
    page = (tmp_path / "run" / "report.html").read_text()
    assert "KL from the start" in page and f"{last['kl']:.4f}" in page
    train(replace(config, out=str(tmp_path / "without"), eval_every=0))
    assert all(map(torch.equal, tensors(config.out, 6).values(), tensors(tmp_path / "without", 6).values()))


@pytest.mark.nightly(but=["whole"])
@pytest.mark.parametrize("lora", [pytest.param("", id="whole"), "rank=8,alpha=16"])
def test_a_resumed_run_opens_its_start_again(lora: str, base: RunConfig, folder: Path, tmp_path: Path) -> None:  # noqa: F811
    """For the same divergence. Without these weights, or with others in their place, it has none, and goes on."""
    shutil.copytree(base.out, tmp_path / "base")
    ends = list[float | None]()
    for name in ("whole", "stopped", *([] if lora else ["others", "gone"])):  # adapters need these weights
        config = rewarded(base, folder, tmp_path / name, init_from=str(tmp_path / "base"), lora=lora, learning_rate=1e-2)
        config = replace(config, eval_every=6)
        if name != "whole":
            with open_run(replace(config, save_every=2)) as run:
                run.begin()
                run.advance(2)
        if name in ("others", "gone"):
            shutil.rmtree(tmp_path / "base")
        if name == "others":
            shutil.copytree(tmp_path / "whole", tmp_path / "base")
        train(replace(config, save_every=2))
        ends.append(records(config.out, ("validation",))[-1].get("kl"))
        assert all(map(torch.equal, tensors(tmp_path / "whole", 6).values(), tensors(config.out, 6).values()))
        assert ("no KL" in Path(config.out, "log.txt").read_text()) == (name in ("others", "gone"))
        if name == "others":
            shutil.rmtree(tmp_path / "base")
            shutil.copytree(base.out, tmp_path / "base")
    assert ends[0] == ends[1] and ends[0] and ends[0] > 0 and set(ends[2:]) <= {None}
