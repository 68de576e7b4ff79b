"""The benchmark of a step on a CPU: twins that compute the same thing by different means, in fair turns."""

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from benchmarks import cpu_twin, step
from benchmarks.cpu_twin import CpuSwitches, make_twin
from benchmarks.step import AS_IT_COMES, CONTENDERS, Contender
from benchmarks.twin import Twin
from handgrad.errors import UsageError
from handgrad.models import parameter_table
from handgrad.settings.config import RunConfig

pytestmark = pytest.mark.nightly  # of a measuring script: nothing that the package promises rests on it

VOCABULARY = 301
TWINS = {name: contender for name, contender in CONTENDERS.items() if contender.twin is not None}
PRODUCTS = 3 * (4 * 2 + 1)  # of tiny's eight linear layers and its head, forward and backward
needs_onednn = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN")


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(VOCABULARY, (2, 16), generator=generator), torch.randint(VOCABULARY, (2, 16), generator=generator)


def config_of(precision: str) -> RunConfig:
    return step.config_of("tiny", 2, 16, precision)


def usable(switches: CpuSwitches) -> None:
    """Skips a test whose twin this machine cannot make."""
    if switches.onednn and not torch.backends.mkldnn.is_available():
        pytest.skip("this torch has no oneDNN")
    if switches.compiled:
        try:
            cpu_twin.check_compiler()
        except UsageError as error:
            pytest.skip(str(error))


def gradients(twin: Twin, precision: str) -> tuple[float, dict[str, Tensor]]:
    """(loss, gradients by handgrad's names) of a micro-batch; leaves no gradient behind."""
    twin.zero_grad(set_to_none=True)
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
        loss = twin(*batch())
    loss.backward()
    table = parameter_table(config_of(precision).shape(VOCABULARY))
    return loss.item(), {row.name: twin.parameter_of(row).grad.double() for row in table}


@pytest.fixture(scope="module")
def exact() -> tuple[float, dict[str, Tensor]]:
    """In float64, by the plain twin."""
    return gradients(make_twin(config_of("fp32"), VOCABULARY, AS_IT_COMES).double(), "fp32")


@pytest.fixture(scope="module")
def plain() -> dict[str, tuple[float, dict[str, Tensor]]]:
    """By the plain twin in each precision."""
    return {p: gradients(make_twin(config_of(p), VOCABULARY, AS_IT_COMES), p) for p in ("fp32", "bf16")}


@pytest.mark.parametrize("name", TWINS)
def test_every_twin_is_the_same_model(name: str, exact: tuple, plain: dict) -> None:
    """Its loss and gradients lie at most twice as far from float64's as the plain twin's in its precision: the error of
    another order of the same rounded operations."""
    contender = TWINS[name]
    assert contender.twin is not None
    usable(contender.twin)
    loss, found = gradients(make_twin(config_of(contender.precision), VOCABULARY, contender.twin), contender.precision)
    plain_loss, reference = plain[contender.precision]
    exact_loss, exact_gradients = exact
    assert abs(loss - exact_loss) <= 2 * abs(plain_loss - exact_loss) + 1e-6 * exact_loss
    assert found.keys() == exact_gradients.keys()
    for row, gradient in exact_gradients.items():
        assert gradient.norm() > 0, row
        allowed = 2 * (reference[row] - gradient).norm() + 1e-6 * gradient.norm()
        assert (found[row] - gradient).norm() <= allowed, row


