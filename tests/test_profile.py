"""handgrad profile: what is counted, whose a kernel's time is, what Nsight Compute's CSV says, and the whole command."""

import contextlib
import dataclasses
import functools
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from benchmarks.nsight import METRICS, parse, table
from handgrad import ops
from handgrad.cli import main
from handgrad.errors import UsageError
from handgrad.joins import fp8
from handgrad.joins.fp8 import reference as fp8_reference
from handgrad.joins.fp8.formats import E4M3
from handgrad.ops import reference
from handgrad.ops.reference.attention import Mask
from handgrad.run.open import train
from handgrad.run.resolve import resolve
from handgrad.settings.config import RunConfig
from handgrad.settings.presets import tiny
from handgrad.tools.profile import MadeUpTokens, rate_text
from handgrad.tools.recorder import (
    COPIES,
    OPERATIONS,
    OTHER,
    PARTS,
    Recorder,
    Spent,
    innermost,
    ranges_of,
    size_bytes,
    spent_on_cpu,
    spent_on_gpu,
)
from tests.documents import document_starts, visible

TINY = [
    *("profile", "tiny", "--device", "cpu", "--num-layers", "2", "--num-heads", "2", "--channels", "32"),
    *("--sequence-length", "16", "--tokens-per-step", "64", "--micro-batch", "2", "--profile-steps", "2"),
]
N, I, O = 24, 16, 40
KINDS = {*(entry.kind for entry in OPERATIONS.values()), COPIES}


@contextlib.contextmanager
def recorded(head: torch.Tensor | None = None, backend: ModuleType = reference) -> Iterator[Recorder]:
    design = dataclasses.replace(resolve(tiny(), 257, device=torch.device("cpu"), ops=reference), ops=backend)
    made = Recorder(design, torch.empty(1) if head is None else head, lambda name: contextlib.nullcontext())
    made.counting = True
    with made.recording():
        yield made


def linear_tensors() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.randn(N, O), torch.randn(N, I), torch.randn(O, I)


def test_a_product_counts_two_flops_per_multiplication() -> None:
    out, inp, weight = linear_tensors()
    with recorded() as made:
        reference.linear_forward(out, inp, weight, None)
        assert made.counted == {"block products, forward": 2 * N * I * O}
        reference.linear_backward(torch.empty(N, I), torch.zeros(O, I), None, out, inp, weight)
        assert made.counted["block products, dgrad and wgrad"] == 2 * (2 * N * I * O)
        reference.linear_backward(torch.empty(N, I), None, None, out, inp, weight)
        assert made.counted["block products, dgrad and wgrad"] == 3 * (2 * N * I * O), "a frozen weight has no gradient"
        assert made.in_flops == set(made.counted)
        made.counting = False
        reference.linear_forward(out, inp, weight, None)
    reference.linear_forward(out, inp, weight, None)
    assert made.counted["block products, forward"] == 2 * N * I * O


def test_the_head_is_known_by_its_weight() -> None:
    out, inp, weight = linear_tensors()
    with recorded(weight) as made:
        reference.linear_forward(out, inp, weight, None)
        reference.linear_forward(out, inp, weight.clone(), None)
    assert made.counted == {f"{place} products, forward": 2 * N * I * O for place in ("head", "block")}


LINEAR = """
def multiply(d, a, b, *, transpose_a=False, transpose_b=False):
    pass

def bias_backward(dbias_acc, dout):
    pass

def linear_backward(dinp, dweight_acc, dbias_acc, dout, inp, weight):
    multiply(dinp, weight, dout)
    if inp.itemsize == 1:  # both operands transposed, as fp8 products want them
        multiply(dweight_acc, inp.t(), dout.t(), transpose_a=True)
    else:
        multiply(dweight_acc, inp, dout, transpose_b=True)
    bias_backward(dbias_acc, dout)
"""


def test_the_parts_of_a_product_take_its_place() -> None:
    """A backend that tells its products apart, as the kernels do: each has its role, and nothing is counted twice."""
    backend = ModuleType("some.linear")
    exec(LINEAR, vars(backend))
    out, inp, weight = linear_tensors()
    roles = {f"head products, {role}": 2 * N * I * O for role in ("dgrad", "wgrad")}
    for kind in (torch.float32, E4M3):
        with recorded(weight, backend) as made:
            sums = torch.zeros(O, I), torch.zeros(O)
            backend.linear_backward(torch.empty(N, I), *sums, out.to(kind), inp.to(kind), weight)
        assert made.counted == {**roles, "bias sums": kind.itemsize * N * O + 4 * 2 * O}
    with recorded() as made:
        reference.linear_backward(torch.empty(N, I), torch.zeros(O, I), torch.zeros(O), out, inp, weight)
    assert list(made.counted) == ["bias sums", "block products, dgrad and wgrad"]


