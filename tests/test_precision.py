"""precision auto: the choice by device, its reason in the header, and a run that goes on as it began."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import handgrad
from handgrad import load
from handgrad.errors import UsageError
from handgrad.machine import devices, processor
from handgrad.run.folder import inherited_settings
from handgrad.run.open import train
from handgrad.run.resolve import resolve, with_precision
from handgrad.settings.config import RunConfig
from handgrad.settings.presets import PRESETS
from handgrad.storage.checkpoint import peek_config
from tests.test_runs import records

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def capability(monkeypatch: pytest.MonkeyPatch) -> dict[str, tuple[int, int]]:
    """Of a GPU that this machine need not have."""
    found = {"is": (9, 0)}
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: found["is"])
    return found


def test_the_choice_by_device(capability: dict[str, tuple[int, int]]) -> None:
    assert devices.resolve_precision("auto", CPU) == "fp32"
    chosen = {}
    for number in ((9, 0), (8, 0), (7, 5), (7, 0)):
        capability["is"] = number
        chosen[number] = devices.resolve_precision("auto", CUDA)
    assert chosen == {(9, 0): "bf16", (8, 0): "bf16", (7, 5): "fp16", (7, 0): "fp16"}
    assert devices.resolve_precision("tf32", CUDA) == "tf32", "a name stays"


@pytest.fixture
def flags(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Those of the CPU; a test changes them."""
    found = {"flags": "fma avx512f"}
    monkeypatch.setattr(processor, "value", lambda file, key: found.get(key, ""))
    return found


def test_the_note_says_what_auto_would_take(capability: dict[str, tuple[int, int]], flags: dict[str, str]) -> None:
    assert devices.precision_note(CPU, "fp32") == "(auto, on a CPU)"
    for flag in ("avx512_bf16", "amx_bf16"):
        flags["flags"] = f"fma {flag}"
        note = "(auto, on a CPU that multiplies bf16 as well: `handgrad doctor` times both)"
        assert devices.precision_note(CPU, "fp32") == note
    assert devices.precision_note(CUDA, "bf16") == "(auto, which this GPU computes in)"
    assert devices.precision_note(CUDA, "fp32") == "(auto would take bf16, which this GPU computes in)"
    assert devices.precision_note(CPU, "fp16") == "(auto would take fp32, on a CPU; fp16 is slow on a CPU)"
    capability["is"] = (7, 5)
    assert devices.precision_note(CUDA, "fp16") == "(auto, as this GPU has no bf16)"


def test_auto_is_the_default_of_every_run(config: RunConfig) -> None:
    """And what a run recorded is the precision that it had, in its folder, its checkpoints and its loaded model."""
    assert {preset().precision for preset in PRESETS.values()} == {"auto"} == {config.precision}
    train(config)
    folder = Path(config.out)
    assert 'precision = "fp32"' in (folder / "config.toml").read_text()
    assert (peek_config(folder) or {})["precision"] == "fp32"
    assert "numbers    fp32 (auto, on a CPU" in (folder / "log.txt").read_text()
    assert load(folder, device="cpu").dtype == torch.float32
    assert resolve(config, 300).dtype == torch.float32


def test_a_run_goes_on_in_the_precision_that_it_began_with(
    config: RunConfig, capability: dict[str, tuple[int, int]]
) -> None:
    """Also on a device for which auto would choose another one; a precision that is named counts."""

    def precision_of(config: RunConfig, device: torch.device) -> str:
        return with_precision(dataclasses.replace(config, **inherited_settings(config)), device).precision

    begun = dataclasses.replace(config, precision="bf16")
    assert precision_of(config, CPU) == "fp32" and precision_of(config, CUDA) == "bf16", "no run yet"
    train(begun)
    assert precision_of(config, CPU) == "bf16"
    assert precision_of(dataclasses.replace(config, precision="fp32"), CPU) == "fp32"
    losses = (Path(config.out) / "metrics.jsonl").read_text()
    train(config)  # finished: the same run, not another configuration
    assert (Path(config.out) / "metrics.jsonl").read_text().startswith(losses)


def test_a_gpu_without_bf16_refuses_muon(capability: dict[str, tuple[int, int]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its polar factors are products of bf16; AdamW has none."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "Tesla T4")
    capability["is"] = (8, 0)
    devices.check_optimizer(CUDA, "muon")
    capability["is"] = (7, 5)
    devices.check_optimizer(CUDA, "adamw")
    devices.check_optimizer(CPU, "muon")
    with pytest.raises(UsageError, match=r"Tesla T4 has no bf16, in which optimizer muon .*; use --optimizer adamw"):
        devices.check_optimizer(CUDA, "muon")
    wanted = RunConfig(precision="fp16", optimizer="muon", micro_batch=1, tokens_per_step=1024, device="cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(UsageError, match="optimizer muon"):
        resolve(wanted, 300, device=CUDA)


@pytest.fixture
def switch() -> Iterator[None]:
    """torch's, back at its place after the test."""
    before = torch.backends.mkldnn.matmul.fp32_precision
    yield
    torch.set_float32_matmul_precision("highest")
    torch.backends.mkldnn.matmul.fp32_precision = before


@pytest.mark.usefixtures("switch")
def test_a_plan_leaves_torchs_switches_alone() -> None:
    """They hold for the whole process: a plan would change the arithmetic of the program that asks for it."""
    matmul = torch.backends.cuda.matmul
    names = ("allow_tf32", "allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction")

    def switches() -> list[object]:
        return [torch.get_float32_matmul_precision(), torch.backends.mkldnn.matmul.fp32_precision] + [
            getattr(matmul, name) for name in names
        ]

    torch.set_float32_matmul_precision("medium")
    before = switches()
    resolve(RunConfig(micro_batch=1, tokens_per_step=1024, device="cpu", precision="fp32"), 300)
    handgrad.plan("d12", gpu="h100", precision="tf32")
    assert switches() == before


@pytest.mark.usefixtures("switch")
def test_a_switch_of_torch_does_not_reach_a_cpu_run(config: RunConfig, tmp_path: Path) -> None:
    """Scripts set it for a model of their own; on a CPU that multiplies bf16 it rounds the inputs of GEMMs."""
    plain = dataclasses.replace(config, channels=256, steps=2, eval_every=0, save_every=0, sample_tokens=0)
    after = dataclasses.replace(plain, out=str(tmp_path / "after"))
    train(plain)
    torch.set_float32_matmul_precision("medium")
    train(after)
    assert records(plain.out) == records(after.out)
    assert torch.backends.mkldnn.matmul.fp32_precision == "ieee", "whatever this CPU multiplies"
    torch.set_float32_matmul_precision("medium")
    load(after.out, device="cpu").generate("a", max_tokens=1)
    assert torch.backends.mkldnn.matmul.fp32_precision == "ieee"
