"""Plans for a GPU that is not there: the sizes are the kernels' own, the bytes those that the records measured."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import handgrad.fp8.cuda as fp8
from handgrad import gpus
from handgrad.config import RunConfig
from handgrad.dropout import cuda as dropout
from handgrad.errors import UsageError
from handgrad.gpus import GPUS
from handgrad.ops import cuda
from handgrad.ops.cuda import attention_cudnn
from handgrad.presets import preset
from handgrad.run.resolve import resolve
from handgrad.tools.absent import Sizes, choosing_scratch_bytes, cudnn_scratch_bytes, resolve_for, sizes_on

RECORDS = Path(__file__).parents[1] / "benchmarks" / "results"
SHAPES = [  # batch, length, heads, head width, feed-forward over channels, vocabulary
    (64, 1024, 12, 64, 4, 50304),
    (16, 1024, 25, 64, 4, 50304),
    (1, 64, 4, 16, 4, 384),
    (3, 80, 2, 8, 4, 256),
    (4, 2048, 16, 128, 4, 50304),
    (7, 96, 20, 112, 4, 512),
    (1, 64, 64, 128, 4, 512),  # so wide that a layer norm's sums are the largest
    (512, 1024, 12, 64, 4, 512),  # so many tokens that the embedding's are
]


@pytest.mark.parametrize(("batch", "length", "heads", "width", "ratio", "vocabulary"), SHAPES)
def test_the_sizes_are_those_of_the_kernels(
    batch: int, length: int, heads: int, width: int, ratio: int, vocabulary: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_cudnn, "runs", lambda dtype, head_width: False)
    here, channels = Sizes(cudnn=False), heads * width
    sizes = {"tokens": batch * length, "channels": channels, "widest": ratio * channels}
    assert here.scratch_bytes(**sizes) == cuda.scratch_bytes(**sizes)
    heads_of = {"batch": batch, "length": length, "num_heads": heads, "head_width": width}
    found = here.attention_scratch_bytes(**heads_of, dtype=torch.bfloat16)
    assert found == cuda.attention_scratch_bytes(**heads_of, dtype=torch.bfloat16)
    assert found == dropout.attention_scratch_bytes(**heads_of, dtype=torch.bfloat16)
    for widest in (ratio * channels, 2 * ratio * channels):  # without gates, and with them
        parts = heads_of | {"channels": channels, "feed_forward": ratio * channels, "widest": widest}
        parts |= {"padded_vocab_size": vocabulary}
        assert here.statistics_parts(**parts) == fp8.statistics_parts(**parts)
    for matrix in ({"rows": channels, "columns": ratio * channels}, {"rows": 3 * channels, "columns": channels}):
        for matrices in (1, 12):
            found = here.muon_scratch_bytes(matrices=matrices, **matrix)
            assert found == cuda.muon_scratch_bytes(matrices=matrices, **matrix)
    choosing = {"batch": batch, "vocab_size": vocabulary - 1}
    assert choosing_scratch_bytes(**choosing) == cuda.decode.choosing_scratch_bytes(**choosing)


def test_cudnn_takes_the_heads_that_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_cudnn, "installed", lambda: True)
    for key in ("h100", "a100"):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda key=key: GPUS[key].capability)
        for width in range(8, 129, 4):
            for dtype in (torch.bfloat16, torch.float32):
                heads = {"batch": 2, "length": 128, "num_heads": 3, "head_width": width, "dtype": dtype}
                found = [sizes_on(GPUS[key], RunConfig(dropout=p)).attention_scratch_bytes(**heads) for p in (0.0, 0.1)]
                took = found[0] != found[1]
                assert took is attention_cudnn.runs(dtype, width), (key, width, dtype)
                apart = sizes_on(GPUS[key], RunConfig()).attention_scratch_bytes(**heads, documents=True)
                assert apart == cuda.attention_scratch_bytes(**heads, documents=True) == found[1]


def test_cudnns_workspace_is_the_one_that_was_seen() -> None:
    seen = json.loads((RECORDS / "h200-kernel-choices.json").read_text())["cudnn_deterministic_workspace_bytes"]
    assert seen == {
        "B64_H12_T1024_D64": cudnn_scratch_bytes(64 * 12 * 1024, 64),
        "B16_H25_T1024_D64": cudnn_scratch_bytes(16 * 25 * 1024, 64),
    }


MUON = {"optimizer": "muon", "channels": 64, "num_heads": 2}
MEASURED = [  # record, contender, preset, the head's GEMMs in fp8
    ("h200-step-124m", "handgrad", "d12", "none"),
    ("h200-step-350m", "handgrad", "d24", "none"),
    ("h200-step-774m", "handgrad", "d36", "none"),
    ("h200-step-1558m", "handgrad", "d48", "none"),
    ("h200-step-124m", "handgrad-fp8", "d12", "none"),
    ("h200-step-350m", "handgrad-fp8", "d24", "none"),
    ("h200-fp8-step-774m", "handgrad-fp8", "d36", "none"),
    ("h200-fp8-step-1558m", "handgrad-fp8", "d48", "none"),
    ("h200-fp8-head-step-124m", "handgrad-fp8", "d12", "auto"),
    ("h200-fp8-head-step-350m", "handgrad-fp8", "d24", "auto"),
    ("h200-fp8-head-step-774m", "handgrad-fp8", "d36", "auto"),
    ("h200-fp8-head-step-1558m", "handgrad-fp8", "d48", "auto"),
]


@pytest.mark.parametrize(("record", "contender", "name", "head"), MEASURED)
def test_the_plan_is_the_peak_that_was_measured(record: str, contender: str, name: str, head: str) -> None:
    """Of an H200, planned without one: within a thousandth below torch's peak."""
    found = json.loads((RECORDS / f"{record}.json").read_text())
    config = replace(preset(name), precision="fp8" if "fp8" in contender else "bf16", fp8_head=head)
    assert config.micro_batch == found["settings"]["micro_batch"]
    planned = resolve_for(GPUS["h200"], config, 50257).plan.total_bytes / 2**30
    assert found["figures"][contender]["allocated_gib"] == pytest.approx(planned, rel=1e-3)