def test_bound_and_decorated_operations_are_found() -> None:
    backend = ModuleType("bound")
    linear_forward = functools.partial(reference.linear_forward, scratch=None)
    vars(backend).update(linear_forward=linear_forward, classifier_forward=fp8_reference.classifier_forward)
    out, inp, weight = linear_tensors()
    with recorded(backend=backend) as made:
        backend.linear_forward(out, inp, weight, None)
        backend.classifier_forward(torch.empty(N), out, torch.zeros(N, dtype=torch.int64), vocab_size=O)
    assert list(made.counted) == ["block products, forward", "classifier"]


def test_attention_counts_the_keys_that_a_query_may_see() -> None:
    B, H, T, D = 2, 3, 5, 4
    out, lse, qkv = torch.empty(B * T, H * D), torch.empty(B, H, T), torch.randn(B * T, 3 * H * D)
    pairs = B * H * sum(range(1, T + 1))
    with recorded() as made:
        reference.attention_forward(out, lse, qkv)
        reference.attention_backward(torch.empty_like(qkv), torch.randn_like(out), out, lse, qkv)
    assert made.counted == {"attention forward": 2 * 2 * pairs * D, "attention backward": 5 * 2 * pairs * D}
    starts = document_starts([[3, 2], [1, 4]])
    pairs = H * int(visible(starts).sum())
    with recorded() as made:
        reference.attention_forward(out, lse, qkv, mask=Mask(starts))
        inputs = torch.empty_like(qkv), torch.randn_like(out), out, lse, qkv
        reference.attention_backward(*inputs, mask=Mask(starts))
    assert made.counted == {"attention forward": 2 * 2 * pairs * D, "attention backward": 5 * 2 * pairs * D}


def test_bytes_are_read_once_written_once_and_twice_in_place() -> None:
    a, b = torch.zeros(8, 4, dtype=torch.bfloat16), torch.zeros(4)
    scratch = torch.zeros(1000, dtype=torch.uint8)
    assert size_bytes({"out": a, "inp": a.clone(), "bias": b, "scratch": scratch, "vocab_size": 9}) == 64 + 64 + 16
    assert size_bytes({"dbias_acc": b, "dout": a}) == 2 * 16 + 64
    assert size_bytes({"dhidden_inout": a, "inp": a.clone()}) == 2 * 64 + 64
    assert size_bytes({"published": b, "weight_inout": b, "gradient_inout": b.clone()}) == 16 + 16
    assert size_bytes({"out": a[0], "pieces": a, "rounded": True}) == 8 + 64, "a row of the pieces, written"
    tokens, wte, wpe = torch.tensor([[3, 3], [1, 3]]), torch.zeros(50, 4), torch.zeros(9, 4)
    assert size_bytes({"qkv_inout": torch.zeros(5, 6), "rstd": torch.zeros(5, 2)}) == 2 * 5 * 4 * 4 + 40, "without values"
    assert size_bytes({"tokens": tokens, "wte": wte, "wpe": wpe}) == 4 * 8 + 2 * 16 + 2 * 16, "two words, two positions"


def test_every_operation_of_a_backend_is_known() -> None:
    two_in_a_row = {name for name in ops.OPERATIONS if "norm_linear_" in name}
    dropout = {"dropout_forward", "dropout_backward", "dropout_residual_forward"}
    of_fp8 = {*fp8.OPERATIONS} - {"statistics_parts", "tuned_keep_bf16"}
    of_generation = {"store_keys_values"}
    assert {*ops.OPERATIONS} - two_in_a_row - of_generation | dropout | of_fp8 == OPERATIONS.keys()
    nonlinearities = {
        f"{name}_{direction}_fp8" for name in ("gelu", "relu2", "swiglu") for direction in ("forward", "backward")
    }
    assert PARTS.keys() - OPERATIONS.keys() == {"multiply", *nonlinearities}


def test_made_up_tokens_repeat_as_words_do() -> None:
    inputs, targets = torch.empty(40, 64, dtype=torch.int64), torch.empty(40, 64, dtype=torch.int64)
    MadeUpTokens(300, 1).fill(inputs, targets, 0)
    assert torch.equal(inputs.view(-1)[1:], targets.view(-1)[:-1])
    assert inputs.min() == 0 and 250 < inputs.max() < 300
    shares = torch.bincount(inputs.view(-1)) / inputs.numel()
    assert 0.10 < shares[0] < 0.15, "ln 2 / ln 301 = 0.12 are the commonest word"


def event(category: str, name: str, ts: float, dur: float, **args: object) -> dict:
    return {"ph": "X", "cat": category, "name": name, "ts": ts, "dur": dur, "args": args}


