"""Shared by the tests: small shapes, a model in float64 or float32, prepared shards of a few kilobytes."""

import dataclasses
import gc
import importlib.util
import json
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test may look for a hub; the download tests run a server of their own
# One thread, read when torch is loaded: tests run side by side, and two threads that wait for each other on a busy machine
# took 40 times as long as one.
os.environ |= {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
import pytest
import torch

if not torch.cuda.is_available():  # Triton reads it when it is first imported: without a GPU its kernels are interpreted
    os.environ.setdefault("TRITON_INTERPRET", "1")

from torch import Tensor

from benchmarks.record import write_record
from handgrad.data.prepare import PrepareOptions, prepare
from handgrad.joins import documents
from handgrad.joins.dropout.bind import WithDropout, scratch_sizes
from handgrad.joins.fp8 import reference as fp8_reference
from handgrad.joins.fp8.formats import (
    COUNTING,
    GRADIENT_FORMATS,
    INVERSE,
    LARGEST_EXPONENT,
    SCALE,
    GradientFormats,
    Quantized,
)
from handgrad.joins.fp8.tables import (
    Fp8Gemms,
    QuantizedRow,
    activation_buffers,
    longest_side,
    quantized_table,
    quantized_tensors,
    scaling_buffers,
    weight_buffers,
)
from handgrad.machine import processor, threads
from handgrad.memory.arena import ALWAYS, Plan, make_plan
from handgrad.memory.rows import Table, flat_elements, initialize, named
from handgrad.models import architecture, document_buffers, named_weights, parameter_table
from handgrad.ops import reference
from handgrad.run.open import open_run, train
from handgrad.settings.config import ModelShape, RunConfig
from handgrad.settings.presets import tiny
from handgrad.storage.manifest import content_sha256
from tests import quick_interpreter
from tests.cpu_times import CpuTimes
from tests.faults import rows as fault_rows
from tests.kernels import interpreted

if TYPE_CHECKING:
    from tests.distributed.runs import Launcher

# Until the tests begin: what is collected stays, and looking through it again and again took a fifth of that time.
gc.disable()

threads.choose()  # as every command does: before MKL is first called

# Under nohup it is ignored, and what a test starts would inherit that.
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# Variables with which the libraries of a CPU use fewer instructions than it has.
CPU_LIMITS = ("ONEDNN_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS", "ATEN_CPU_CAPABILITY")

# CPU seconds of each file, those first that take most (tests/cpu_times.py).
CPU_TIMES = Path(__file__).parents[1] / "benchmarks" / "results" / "cpu-test-times.json"


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """`-n auto`: a worker for each core that this process may use, and one more, as some tests wait for seconds."""
    return 1 + (len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    fault_rows.give_seeds(metafunc)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Begins with the files that the record lacks and then its longest: a worker takes a whole file, and the last one
    should be short."""
    fault_rows.note_rows(items, config)
    if not config.getoption("--nightly"):
        skip = pytest.mark.skip(reason="in `make nightly` alone, by --nightly")
        for item in filter(is_nightly, items):
            item.add_marker(skip)
        if importlib.util.find_spec("triton"):
            interpreted.skip_passed(items)
    order = {name: place for place, name in enumerate(json.loads(CPU_TIMES.read_text())["files"])}
    items.sort(key=lambda item: order.get(item.location[0], -1))


def is_nightly(item: pytest.Item) -> bool:
    """True for each test with the mark, but the cases that `nightly(but=[...])` names by their ids."""
    cases = getattr(item, "callspec", None)
    return any(not cases or cases.id not in mark.kwargs.get("but", ()) for mark in item.iter_markers("nightly"))


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop() -> None:
    gc.freeze()
    gc.enable()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record", metavar="FILE", help="write what passed and failed, with machine and versions, as JSON")
    parser.addoption("--cpu-times", metavar="FILE", help="write each file's CPU seconds as JSON (tests/cpu_times.py)")
    parser.addoption("--nightly", action="store_true", help="also the tests that are marked nightly")
    fault_rows.add_options(parser)


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--cpu-times"):
        config.pluginmanager.register(CpuTimes())


def pytest_terminal_summary(terminalreporter: Any, exitstatus: int, config: pytest.Config) -> None:
    """The results file that `make test-gpu` leaves. Of parallel processes the first writes it: a worker whose first process
    was killed would leave a record of its own tests alone."""
    if hasattr(config, "workerinput"):
        return
    capability = torch.backends.cpu.get_cpu_capability()
    limits = [f"{name}={os.environ[name]}" for name in CPU_LIMITS if name in os.environ]
    terminalreporter.write_line(", ".join([f"CPU: {processor.name()}", f"torch uses {capability}", *limits]))
    if path := config.getoption("--record"):
        found = {outcome: terminalreporter.stats.get(outcome, []) for outcome in ("passed", "failed", "error", "skipped")}
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        names = [report.nodeid for outcome in ("failed", "error") for report in found[outcome]]
        tests = {outcome: len(reports) for outcome, reports in found.items()}
        cut = {"interrupted": True} if exitstatus == pytest.ExitCode.INTERRUPTED else {}
        write_record(path, device, tests=tests, not_passed=names, **cut)
    if path := config.getoption("--fault-record"):
        stats = terminalreporter.stats
        numbers = {"passed": len(stats.get("passed", [])), "seconds": fault_rows.elapsed_seconds()}
        write_record(path, torch.device("cpu"), **numbers, rows=fault_rows.outcomes(stats))


@dataclass
class Model:
    """A model's tensors over flat buffers, without a training run around them."""

    shape: ModelShape
    table: Table
    flat: Tensor
    flat_gradients: Tensor
    weights: Any  # the architecture's
    gradients: Any
    act: Any
    d: Any
    plan: Plan
    views: dict[str, Tensor]  # of the plan, or private ones
    ops: Any  # the reference, with fp8 or dropout where the model has it

    @property
    def module(self) -> Any:
        return architecture(self.shape)

    def forward(self) -> None:
        """act.tokens -> act.lnf"""
        for stage in self.module.forward(self.ops, self.weights, self.act, self.shape):
            stage.run()

    def backward(self, scale: Tensor, recompute: int = 0) -> None:
        """After `forward`: the losses, and gradients += scale (1) * the gradient of their sum."""
        tensors = self.weights, self.gradients, self.act, self.d
        for stage in self.module.backward(self.ops, *tensors, scale, self.shape, recompute=recompute):
            stage.run()

    def run(self, *, scale: float = 1.0, recompute: int = 0) -> None:
        """Forward and backward, of the losses times `scale`."""
        self.forward()
        self.backward(torch.tensor([scale], dtype=self.act.losses.dtype), recompute)


def quantized_weights(model: Model) -> dict[str, Quantized]:
    """Those of a model in fp8, by name."""
    found = {"wte": model.weights.head}
    for layer, block in enumerate(model.weights.blocks):
        found |= {f"blocks.{layer}.{name}": form for name, form in vars(block).items()}
    return {name: form for name, form in found.items() if isinstance(form, Quantized)}


def make_model(
    shape: ModelShape,
    batch: int,
    length: int,
    dtype: torch.dtype = torch.float64,
    *,
    recompute: int = 0,
    chunk: int = 1 << 20,
    noise: float = 0.1,
    seed: int = 5,
    fp8: Fp8Gemms | None = None,
    gradients: GradientFormats = GRADIENT_FORMATS["e5m2"],
    dropout: float = 0.0,
    packed: bool = False,
    private: bool = False,
    backends: tuple[Any, Any] = (reference, fp8_reference),
) -> Model:
    """Initial weights plus noise (so that no bias or layer norm is trivial), zero gradients, NaN-filled activations.

    `fp8`: the GEMMs that go to fp8, every tensor at its own current scale (the logits' gradient at a scale for a
    loss that is multiplied by at most 1). `dropout`: of the samples 0, 1, ... `packed`: rows may hold several documents.
    `private`: nothing shares the plan's memory. `backends`: operations without and with fp8.
    """
    table = parameter_table(shape)
    elements = flat_elements(table)
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    flat = torch.zeros(elements, dtype=torch.float32)
    initialize(table, seed, lambda row, values: row.stored(flat).copy_(values))
    generator = torch.Generator().manual_seed(seed)
    for row in table:
        stored = row.stored(flat)
        stored.add_(torch.randn(stored.shape, generator=generator), alpha=noise)
    flat = flat.to(dtype)
    flat_gradients = torch.zeros(elements, dtype=exact)
    ops = backends[fp8 is not None]
    module, chunk = architecture(shape), min(chunk, batch * length)
    sizes = scratch_sizes(ops) if dropout else ops
    rows = tuple(module.activations(shape, batch, length, dtype, sizes, chunk=chunk, training=True))
    quantized: tuple[QuantizedRow, ...] = ()
    if fp8 is None:
        buffers = [row.buffer(recompute) for row in rows if not row.of]
    else:
        quantized = quantized_table(table, rows, shape.forms, fp8, gradients)
        heads = {"num_heads": shape.num_heads, "head_width": shape.head_width, "channels": shape.channels}
        sides = {"feed_forward": shape.feed_forward, "widest": longest_side(table)}
        sides |= {"padded_vocab_size": shape.padded_vocab_size}
        parts = ops.statistics_parts(batch=batch, length=length, **heads, **sides)
        buffers = [
            *activation_buffers(rows, shape.forms, fp8, gradients, recompute),
            *weight_buffers(quantized, table, fp8),
            *scaling_buffers(len(quantized), statistics_parts=parts),
        ]
    buffers += document_buffers(module, batch, length) if packed else []
    plan = make_plan(buffers)
    placed = make_plan(dataclasses.replace(b, lifetimes=ALWAYS) for b in buffers) if private else plan
    views = placed.allocate(torch.device("cpu"))
    for view in views.values():
        view.fill_(float("nan") if view.is_floating_point() else 0)
    plain = {row.name: row.view(flat) for row in table}
    forms: dict[str, Any] = {}
    if fp8 is not None:
        set_scales(views["fp8.scaling"])
        forms = quantized_tensors(quantized, views, plain, current=True)
    layers = shape.num_layers
    act = named(module.Activations, views | forms, layers)
    d = named(module.Gradients, views | forms, layers)
    act.tokens.copy_(torch.randint(shape.vocab_size, (batch, length), generator=generator))
    act.targets.copy_(torch.randint(shape.vocab_size, (batch, length), generator=generator))
    weights = named(module.Weights, plain | forms, layers)
    gradients = named_weights(shape, flat_gradients, table)
    within = documents.operations(ops, act)
    model = Model(shape, table, flat, flat_gradients, weights, gradients, act, d, plan, views, within)
    if dropout:
        model.ops = WithDropout(
            within, weights, gradients, act, d, samples=torch.arange(batch), probability=dropout, seed=1337
        )
    for form in quantized_weights(model).values() if fp8 is not None else ():
        assert form.plain is not None
        ops.quantize(form, form.plain)
    return model


def set_scales(scaling: Tensor) -> None:
    """Scales of 1 without margin, numbers counted; in the last row, the one of the logits' gradient."""
    scaling.zero_()
    scaling[:, [SCALE, INVERSE, COUNTING]] = 1.0
    scaling[-1, SCALE] = 2.0 ** LARGEST_EXPONENT[torch.float8_e5m2]
    scaling[-1, INVERSE] = 1 / scaling[-1, SCALE]


def write_text(path: Path, words: int = 6000) -> Path:
    """A deterministic text with some structure, made up here."""
    generator = torch.Generator().manual_seed(0)
    vocabulary = ["river", "stone", "old", "bright", "walks", "sings", "over", "under", "the", "a", "and", "hill", "crow"]
    picks = torch.randint(len(vocabulary), (words,), generator=generator).tolist()
    lines = [" ".join(vocabulary[i] for i in picks[start : start + 9]) for start in range(0, words, 9)]
    path.write_text(".\n".join(lines) + "\n", encoding="utf-8")
    return path


@pytest.fixture(scope="session", autouse=True)
def quickened_interpreter() -> Iterator[None]:
    with quick_interpreter.quickened():
        yield


@pytest.fixture(autouse=True)
def no_report(request: pytest.FixtureRequest) -> Iterator[None]:
    """But in a test marked `report`, `handgrad train` in this process draws no report, since plots take longer than these
    runs, and a page's PNGs, half of its time, are nothing but their first bytes."""
    with pytest.MonkeyPatch.context() as patch:
        if request.node.get_closest_marker("report") is None:
            patch.setattr("handgrad.commands.train.write_report", lambda runs, out: out)
            if pages := sys.modules.get("handgrad.reports.page"):
                patch.setattr(pages, "png", lambda plot, runs: b"\x89PNG")
        yield


@pytest.fixture(scope="session")
def launcher(tmp_path_factory: pytest.TempPathFactory) -> Iterator["Launcher"]:
    """Starts processes in milliseconds: forks of one that has imported everything."""
    from tests.distributed.runs import Launcher

    started = Launcher(tmp_path_factory.mktemp("forks"))
    yield started
    started.close()


@pytest.fixture(scope="session")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A prepared folder of bytes: about 30,000 training tokens."""
    folder = tmp_path_factory.mktemp("shards")
    source = write_text(folder / "text.txt")
    prepare(PrepareOptions(str(source), folder / "bytes", tokenizer="bytes", workers=1))
    return folder / "bytes"


@pytest.fixture
def config(shards: Path, tmp_path: Path) -> RunConfig:
    """A run of seconds: two layers of 32 channels on bytes."""
    return small_run(shards, tmp_path / "run")


@pytest.fixture(scope="session")
def finished_once(shards: Path, tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    """The run of `config`, which tests copy."""
    config = small_run(shards, tmp_path_factory.mktemp("finished") / "run")
    train(config)
    return config


@pytest.fixture
def finished(config: RunConfig, finished_once: RunConfig) -> RunConfig:
    """An uninterrupted run: a copy, in which the folder has its new name, takes a hundredth of the time."""
    run = Path(shutil.copytree(finished_once.out, config.out))
    for path in (run / "config.toml", run / "log.txt"):
        path.write_text(path.read_text(encoding="utf-8").replace(finished_once.out, config.out), encoding="utf-8")
    for path in run.glob("checkpoints/*/manifest.json"):
        content = json.loads(path.read_text(encoding="utf-8"))
        content["config"]["out"] = config.out
        del content["sha256"]
        content["sha256"] = content_sha256(content)
        path.write_text(json.dumps(content, indent=1), encoding="utf-8")
    return config


def train_in_two(config: RunConfig, steps: int) -> None:
    """Trains, stopped after so many steps and then resumed."""
    with open_run(config) as run:
        run.begin()
        run.advance(steps)
        run.save()
    train(config)


def small_run(shards: Path, out: Path) -> RunConfig:
    return dataclasses.replace(
        tiny(),
        data=str(shards),
        out=str(out),
        num_heads=2,
        channels=32,
        sequence_length=32,
        steps=12,
        tokens_per_step=256,
        micro_batch=4,
        learning_rate=3e-3,
        warmup_steps=3,
        eval_every=6,
        eval_tokens=512,
        save_every=4,
        sample_tokens=8,
        device="cpu",
    )
