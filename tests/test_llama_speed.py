"""The speed comparison of the Llama family: the same model in all contenders, and rows that say so."""

import dataclasses
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from benchmarks import contenders, gpu_step, llama_speed, llama_twin
from benchmarks.contenders import Settings, tokens_of
from benchmarks.trainer_run import TrainerRun, TrainerSwitches
from handgrad.errors import UsageError
from handgrad.memory.rows import count_parameters
from handgrad.models import parameter_table
from tests import gemma3_twin
from tests.llama_twin import FAMILIES

pytestmark = pytest.mark.nightly  # of a measuring script: nothing that the package promises rests on it

SMALL = Settings(
    model="tiny-llama",
    micro_batch=2,
    sequence_length=16,
    micro_steps=2,
    precision="fp32",
    device="cpu",
    vocab_size=57,
    learning_rate=1e-2,
)
PARAMETERS = {  # as published
    "SmolLM2-135M": 134_515_008,
    "Qwen3-0.6B": 596_049_920,
    "Llama-3.2-1B": 1_235_814_400,
    "Qwen2.5-0.5B": 494_032_768,
    "Qwen2.5-1.5B": 1_543_714_304,
    "Qwen2.5-3B": 3_085_938_688,
    "SmolLM3-3B": 3_075_098_624,
    "Qwen3-4B": 4_022_468_096,
    "Qwen3-8B": 8_190_735_360,
    "Gemma-3-270M": 268_098_176,
    "Gemma-3-1B": 999_885_952,
    "OLMo-2-1B": 1_484_916_736,
}


GEMMAS = gemma3_twin.FAMILIES
SIZES = {name: numbers for name, numbers in (FAMILIES | GEMMAS).items() if name != "mistral"}  # whose twin has no window


@pytest.fixture(params=SIZES)
def family(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Settings:
    """A small member of a family, of odd sizes."""
    monkeypatch.setitem(contenders.LLAMAS, request.param, (57, 3, 4, 24, SIZES[request.param]))
    if request.param in GEMMAS:
        monkeypatch.setitem(llama_twin.NETWORKS, request.param, "gemma3")
    return dataclasses.replace(SMALL, model=request.param)


def losses_of(name: str, settings: Settings, steps: int) -> list[float]:
    return llama_speed.make_run(name, settings).turn(lambda launched: launched < steps)


@pytest.mark.parametrize("name", [name for name in llama_twin.SHAPES if name != "tiny-llama"])
def test_the_sizes_are_the_published_ones(name: str) -> None:
    settings = Settings(model=name, micro_batch=1, sequence_length=2048, device="cpu")
    shape = settings.config().shape(llama_twin.SHAPES[name][0])
    assert count_parameters(parameter_table(shape)) == PARAMETERS[name]


def test_the_twin_makes_the_same_steps(family: Settings) -> None:
    expected = losses_of("handgrad", family, 4)
    assert losses_of("twin-flash+stream", family, 4) == pytest.approx(expected, abs=5e-5)
    assert expected[-1] < expected[0] - 0.05, "they learn that some tokens are frequent"


def test_the_twin_in_bf16_is_near(family: Settings) -> None:
    """With its stream in bf16, or in float32."""
    family = dataclasses.replace(family, learning_rate=3e-3)
    expected = losses_of("handgrad", family, 3)
    bf16 = dataclasses.replace(family, precision="bf16")
    for name in ("twin-flash", "twin-flash+stream"):
        losses = losses_of(name, bf16, 3)
        assert losses != expected and losses == pytest.approx(expected, abs=0.02)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma3"], indirect=True)
def test_the_trainer_makes_the_same_steps(family: Settings) -> None:
    """Over two turns, of two micro-batches a step."""
    pytest.importorskip("accelerate", reason="transformers' Trainer is optional")
    run = llama_speed.make_run("transformers", family)
    losses = run.turn(lambda launched: launched < 3) + run.turn(lambda launched: False)
    assert run.completed == 4
    assert losses == pytest.approx(losses_of("handgrad", family, 4), abs=5e-5)


@pytest.mark.parametrize("family", ["qwen3", "gemma3"], indirect=True)
def test_the_trainer_with_adapters_makes_steps_like_ours(family: Settings) -> None:
    """Equal at first, when B is 0; then A is of other numbers."""
    pytest.importorskip("accelerate", reason="transformers' Trainer is optional")
    family = dataclasses.replace(family, learning_rate=3e-3)
    losses = losses_of("transformers+lora", family, 2)
    assert losses == pytest.approx(losses_of(llama_speed.ADAPTED, family, 2), abs=0.01)
    assert losses[0] == pytest.approx(losses_of("handgrad", family, 1)[0], abs=5e-5)


def test_adapters_compare_with_adapters() -> None:
    assert llama_speed.check_contenders("handgrad-lora,transformers+lora+compiled", "bf16")
    with pytest.raises(UsageError, match="contenders that all have adapters, or none, found"):
        llama_speed.check_contenders("handgrad,transformers+lora", "bf16")


def test_a_trainer_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UsageError, match="not installed here: pip install"):
        TrainerRun(SMALL.config(), tokens_of(SMALL), TrainerSwitches())