def test_a_kernel_belongs_to_the_innermost_range_that_launched_it() -> None:
    """Kernels run late and overlap other ranges' time on the host: only the launch counts."""
    events = [
        event("user_annotation", "handgrad/outer", 10, 20),
        event("user_annotation", "handgrad/inner", 12, 4),
        event("cpu_op", "aten::copy_", 17, 2),  # inside an operation: the operation's
        event("cpu_op", "aten::copy_", 40, 5),
        event("cuda_driver", "cuLaunchKernelEx", 13, 1, correlation=1),
        event("cuda_runtime", "cudaLaunchKernel", 18, 1, correlation=2),
        event("cuda_runtime", "cudaMemcpyAsync", 41, 1, correlation=3),
        event("cuda_runtime", "cudaLaunchKernel", 60, 1, correlation=4),
        event("kernel", "nvjet", 100, 7, correlation=1),
        event("kernel", "elementwise", 110, 5, correlation=2),
        event("gpu_memcpy", "Memcpy HtoD", 14, 3, correlation=3),
        event("kernel", "stray", 15, 2, correlation=4),
        event("kernel", "by hand", 203, 1, correlation=99),  # its launch is not in the trace
        event("gpu_user_annotation", "handgrad/inner", 200, 9),
    ]
    expected = {"inner": Spent(2, 8), "outer": Spent(1, 5), COPIES: Spent(1, 3), OTHER: Spent(1, 2)}
    assert spent_on_gpu(events) == expected
    assert spent_on_cpu(events) == {"outer": Spent(1, 16), "inner": Spent(1, 4), COPIES: Spent(1, 5)}
    assert innermost(ranges_of(events, "user_annotation"), [5, 12, 16.5, 31]) == [None, "inner", "outer", None]


# As ncu writes it: lines of its own, names, units, kernels; quotes in a cell are doubled.
CSV = """==PROF== Connected to process 73 (/usr/bin/python3.12)
tokens     made up
"ID","Process ID","thread Domain:Push/Pop_Range:PL_Type:Msg","Kernel Name","CC",METRICS
"","","","","","byte","Kbyte","byte","inst"
"0","73","1  ""<default domain>:handgrad/head products, wgrad:none"" ","handgrad/head products, wgrad","9.0","1,000,000","500","3e6","2000"
"1","73","1  ""<default domain>:handgrad/outer:none""  ""<default domain>:handgrad/GELU alone:none"" ","void k(int)","9.0","10","20","30","40"
"2","73","","handgrad/GELU alone","9.0","30","40","50","60"
"3","73","","at::fill<int>","9.0","1","2","3","4"
==PROF== Disconnected from process 73
""".replace("METRICS", ",".join(f'"{name}"' for name in METRICS))  # noqa: E501


def test_the_csv_of_nsight_compute() -> None:
    found = parse(CSV)
    assert set(found) == {"head products, wgrad", "GELU alone", OTHER}
    product, gelu = found["head products, wgrad"], found["GELU alone"]
    names = ("launches", "dram_read", "dram_written", "l2", "instructions")
    assert [product[name] for name in names] == [1, 1e6, 5e5, 3e6, 2000]
    assert [gelu[name] for name in names] == [2, 40, 60e3, 80, 100]
    lines = table(found)
    assert lines[1].split() == ["head", "products,", "wgrad", "1", "1.00", "0.50", "3.00", "0.002M"], "the most first"
    assert lines[-1].startswith("sum of all launches") and lines[-1].split()[4] == "4"


def test_a_csv_without_kernels_or_metrics() -> None:
    with pytest.raises(UsageError, match="counted no kernel"):
        parse("==ERROR== ERR_NVGPUCTRPERM\n")
    with pytest.raises(UsageError, match=r"did not count smsp__inst_executed\.sum"):
        parse(CSV.replace("smsp__inst_executed.sum", "n"))


@pytest.mark.nightly  # test_adapters profiles in this process
def test_the_whole_command(tmp_path: Path) -> None:
    """In a process of its own: torch's profiler reads its log level when a process first uses it."""
    trace = tmp_path / "trace.json"
    command = [sys.executable, "-m", "handgrad", *TINY, "--vocab-size", "60", "--trace", str(trace)]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    shown, told = run.stdout, run.stderr
    assert told == "", "torch's profiler is silent"
    rows = {line[:32].strip(): line[32:].split() for line in shown.splitlines()}
    # Per micro-step of 32 tokens: 2 blocks of 12 C^2 weights, and the head's Vp = 128 words.
    assert rows["block products, forward"][0] == "8" and rows["block products, forward"][3:5] == ["0.001573", "GFLOP"]
    assert rows["head products, forward"][3] == f"{2 * 32 * 32 * 128 / 1e9:.4g}"
    assert rows["attention backward"][0] == "2" and rows["layernorm backward"][0] == "5"
    assert rows["norm"][0] == "0.5", "two micro-steps share an update"
    assert rows["AdamW"][4] == "MB" and rows["AdamW"][-1].endswith("%")
    for name in ("sum of kernels", "wall time", "gap", "per micro-step"):
        assert name in rows, name
    kinds = [name for name in rows if {name.split(",")[0]} & {*KINDS} or " products, " in name]
    total = sum(float(rows[name][1]) for name in kinds)
    assert total == pytest.approx(float(rows["sum of kernels"][1]), rel=0.01, abs=0.02)
    assert any(e.get("name") == "handgrad/AdamW" for e in json.loads(trace.read_text())["traceEvents"])


