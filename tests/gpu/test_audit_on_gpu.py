"""Audited runs on a GPU: the digest among captured graphs, and replays of them."""

import dataclasses
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

from handgrad.cli import main
from handgrad.joins.audit.chain import content_of, links, read_chain
from handgrad.run.open import train
from handgrad.settings.config import RunConfig
from handgrad.storage.run_files import AUDIT_FILE
from tests.test_runs import elsewhere

SIZES = {"channels": 256, "num_heads": 4, "save_every": 4, "keep_checkpoints": 0, "sample_tokens": 0, "audit_every": 1}
KINDS = {
    "bf16": {"precision": "bf16"},
    "no masters": {"precision": "bf16", "master_weights": False},
    "fp8": {"precision": "fp8"},
    "dropout": {"precision": "bf16", "dropout": 0.1},
    "muon": {"precision": "bf16", "optimizer": "muon"},
    "modern": {"precision": "bf16", "architecture": "modern", "optimizer": "muon"},
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_replay_repeats_every_link(kind: str, config: RunConfig, capsys: pytest.CaptureFixture[str]) -> None:
    """From step 0, and from a checkpoint: there a step is launched eagerly that was replayed from a graph in the run."""
    audited = dataclasses.replace(config, device="cuda", **SIZES, **KINDS[kind])
    train(audited)
    assert main(["verify", audited.out]) == 0
    assert "12 links and 3 checkpoints equal" in capsys.readouterr().out
    assert main(["verify", audited.out, "--from", "4", "--to", "7"]) == 0


def test_an_audit_changes_no_bit(config: RunConfig) -> None:
    audited = dataclasses.replace(config, device="cuda", precision="bf16", **SIZES)
    train(audited)
    plain = elsewhere(audited, "plain", audit_every=0)
    train(plain)
    names = [f"checkpoints/step_00000012/{name}.safetensors" for name in ("model", "optimizer")]
    assert [(Path(audited.out) / name).read_bytes() for name in names] == [
        (Path(plain.out) / name).read_bytes() for name in names
    ]


def test_links_of_every_third_step_have_the_same_digests(config: RunConfig) -> None:
    """Steps between them launch no digest."""
    audited = dataclasses.replace(config, device="cuda", precision="bf16", **SIZES)
    train(audited)
    seldom = elsewhere(audited, "seldom", audit_every=3)
    train(seldom)
    whole, some = (
        {link["step"]: content_of(link) for link in links(read_chain(Path(run.out) / AUDIT_FILE))}
        for run in (audited, seldom)
    )
    assert some == {step: whole[step] for step in (0, 3, 6, 9, 12)}


def test_a_replay_goes_on_to_a_checkpoint_behind_the_last_link(
    config: RunConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its tensors and the spike detector's windows are compared there."""
    audited = dataclasses.replace(config, device="cuda", precision="bf16", **SIZES | {"audit_every": 5})
    train(audited)
    capsys.readouterr()
    assert main(["verify", audited.out]) == 0
    assert "2 links and 3 checkpoints equal, bit by bit, of steps 0 to 12 (" in capsys.readouterr().out
