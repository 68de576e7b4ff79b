"""Plans for a GPU that is not there: the kernels ask for what is planned, and the records measured these bytes."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from handgrad.errors import UsageError
from handgrad.machine import gpus
from handgrad.machine.gpus import GPUS
from handgrad.ops import cuda, sizes
from handgrad.ops.cuda import attention
from handgrad.ops.cuda.launch import collecting
from handgrad.ops.sizes import cudnn_scratch_bytes
from handgrad.run.resolve import resolve
from handgrad.settings.config import RunConfig
from handgrad.settings.presets import preset
from handgrad.tools.forecast import resolve_for, sizes_on

RECORDS = Path(__file__).parents[1] / "benchmarks" / "results"
# Sizes of tensors by which each operation's sums are the largest of all.
SUMS = {
    "layernorm_backward": {"tokens": 1024, "channels": 64, "widest": 256},
    "bias_backward": {"tokens": 4096, "channels": 8, "widest": 256},
    "token_embedding_backward": {"tokens": 25600, "channels": 8, "widest": 8},
}


@pytest.mark.parametrize("operation", SUMS)
def test_the_kernels_ask_for_the_scratch_that_is_planned(operation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not a number less: their launches are noted, not made."""
    monkeypatch.setattr(sizes, "WORKSPACE_BYTES", 0)
    N, C, O = SUMS[operation].values()
    rows, row, tokens = torch.zeros(N, C), torch.zeros(C), torch.zeros(1, N, dtype=torch.int64)
    tensors = {
        "layernorm_backward": (rows, row, row, rows, rows, rows[:, 0], rows[:, 0], row, row),
        "bias_backward": (torch.zeros(O), torch.zeros(N, O)),
        "token_embedding_backward": (rows, rows, tokens, tokens[0]),
    }[operation]
    scratch = torch.zeros(sizes.scratch_bytes(**SUMS[operation]), dtype=torch.uint8)
    with collecting():
        getattr(cuda, operation)(*tensors, scratch=scratch)
        with pytest.raises(AssertionError, match=f"{len(scratch)} needed"):
            getattr(cuda, operation)(*tensors, scratch=scratch[:-4])


def test_the_sizes_need_neither_torch_nor_triton() -> None:
    code = "import sys, handgrad.ops.sizes; sys.exit(bool({'torch', 'triton'} & {*sys.modules}))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_cudnn_takes_the_heads_that_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "installed", lambda: True)
    for key in ("h100", "a100"):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda key=key: GPUS[key].capability)
        for width in range(8, 129, 4):
            for dtype in (torch.bfloat16, torch.float32):
                heads = {"batch": 2, "length": 128, "num_heads": 3, "head_width": width, "dtype": dtype}
                found = [sizes_on(GPUS[key], RunConfig(dropout=p)).attention_scratch_bytes(**heads) for p in (0.0, 0.1)]
                took = found[0] != found[1]
                assert took is attention.cudnn_runs(dtype, width), (key, width, dtype)
                apart = sizes_on(GPUS[key], RunConfig()).attention_scratch_bytes(**heads, documents=True)
                assert apart == cuda.attention_scratch_bytes(**heads, documents=True) == found[1]


def test_cudnns_workspace_is_the_one_that_was_seen() -> None:
    seen = json.loads((RECORDS / "h200-kernel-choices.json").read_text())["cudnn_deterministic_workspace_bytes"]
    assert seen == {
        "B64_H12_T1024_D64": cudnn_scratch_bytes(batch=64, num_heads=12, length=1024, head_width=64),
        "B16_H25_T1024_D64": cudnn_scratch_bytes(batch=16, num_heads=25, length=1024, head_width=64),
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