@pytest.mark.parametrize(("record", "name"), [("h200-x4-scaling-124m", "d12"), ("h200-x4-scaling-1558m", "d48")])
def test_the_plan_of_a_rank_is_the_peak_that_was_measured(record: str, name: str) -> None:
    """To half a percent: at 1558M the plan of a rank has grown by a fifth of one since."""
    rows = json.loads((RECORDS / f"{record}.json").read_text())["rows"]
    measured = next(row["allocated_gib"] for row in rows if row["contender"] == "together")
    config = replace(preset(name), precision="bf16", lanes=4, tokens_per_step=1 << 19)
    planned = resolve_for(GPUS["h200"], config, 50257, ranks=4).plan.total_bytes / 2**30
    assert measured == pytest.approx(planned, rel=5e-3)


@pytest.mark.parametrize(
    "settings", [{}, {"precision": "fp8"}, {"dropout": 0.1, "recompute": 1}, {"precision": "fp16"}, MUON]
)
def test_the_plan_is_that_of_the_kernels(settings: dict) -> None:
    """Buffer for buffer, as the modules of the kernels size it."""
    config = replace(preset("tiny"), **{"precision": "bf16", **settings})
    by_kernels = resolve(config, 257, device=torch.device("meta"), ops=cuda).plan
    assert resolve_for(GPUS["a100"], config, 257).plan == by_kernels


def test_the_precision_of_a_gpu() -> None:
    assert gpus.auto_precision(GPUS["t4"].capability) == "fp16" and gpus.auto_precision((8, 0)) == "bf16"
    for key, fine in (("t4", False), ("a100", False), ("l40s", True), ("h100", True), ("b200", False)):
        try:
            gpus.check_precision(key, GPUS[key].capability, "fp8")
        except UsageError as error:
            assert not fine and key in str(error)
        else:
            assert fine