@pytest.mark.parametrize(("installed", "told"), [(False, "liger-kernel is not installed here: pip"), (True, "need a GPU")])
def test_liger_that_is_not_there(installed: bool, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its contender alone has no figures."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name != "liger_kernel" or installed or None)
    names = llama_speed.check_contenders("handgrad,transformers+compiled+liger", "bf16")
    with pytest.raises(UsageError, match=told):
        llama_speed.make_run(names[1], SMALL)


def test_a_trainer_is_tuned_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its arguments say what its name does; nothing waits for the device in between."""
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "no")  # which Trainer sets, for the whole process
    pytest.importorskip("accelerate", reason="transformers' Trainer is optional")
    monkeypatch.setattr("benchmarks.trainer_run.check_installed", lambda switches, device: None)
    for name in llama_speed.TRAINERS:
        run = llama_speed.make_run(name, SMALL)
        assert isinstance(run, TrainerRun)
        given = run.trainer.args
        assert (given.torch_compile, given.use_liger_kernel) == ("compiled" in name, "liger" in name)
        assert given.optim == "adamw_torch_fused" and not given.logging_nan_inf_filter
        assert not run.trainer.model.is_gradient_checkpointing
        assert run.trainer.model.config._attn_implementation == "sdpa"


def test_ligers_loss_stays_out_of_the_compiled_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its module calls it by its name, which stands for the function outside then."""
    pytest.importorskip("accelerate", reason="transformers' Trainer is optional")
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "no")
    monkeypatch.setattr("benchmarks.trainer_run.check_installed", lambda switches, device: None)
    traced = list[bool]()
    module = ModuleType("liger_kernel.transformers.model.loss_utils")
    for name in ("transformers+compiled", "transformers+liger", "transformers+compiled+liger"):
        module.fixed_fused_linear_cross_entropy = lambda x: x * (2 if torch.compiler.is_compiling() else 1)  # type: ignore
        monkeypatch.setitem(sys.modules, module.__name__, module)
        run = llama_speed.make_run(name, SMALL)
        assert isinstance(run, TrainerRun)

        def loss(x: torch.Tensor) -> torch.Tensor:
            return module.fixed_fused_linear_cross_entropy(x.sin()) + 1

        def train(loss: Any = loss) -> None:
            compiled = torch.compile(loss, backend="eager")(torch.ones(1))
            traced.append(compiled.item() != loss(torch.ones(1)).item())

        monkeypatch.setattr(run.trainer, "train", train)
        run.may_go.release()
        run.done.acquire()
        assert run.error is None
        torch._dynamo.reset()
    assert traced == [True, True, False]


