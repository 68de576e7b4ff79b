"""Networks of which the loss head alone has forms in fp8: Gemma 3, whose heads are too wide, and OLMo, without norms before
its halves."""

import math
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from handgrad.api.model import load
from handgrad.cli import main
from handgrad.errors import UsageError
from handgrad.networks.fp8 import HEAD_GEMMS
from handgrad.run.open import train
from handgrad.run.resolve import resolve
from handgrad.settings.config import RunConfig, check
from tests.test_runs import records, same_bits

SETTINGS = {
    "gemma3": "kv_heads=1,head_width=10,feed_forward=44,window=9,full_every=2",
    "olmo": "kv_heads=1,feed_forward=44,window=9,full_every=2",
}


@pytest.fixture(params=SETTINGS)
def run(request: pytest.FixtureRequest, config: RunConfig) -> RunConfig:
    sizes = {"architecture": request.param, request.param: SETTINGS[request.param], "channels": 32}
    return check(replace(config, **sizes, precision="fp8", recompute=1))


def test_a_step_has_one_quantised_part(run: RunConfig) -> None:
    """The last norm, the logits' gradient and the head's weight; the blocks stay as in bf16."""
    design = resolve(run, 300)
    assert design.fp8 is not None and not design.fp8.gemms.blocks and design.fp8.gemms.head == {*HEAD_GEMMS}
    weight = "wte" if run.architecture == "gemma3" else "head"
    assert [row.name for row in design.fp8.table] == ["lnf", weight]
    names = {buffer.name for buffer in design.plan.buffers if buffer.name.endswith((".rows", ".columns"))}
    assert names == {f"{name}.{form}" for name in ("lnf", "logits", weight) for form in ("rows", "columns")}


@pytest.mark.nightly(but=["gemma3"])
def test_it_learns_and_resumes_bit_by_bit(run: RunConfig, tmp_path: Path) -> None:
    """Near bf16's losses, and not theirs."""
    whole = replace(run, out=str(tmp_path / "whole"))
    train(whole)
    train(replace(run, precision="bf16", out=str(tmp_path / "bf16")))
    losses, others = ([record["loss"] for record in records(tmp_path / name, ("step",))] for name in ("whole", "bf16"))
    assert losses[-1] < losses[0] - 0.5 and losses != others
    assert max(map(abs, map(float.__sub__, losses, others))) < 0.02
    again = replace(whole, out=str(tmp_path / "again"))
    shutil.copytree(whole.out, again.out)
    shutil.rmtree(tmp_path / "again" / "checkpoints" / "step_00000012")
    train(again)  # goes on from step 8
    same_bits(whole.out, again.out, 12)
    log = (tmp_path / "again" / "log.txt").read_text()
    assert re.search(r"fp8 .*\bhead\b", log), log
    assert math.isfinite(float(load(whole.out, device="cpu").logits([[1, 2, 3]])[0].sum()))


@pytest.mark.nightly(but=["olmo"])
def test_it_is_evaluated_in_fp8(run: RunConfig, capsys: pytest.CaptureFixture) -> None:
    """Near bf16's loss, and not it."""
    train(run)
    losses = []
    for precision in ("fp8", "bf16"):
        capsys.readouterr()
        assert main(["evaluate", run.out, "--precision", precision, "--device", "cpu"]) == 0
        found = re.search(r"loss +(\d\.\d+)", capsys.readouterr().out)
        assert found
        losses.append(float(found[1]))
    assert losses[0] != losses[1] and abs(losses[0] - losses[1]) < 0.02


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"fp8_head": "none"}, "has forms in fp8 of the loss head alone, found fp8_head none; --precision bf16"),
        ({"lora": "rank=2", "init_from": "x"}, "of the loss head alone, found fp8_head none beside lora; --precision bf16"),
        ({"fp8_keep_bf16": "mlp"}, "fp8_keep_bf16 takes"),
    ],
)
def test_nothing_in_fp8_is_refused(run: RunConfig, settings: dict, told: str) -> None:
    with pytest.raises(UsageError, match=told):
        resolve(check(replace(run, **settings)), 300)
