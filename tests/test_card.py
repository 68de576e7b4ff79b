"""`handgrad bench card`: the file that it writes, what it says where it cannot measure, and the page of those sent in."""

import functools
import json
import math
import platform
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks import cards
from handgrad.cli import main
from handgrad.errors import DataError
from handgrad.machine import devices, gpus, power
from handgrad.settings.presets import tiny
from handgrad.tools import card
from tests.figures import exists, has_history

CPU, VOCABULARY = torch.device("cpu"), 257


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four small models, and a machine whose speed nobody measures."""
    monkeypatch.setattr(card, "SHAPES", {title: (replace(tiny(), num_layers=1), VOCABULARY) for title in card.SHAPES})
    monkeypatch.setattr(card, "TIMED_SECONDS", 1e-9)
    monkeypatch.setattr(card, "copy_bandwidth", lambda device: 3e10)
    monkeypatch.setattr(card, "gemm_flops", lambda device, dtype: 2e11)
    monkeypatch.setattr(card, "commit", lambda: "0123456789ab")


def measured(seconds: float = 1e9) -> dict:
    *_, made = card.measure_card(CPU, seconds)
    return json.loads(json.dumps(made))


def test_the_command_writes_a_card(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "mine.json"
    assert main(["bench", "card", "--device", "cpu", "--out", str(out)]) == 0
    said, made = capsys.readouterr().out, cards.read(out)
    assert f"written    {out}" in said and "30 GB/s, a large GEMM at 0.2 TFLOP/s in fp32, 0.2 TFLOP/s in bf16" in said
    assert list(made["steps"]) == list(card.SHAPES)
    for title, precisions in made["steps"].items():
        assert list(precisions) == ["fp32", "bf16"]
        for precision, cell in precisions.items():
            least, most = cell["tokens_per_second_range"]
            assert 0 < least <= cell["tokens_per_second"] <= most and cell["steps"] == card.FEWEST_STEPS
            assert (cell["micro_batch"], cell["sequence_length"]) == (4, 64) and cell["planned_bytes"] > 0
            assert abs(cell["losses"][0] - math.log(VOCABULARY)) < 0.5, "of weights that have not learned yet"
            assert re.search(rf"{title} +{precision} +4 x 64 .* MiB", said)
    assert platform.node() not in out.read_text()


@pytest.mark.parametrize("seconds", [1e-9, 1e9])
def test_shapes_that_would_end_too_late_are_not_measured(seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first is measured in any case: its time is known then."""
    monkeypatch.setattr(card, "measure_steps", lambda *arguments: {"tokens_per_second": 1.0, "missing": "none"})
    cells = [cell["missing"] for cells in measured(seconds)["steps"].values() for cell in cells.values()]
    assert set(cells) == ({card.NO_TIME} if seconds < 1 else {"none"})


def test_a_shape_that_does_not_fit_says_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "available_bytes", lambda device: int(card.DRIVER_BYTES) + 1000)
    cell = measured()["steps"]["GPT-2 124M"]["fp32"]
    assert cell["missing"] == card.NO_FIT and cell["planned_bytes"] > 1000 == cell["free_bytes"] - int(card.DRIVER_BYTES)


def test_the_micro_batch_is_the_largest_that_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    needs = {n: card.memory_bytes(card.resolve(replace(tiny(), micro_batch=n, precision="fp32"), 257)) for n in (1, 2, 4)}
    free = int(card.DRIVER_BYTES) + sum(needs[4].values()) - 1
    monkeypatch.setattr(card, "SHAPES", {"GPT-2 124M": (tiny(), VOCABULARY)})
    monkeypatch.setattr(card, "timed_steps", lambda config, *_: {"micro_batch": config.micro_batch, "missing": "none"})
    monkeypatch.setattr(devices, "available_bytes", lambda device: free)
    assert measured()["steps"]["GPT-2 124M"]["fp32"]["micro_batch"] == 2


def test_a_failure_of_one_shape_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(config: card.RunConfig, *arguments: object) -> dict:
        if config.precision == "bf16":
            raise Exception("PassManager::run\n failed")  # Triton's are no RuntimeErrors
        return timed(config, *arguments)

    timed = card.timed_steps
    monkeypatch.setattr(card, "timed_steps", fails)
    for cell in measured()["steps"].values():
        assert "tokens_per_second" in cell["fp32"]
        assert cell["bf16"] == {"missing": card.REFUSED, "error": "PassManager::run failed"}