def test_the_compiled_trainer_makes_the_same_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the compiler's front, whose graphs torch runs as they are: writing C++ for them takes a minute."""
    accelerate = pytest.importorskip("accelerate", reason="transformers' Trainer is optional")
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "no")
    run = llama_speed.make_run("transformers+compiled", SMALL)
    assert isinstance(run, TrainerRun)
    run.trainer.accelerator.state.dynamo_plugin.backend = accelerate.utils.DynamoBackend.EAGER
    torch._dynamo.utils.counters.clear()
    losses = run.turn(lambda launched: launched < 3)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
    assert losses == pytest.approx(losses_of("handgrad", SMALL, 3), abs=5e-5)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ([], [["handgrad", "twin-flash"], ["transformers"], ["transformers+compiled+liger"]]),
        (["--alone"], [["transformers"], ["handgrad"], ["transformers+compiled+liger"], ["twin-flash"]]),
        (["--contenders=transformers"], [["transformers"]]),
    ],
)
def test_trainers_are_measured_alone(
    given: list[str], expected: list[list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each after the others are gone, which alternate unless all are to be alone; the rows stand in one record."""
    groups: list[list[str]] = []

    def measure(commands: dict[str, list[str]], *_: Any, **options: Any) -> dict[str, Any]:
        groups.append([*commands])
        return rows_of({name: [5.0, 2.0] for name in commands})

    monkeypatch.setattr(gpu_step, "measure", measure)
    names = "--contenders=transformers,handgrad,transformers+compiled+liger,twin-flash"
    words = ["--shapes=tiny-llama", "--device=cpu", "--precision=fp32", f"--out-folder={tmp_path}", names, *given]
    monkeypatch.setattr(sys, "argv", ["llama_speed", *words])
    assert llama_speed.main() == 0
    record = json.loads((tmp_path / "cpu-llama-speed-tiny-llama.json").read_text())
    assert groups == expected and {*record["figures"]} == {name for group in expected for name in group}
    assert record["settings"]["measured_alone"] == [group[0] for group in expected if len(group) == 1]


def test_what_stops_a_trainer_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("accelerate", reason="transformers' Trainer is optional")
    run = llama_speed.make_run("transformers", SMALL)
    monkeypatch.setattr(run, "end_step", lambda: (_ for _ in ()).throw(torch.OutOfMemoryError("full")))
    with pytest.raises(torch.OutOfMemoryError, match="full"):
        run.turn(lambda launched: False)


def rows_of(losses: dict[str, list[float]]) -> dict[str, Any]:
    """Raw rows of contenders with one turn each."""
    turn = {"steps": 4, "seconds": 2.0, "loss": 1.0, "power": None, "allocated_bytes": 1 << 30, "reserved_bytes": 2 << 30}
    return {name: {"turns": [turn], "first_loss": own[0], "losses": own} for name, own in losses.items()}


@pytest.mark.parametrize("theirs", [2.001, 2.1, float("nan")])
def test_another_model_is_told(
    theirs: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """The record is written all the same; a contender without figures has a row."""
    raw = rows_of({"handgrad": [5.0, 2.0], "twin-flash": [5.0, theirs]})
    raw["transformers"] = {"turns": [], "failed": "absent"}
    monkeypatch.setattr(gpu_step, "measure", lambda commands, *_, **options: raw)
    given = [
        "--shapes=tiny-llama",
        "--device=cpu",
        "--precision=fp32",
        "--sequence-length=16",
        f"--out-folder={tmp_path / 'new'}",
    ]
    monkeypatch.setattr(sys, "argv", ["llama_speed", *given])
    assert llama_speed.main() == (theirs != 2.001)
    told = capsys.readouterr()
    assert ("twin-flash: expected the first losses within 0.02" in told.err) == (theirs != 2.001)
    assert f"{'transformers':<{gpu_step.NAME_WIDTH}} failed: absent" in told.out
    record = json.loads((tmp_path / "new" / "cpu-llama-speed-tiny-llama.json").read_text())
    assert record["figures"]["handgrad"]["tokens_per_second"] == 2 * 4 * 2 * 16
    assert record["figures"]["handgrad"]["times_best_twin"] == 1.0
    assert record["figures"]["transformers"] == {"failed": "absent"}


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("handgrad,twin-flush", "unknown contender 'twin-flush'"),
        ("twin-plain", "with fused attention, found 'twin-plain'"),
        ("transformer", "unknown contender 'transformer'"),
        ("transformers+ligr", r"unknown contender 'transformers\+ligr'"),
        ("twin-flash+torchao", "the torchao twins need --precision fp8, found bf16 for 'twin-flash"),
    ],
)
def test_usage(text: str, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llama_speed, "check_libraries", lambda switches: None)
    with pytest.raises(UsageError, match=told):
        llama_speed.check_contenders(text, "bf16")


def test_the_contenders_of_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    """handgrad and the fastest twins, each in fp8 and in bf16."""
    monkeypatch.setattr(llama_speed, "check_libraries", lambda switches: None)
    settings = dataclasses.replace(SMALL, precision="fp8")
    names = llama_speed.check_contenders(llama_speed.default_contenders("fp8"), "fp8")
    found = [gpu_step.precision_of(name, settings) for name in names]
    assert names[0] == "handgrad" and found.count("fp8") == found.count("bf16") == 3
    for name in llama_speed.check_contenders(llama_speed.default_contenders("bf16"), "bf16"):
        assert "torchao" not in name and "fp8" not in name


def test_contenders_in_fp8_are_the_same_model() -> None:
    """As near as the check of the first losses asks; the twins are in bf16 here, and transformers' Trainer would be."""
    fp8 = dataclasses.replace(SMALL, precision="fp8")
    run = llama_speed.make_run("handgrad", fp8)
    assert isinstance(run, contenders.HandgradRun) and run.stepper.design.fp8 is not None
    losses = run.turn(lambda launched: launched < llama_speed.FIRST_STEPS)
    for name in ("handgrad-bf16", "twin-flash+stream"):
        others = losses_of(name, fp8, llama_speed.FIRST_STEPS)
        assert others != losses and others == pytest.approx(losses, abs=llama_speed.LARGEST_DIFFERENCE)


def test_the_torchao_twin_is_the_same_model() -> None:
    pytest.importorskip("torchao", reason="torchao is optional")
    from torchao.float8.float8_linear import Float8Linear

    fp8 = dataclasses.replace(SMALL, precision="fp8")
    run = llama_speed.make_run("twin-flash+stream+torchao", fp8)
    assert isinstance(run, contenders.TwinRun)
    converted = {name for name, part in run.trainer.twin.named_modules() if isinstance(part, Float8Linear)}
    layers = range(fp8.config().num_layers)
    assert converted == {f"blocks.{i}.{name}" for i in layers for name in ("qkv", "proj", "gate_up", "down")}
    losses = run.turn(lambda launched: launched < llama_speed.FIRST_STEPS)
    others = losses_of("handgrad", fp8, llama_speed.FIRST_STEPS)
    assert others != losses and others == pytest.approx(losses, abs=llama_speed.LARGEST_DIFFERENCE)