def test_all_contenders_start_from_the_same_weights() -> None:
    """handgrad's and the twins' first losses differ by float32's rounding, and a tenth of a nat by the fourth step."""
    ours, theirs = (
        step.step_of(Contender("fp32", twin), dataclasses.replace(config_of("fp32"), learning_rate=1e-2))
        for twin in (None, AS_IT_COMES)
    )
    losses = [[one(n) for n in range(4)] for one in (ours, theirs)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert losses[0][-1] < losses[0][0] - 0.1


def calls(twin: Twin) -> dict[str, int]:
    """The operators that a forward and backward call, with how often."""
    gradients(twin, "fp32")  # compiles
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        gradients(twin, "fp32")
    return {event.key: event.count for event in profiler.key_averages()}


@needs_onednn
@pytest.mark.parametrize("compiled", [False, True])
def test_the_onednn_twin_sends_every_product_to_onednn(compiled: bool) -> None:
    switches = CpuSwitches(onednn=True, compiled=compiled)
    usable(switches)
    found = calls(make_twin(config_of("fp32"), VOCABULARY, switches))
    assert found["mkldnn::_linear_pointwise"] == PRODUCTS
    assert not {"aten::mm", "aten::addmm", "aten::linear"} & found.keys()
    assert any("CompiledFxGraph" in name for name in found) == compiled
    plain = calls(make_twin(config_of("fp32"), VOCABULARY, CpuSwitches(compiled=compiled)))
    assert plain["aten::mm"] + plain["aten::addmm"] == PRODUCTS and "mkldnn::_linear_pointwise" not in plain


@needs_onednn
def test_bf16_autocast_goes_to_onednn_by_itself(capfd: pytest.CaptureFixture) -> None:
    """oneDNN's own log has every product; in float32 it has none."""
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("oneDNN has no bf16 on this processor")

    def executed(precision: str) -> list[str]:
        twin = make_twin(config_of(precision), VOCABULARY, AS_IT_COMES)
        with torch.backends.mkldnn.verbose(torch.backends.mkldnn.VERBOSE_ON):
            gradients(twin, precision)
        log = capfd.readouterr().out.splitlines()
        return [line for line in log if ",exec,cpu," in line and (",matmul," in line or ",inner_product," in line)]

    found = executed("bf16")
    assert len(found) == PRODUCTS and all("bf16" in line for line in found)
    assert not executed("fp32")


def test_the_switches_choose_the_optimizer() -> None:
    """The fused AdamW makes the same steps by an operator of its own."""
    losses = {}
    for fused in (False, True):
        config = dataclasses.replace(config_of("fp32"), learning_rate=1e-2)
        one = cpu_twin.twin_steps(config, VOCABULARY, CpuSwitches(fused=fused), batch())
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            losses[fused] = [one(n) for n in range(3)]
        names = {event.key for event in profiler.key_averages()}
        assert ("aten::_fused_adamw_" in names) == fused
    assert losses[True] == pytest.approx(losses[False], rel=1e-4)


def test_a_step_has_its_precision(plain: dict) -> None:
    for precision, (loss, _) in plain.items():
        one = cpu_twin.twin_steps(config_of(precision), VOCABULARY, AS_IT_COMES, batch())
        assert one(0) == loss, precision
    assert plain["fp32"][0] != plain["bf16"][0]


def test_a_twin_that_this_machine_cannot_make(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-compiler-of-this-name")
    with pytest.raises(
        UsageError, match=r"need a C\+\+ compiler, no-compiler-of-this-name is not there; install it or set"
    ):
        make_twin(config_of("bf16"), VOCABULARY, CpuSwitches(compiled=True))
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    with pytest.raises(UsageError, match="need a torch built with oneDNN"):
        make_twin(config_of("fp32"), VOCABULARY, CpuSwitches(onednn=True))


# The turns, and their figures.

# A contender without a model: its n-th step takes n seconds by its own account, and logs its variables.
DUMMY = """
import json, os, sys
name, log, dies = sys.argv[1:]
for step, line in enumerate(sys.stdin):
    if step == 4 and dies == "dies":
        sys.exit(3)
    with open(log, "a") as file:
        variables = [os.environ.get(name) for name in ("MALLOC_MMAP_MAX_", "TORCHINDUCTOR_COMPILE_THREADS")]
        file.write(json.dumps([name, *variables]) + "\\n")
    print(json.dumps({"seconds": step * (1 + len(name)), "loss": 9.0 - step, "peak_bytes": step << 30}), flush=True)
"""


@pytest.fixture
def dummies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Contenders whose step takes longer the longer their names are; returns their log."""
    contenders = {
        "a": Contender("fp32"),
        "eager": Contender("fp32", AS_IT_COMES),
        "all": Contender("fp32", CpuSwitches(compiled=True)),
    }
    contenders |= {"dead": Contender("fp32", CpuSwitches(kept_memory=True)), "b": Contender("bf16")}
    log = tmp_path / "log"
    monkeypatch.setattr(step, "CONTENDERS", contenders)
    monkeypatch.setattr(
        step, "command", lambda name, _: [sys.executable, "-c", DUMMY, name, str(log), "dies" if name == "dead" else ""]
    )
    return log


def test_turns_figures_and_the_record(dummies: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Three turns do not count; a failure stops nobody else; ratios are within a precision."""
    step.compare("tiny", 2, 16, 3, str(tmp_path / "step.json"))
    assert step.WARM_UP == 3
    log = [json.loads(line) for line in dummies.read_text().splitlines()]
    names = [name for name, *_ in log]
    assert names == [*("a", "eager", "all", "dead") * 4, *("a", "eager", "all") * 2, *"b" * 6], "by turns, by precision"
    assert {tuple(line) for line in log} == {
        *((name, None, None) for name in ("a", "eager", "b")),
        ("all", None, "1"),
        ("dead", "0", None),
    }, "each has the variables of its switches"
    figures: dict[str, Any] = json.loads((tmp_path / "step.json").read_text())["figures"]
    # The median of the fourth to sixth turn: 4 times (1 + letters).
    assert [row.get("seconds_per_step") for row in figures.values()] == [8, 24, 16, None, 8]
    assert (figures["a"]["times_best_twin"], figures["a"]["times_eager"]) == (2, 3)
    assert (figures["all"]["times_best_twin"], figures["all"]["times_eager"]) == (1, 1.5)
    assert [name for name, row in figures.items() if row.get("best_twin")] == ["all"]
    assert figures["a"]["fastest_seconds"] == 6 and figures["a"]["tokens_per_second"] == 4
    assert figures["a"]["first_loss"] == 9 and figures["a"]["peak_gib"] == 5
    assert figures["dead"]["failed"].startswith("stopped with exit code 3")
    assert "times_best_twin" not in figures["b"], "there is no twin in its precision"
    printed = capsys.readouterr().out
    assert "failed: stopped with exit code 3" in printed
    assert next(line for line in printed.splitlines() if line.startswith("a ")).split()[4:] == ["2.00", "3.00", "5.00"]


def test_real_contenders(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Processes of the real thing: the same loss before the first update, and figures."""
    chosen = ("handgrad fp32", "torch eager fp32, AdamW as it comes")
    monkeypatch.setattr(step, "CONTENDERS", {name: CONTENDERS[name] for name in chosen})
    step.compare("tiny", 2, 16, 1, str(tmp_path / "step.json"))
    rows = json.loads((tmp_path / "step.json").read_text())["figures"]
    ours, theirs = (rows[name] for name in chosen)
    assert ours["first_loss"] == pytest.approx(theirs["first_loss"], abs=2e-5)
    assert theirs["times_best_twin"] == 1 and ours["times_eager"] > 0 and ours["peak_gib"] > 0.05
