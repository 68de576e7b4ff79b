"""`handgrad plan --fit`: the settings that make a run fit with the same bits, by the time that they cost."""

import dataclasses
import re
from pathlib import Path

import pytest
import torch

from benchmarks.llama_twin import sizes
from handgrad.cli import main
from handgrad.errors import DataError
from handgrad.machine.gpus import GPUS
from handgrad.run import resolve as resolving
from handgrad.run.checks import can_offload, check_fits
from handgrad.run.resolve import memory_bytes
from handgrad.settings.presets import preset
from handgrad.tools.forecast import bytes_of, forecast, resolve_for
from handgrad.tools.plan import candidates, fitted_to
from handgrad.tools.speeds import step_time

H200 = GPUS["h200"]
D48 = dataclasses.replace(preset("d48"), micro_batch=4, precision="bf16", lanes=1)


def test_every_level_with_and_without_offload_by_its_time() -> None:
    found = fitted_to(D48, H200, 50257, 1)
    assert {(c.config.recompute, c.config.offload) for c in found} == {(n, on) for n in range(4) for on in (False, True)}
    assert [c.seconds for c in found] == sorted(c.seconds for c in found)
    for candidate in found:
        design = resolve_for(H200, candidate.config, 50257)
        assert candidate.memory_bytes == sum(memory_bytes(design).values())
        assert candidate.seconds == step_time(H200, candidate.config, design).total
    assert found[0].flags == "--recompute 0"


def test_offload_costs_the_bytes_of_the_state_over_pcie() -> None:
    """The estimate: 12 bytes a parameter come and go at the same time, at the link's share."""
    kept, moved = (step_time(H200, c, resolve_for(H200, c, 50257)) for c in (D48, dataclasses.replace(D48, offload=True)))
    state = resolve_for(H200, dataclasses.replace(D48, offload=True), 50257).host_plan.total_bytes
    assert moved.total - kept.total == pytest.approx(state / (0.55 * 64e9))
    assert GPUS["4090"].host_gigabytes_per_second == 32 and GPUS["t4"].host_gigabytes_per_second == 16


def test_what_a_run_cannot_offload_is_not_tried() -> None:
    meta = torch.device("meta")
    assert can_offload(D48, meta, 1)
    assert not can_offload(D48, meta, 2) and not can_offload(D48, torch.device("cpu"), 1)
    assert not can_offload(dataclasses.replace(D48, optimizer="muon"), meta, 1)
    assert not can_offload(dataclasses.replace(D48, lora="rank=4"), meta, 1)
    found = candidates(D48, torch.device("cpu"), 1, lambda other: resolve_for(H200, other, 50257), None)
    assert [c.flags for c in found] == [f"--recompute {level}" for level in range(4)]


def test_the_flags_that_fit_are_printed_and_do(tmp_path: Path, monkeypatch, capsys) -> None:
    """They are the fastest that fit; taken, the same run fits as it is. Rounded moments are only named."""
    monkeypatch.chdir(tmp_path)
    for size in ("28GB", "24GB", "16GB", "12GB"):
        assert main(["plan", "d48", "--gpu", "h200", "--fit", size, "--micro-batch", "4"]) == 0
        text = capsys.readouterr().out
        flags = re.search(r"^take +(.*)$", text, re.M)[1].split()
        fitting = [line.split("  ")[1] for line in text.split("\n") if "  fits" in line and line.startswith("  --")]
        assert " ".join(flags) == fitting[0].strip()
        assert main(["plan", "d48", "--gpu", "h200", "--fit", size, "--micro-batch", "4", *flags]) == 0
        text = capsys.readouterr().out
        assert " ".join(flags) in re.search(r"^take +(.*)$", text, re.M)[1]
        settings = dict(zip((f.strip("-") for f in flags[::2]), flags[1::2], strict=True))
        config = dataclasses.replace(D48, recompute=int(settings["recompute"]), offload="offload" in settings)
        assert forecast(config, 50257, "h200", fit=bytes_of(size)).micro_batch == 4
        assert "--moments bf16 takes 5.8 GiB less" in text and "--moments" not in " ".join(flags)


def test_a_run_that_fits_stays_as_it_was_asked_for(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["plan", "d12", "--gpu", "h200", "--fit", "40GB", "--recompute", "2"]) == 0
    text = capsys.readouterr().out
    assert "take       --recompute 0\n" in text and "10.4 GiB" in text.split("\nGPU ")[1]


def test_adapters_fit_by_recompute_alone(tmp_path: Path, monkeypatch, capsys) -> None:
    """Of Llama 3.2 1B, in bf16 and, in less, beside weights in fp8. Their state stays on the device: it is small."""
    monkeypatch.chdir(tmp_path)
    config = {**sizes("Llama-3.2-1B"), "sequence-length": 2048, "micro-batch": 4, "tokens-per-step": 65536}
    config |= {"vocab-size": 128256, "lora": "rank=16", "init-from": "x", "gpu": "4090", "fit": "8GB"}
    flags = [part for name, value in config.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    totals = []
    for precision in ("bf16", "fp8"):
        assert main(["plan", *flags, "--precision", precision]) == 0
        text = capsys.readouterr().out
        assert "take       --recompute 1\n" in text and "--offload" not in text
        totals.append([float(level) for level in re.findall(r"([\d.]+) GiB", re.search(r"^  total.*$", text, re.M)[0])])
    assert all(fp8 < bf16 - 0.5 for bf16, fp8 in zip(*totals, strict=True))


def test_a_design_is_resolved_once(tmp_path: Path, monkeypatch, capsys) -> None:
    """The table of memory, the largest micro-batches and the settings that fit share the designs."""
    monkeypatch.chdir(tmp_path)
    asked, rows = [], resolving.activation_rows
    monkeypatch.setattr(resolving, "activation_rows", lambda *these: asked.append((these[0], these[4])) or rows(*these))
    assert main(["plan", "d12", "--fit", "24GB", "--device", "cpu", "--precision", "fp32"]) == 0
    assert "\nsame bits  within 22.4 GiB" in capsys.readouterr().out
    assert len(asked) == len(set(asked)) > 20


def test_nothing_fits(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["plan", "d48", "--gpu", "h200", "--fit", "1GB"]) == 64
    assert "try --recompute 3, --offload true, a smaller model" in capsys.readouterr().err
    assert main(["plan", "d48", "--gpu", "h200", "--gpus", "2", "--fit", "1GB"]) == 64
    assert "try --recompute 3, a smaller model" in capsys.readouterr().err, "ranks are refused offload"
    assert main(["plan", "tiny", "--fit", "1MB", "--device", "cpu", "--precision", "fp32"]) == 0
    assert "take       none of these; " in capsys.readouterr().out


def test_a_machine_without_the_memory_of_the_host_is_refused(monkeypatch) -> None:
    from handgrad.run import checks

    design = resolve_for(H200, dataclasses.replace(D48, offload=True), 50257)
    monkeypatch.setattr(checks, "training_batches", lambda *_: type("Batches", (), {"samples_per_epoch": 1 << 20}))
    monkeypatch.setattr(checks, "validation_batches", lambda *_, **__: None)
    monkeypatch.setattr(checks.devices, "available_bytes", lambda device: 10**9 if device.type == "cpu" else None)
    sizes = type(design.plain_ops)
    monkeypatch.setattr(sizes, "check_sizes", lambda *_, **__: None, raising=False)
    with pytest.raises(DataError, match=r"offload needs 17.4 GiB of host memory, 953.7 MiB are free; --offload false"):
        check_fits(dataclasses.replace(D48, offload=True), design, None)  # type: ignore[arg-type]