def test_rates_have_the_unit_of_their_ceiling() -> None:
    """A CPU's memory in GB/s, and no row beside it in 1.75e-05 TB/s."""
    assert rate_text(1.75e7, 5e9, "B") == "0.0175 GB/s" and rate_text(2.1e10, 5.1e10, "FLOP") == "21 GFLOP/s"
    assert rate_text(4.123e12, 4.2e12, "B") == "4.12 TB/s" and rate_text(2e10, 3.2e11, "B") == "0.02 TB/s"


@pytest.mark.nightly(but=["fp8"])
@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_adapters(precision: str, capsys: pytest.CaptureFixture) -> None:
    """The frozen weights' products and the adapters' are counted; in fp8 so is what the former read."""
    adapters = ["--lora", "rank=2", "--init-from", "nowhere", "--precision", precision, "--vocab-size", "60"]
    assert main([*TINY, *adapters]) == 0
    rows = {line[:32].strip(): line[32:].split() for line in capsys.readouterr().out.splitlines()}
    in_fp8 = {"quantising in a pass of its own", "transposing fp8 weights"}
    assert rows["block products, dgrad and wgrad"][4] == "GFLOP"
    assert in_fp8 <= rows.keys() if precision == "fp8" else not in_fp8 & rows.keys()


def test_micro_steps_of_all_lanes_count(capsys: pytest.CaptureFixture) -> None:
    assert main([*TINY, "--lanes", "2", "--profile-steps", "1"]) == 0
    rows = {line[:32].strip(): line[32:].split() for line in capsys.readouterr().out.splitlines()}
    assert rows["attention backward"][0] == "2" and rows["sums over lanes"][0] == "0.5"


def test_a_begun_run_is_profiled_as_it_goes_on(config: RunConfig, capsys: pytest.CaptureFixture) -> None:
    """In the precision, the packing and the lanes that it chose at its start."""
    train(dataclasses.replace(config, precision="bf16", packing="masked", lanes=2, steps=1))
    capsys.readouterr()
    assert main([*TINY, "--data", config.data, "--out", config.out, "--profile-steps", "1"]) == 0
    told = capsys.readouterr().out
    assert f"\nbegun      {config.out}, which keeps the settings of its start: precision bf16, packing masked," in told
    rows = {line[:32].strip(): line[32:].split() for line in told.splitlines()}
    assert ", bf16, recompute 0; 2 micro-steps" in told and rows["sums over lanes"][0] == "0.5"


def test_real_tokens_if_asked_for(shards: Path, capsys: pytest.CaptureFixture) -> None:
    assert main([*TINY, "--data", str(shards), "--profile-steps", "1"]) == 0
    assert f"of {shards}, a vocabulary of 257" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        (["--profile-stepz", "3"], 64, "did you mean --profile-steps?"),
        (["--profile-steps", "0"], 64, "--profile-steps must be at least 1"),
        (["--vocab-size", "0"], 64, "--vocab-size must be at least 1"),
        (["--trace", "nowhere/trace.json"], 64, "there is no folder"),
        (["--data", "no-shards"], 65, "no-shards"),
    ],
)
def test_mistakes(
    arguments: list[str],
    code: int,
    told: str,
    capsys: pytest.CaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main([*TINY, *arguments]) == code
    line = capsys.readouterr().err
    assert told in line and line.count("\n") == 1


def test_ncu_runs_the_same_command_inside(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A stand-in for ncu that shows how it was called, and then the sample above."""
    from benchmarks import nsight

    stand_in = tmp_path / "ncu"
    stand_in.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/called\ncat {tmp_path}/sample\n')
    stand_in.chmod(0o755)
    (tmp_path / "sample").write_text(CSV)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert nsight.run_ncu(["tiny"]) == table(parse(CSV))
    called = (tmp_path / "called").read_text()
    assert "--clock-control none" in called and called.endswith("-m benchmarks.nsight --inside-ncu tiny\n")
    (tmp_path / "sample").write_text("==ERROR== ERR_NVGPUCTRPERM - no permission\n")
    with pytest.raises(UsageError, match="counted no kernel; it printed: ==ERROR== ERR_NVGPUCTRPERM"):
        nsight.run_ncu([])