@pytest.mark.parametrize(
    ("capability", "precisions"),
    [((7, 5), ("fp16", "fp32")), ((8, 9), ("bf16", "fp8", "tf32")), ((12, 0), ("bf16", "fp8", "tf32"))],
)
def test_precisions_of_a_gpu(capability: tuple[int, int], precisions: tuple[str, ...]) -> None:
    assert card.PRECISIONS[gpus.auto_precision(capability)] == precisions
    for precision in precisions:
        gpus.check_precision("a GPU", capability, precision)


def test_a_gpu_tells_its_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = SimpleNamespace(nvmlSystemGetDriverVersion=lambda: "570.86", NVML_CLOCK_SM=1, NVML_CLOCK_MEM=2)
    nvml.NVMLError = RuntimeError
    nvml.nvmlDeviceGetEnforcedPowerLimit = lambda handle: 450_000
    nvml.nvmlDeviceGetMaxClockInfo = lambda handle, clock: {1: 3105, 2: 10501}[clock]
    monkeypatch.setattr(power, "sensors", lambda device: power.Sensors(nvml, None))
    monkeypatch.setattr(devices, "describe", lambda device: "cuda: NVIDIA GeForce RTX 4090, 25 GB")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    facts = card.facts_of(torch.device("cuda"))
    assert facts.pop("host")
    assert facts == {
        "device": "NVIDIA GeForce RTX 4090",
        "size": "25 GB",
        "capability": "8.9",
        "driver": "570.86",
        "power_limit_watts": 450.0,
        "most_sm_megahertz": 3105,
        "most_memory_megahertz": 10501,
    }


@functools.cache
def usual() -> dict:
    return measured()


def written(path: Path, **changes: object) -> Path:
    content = {**usual(), **changes}
    del content["sha256"]
    path.write_text(json.dumps({**content, "sha256": cards.sha256(content)}, indent=1))
    return path


def test_an_edited_card_is_found(tmp_path: Path) -> None:
    path = written(tmp_path / "card.json")
    text = path.read_text()
    assert cards.read(path)["copy_bytes_per_second"] == 30000000000
    path.write_text(text.replace('"copy_bytes_per_second": 3', '"copy_bytes_per_second": 4'))
    with pytest.raises(DataError, match=r"card\.json was edited"):
        cards.read(path)
    with pytest.raises(DataError, match="a checkout with changes, on 0123456789ab\\+"):
        cards.read(written(path, commit="0123456789ab+"))
    with pytest.raises(DataError, match="has format 0, expected 1"):
        cards.read(written(path, format=0))


def test_the_table_of_cards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fast card with fp8, and a slow one that cannot run it; the fast one first, whatever its name."""
    monkeypatch.setattr(cards, "FOLDER", tmp_path)
    assert cards.cards() == {} and cards.NONE in cards.drawn(cards.PAGE.read_text())
    usual = {"tokens_per_second": 593020.4}
    titles = list(card.SHAPES)
    fast = {title: {"bf16": usual, "fp8": {"tokens_per_second": 9.5}} for title in titles}
    refused = {"missing": card.REFUSED, "error": "no fp8"}
    slow = {title: {"bf16": {"missing": card.NO_FIT}, "fp8": refused} for title in titles}
    machine = {"device": "NVIDIA  X | Y", "power_limit_watts": 450.0}
    written(tmp_path / "b.json", steps=fast, machine=machine, gemm_flops={"bf16": 1.234e14}, copy_bytes_per_second=2.9e12)
    written(tmp_path / "a.json", steps=slow, machine={"device": "Z"}, gemm_flops={"bf16": 6e12}, copy_bytes_per_second=9e10)
    assert cards.lines()[2:] == [
        "| [NVIDIA X / Y](../benchmarks/cards/b.json), 450 W, copies 2.90 TB/s | bf16 |" + " 593.0k |" * 4 + " 123 |",
        "|  | fp8 |" + " 10 |" * 4 + "  |",
        "| [Z](../benchmarks/cards/a.json), copies 90 GB/s | bf16 |" + " does not fit |" * 4 + " 6 |",
    ]
    assert cards.drawn(cards.drawn(cards.PAGE.read_text())).count("NVIDIA X / Y") == 1


def test_the_page_is_drawn_from_the_files() -> None:
    """Each with its own hash, of a release or of a commit of this history."""
    page = cards.PAGE.read_text()
    assert cards.drawn(page) == page, "python -m benchmarks.cards draws it anew"
    for name, made in cards.cards().items():
        assert re.fullmatch(r"[0-9a-f]{12}|", made["commit"]), name
        assert not has_history() or not made["commit"] or exists(made["commit"]), f"{name}: {made['commit']}"
