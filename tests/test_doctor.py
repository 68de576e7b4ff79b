"""The doctor: what it says without a GPU and with one that is made up, and that a wrong kernel does not pass."""

import inspect
import re
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch

from handgrad.joins import fp8
from handgrad.joins.dropout.bind import dropout_operations
from handgrad.joins.fp8 import reference as fp8_reference
from handgrad.joins.fp8.formats import AMAX, CLIPPED, E4M3, VANISHED, Form, Quantized
from handgrad.ops import OPERATIONS, SET_UP, cpu, reference
from handgrad.ops.cases import CALLS, TENSOR, Draw
from handgrad.tools import doctor
from handgrad.tools.kernel_checks import checking
from handgrad.tools.kernel_checks.fp8 import FP8_CASES, Fp8Draw, check_fp8_kernels
from handgrad.tools.kernel_checks.operations import CASES, DROPOUT_CASES, check_dropout_kernels, check_kernels, operation_of

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def backend(ops: ModuleType = reference, **changed: object) -> ModuleType:
    made = ModuleType("changed")
    names = *OPERATIONS, *SET_UP, *fp8.OPERATIONS
    vars(made).update({name: getattr(ops, name) for name in names if hasattr(ops, name)} | changed)
    return made


def test_every_kernel_has_a_case() -> None:
    """The rest is plain torch in both backends, or two operations in a row."""
    composed = {name for name in OPERATIONS if "norm_linear_" in name}
    not_kernels = {"store_keys_values", "residual_forward"} | composed
    assert set(map(operation_of, CASES)) == set(OPERATIONS) - not_kernels


def test_the_cases_name_the_arguments_in_order() -> None:
    """And every setting that has no default."""
    for operation, call in CALLS.items():
        parameters = inspect.signature(getattr(reference, operation)).parameters.values()
        positional = [p.name for p in parameters if p.kind == p.POSITIONAL_OR_KEYWORD]
        settings = {p.name for p in parameters if p.kind == p.KEYWORD_ONLY}
        required = {p.name for p in parameters if p.name in settings and p.default is p.empty}
        assert [name for name, _, _ in TENSOR.findall(call)] == positional, operation
        assert required <= {*call.partition("|")[2].split()} <= settings, operation


def test_the_cases_fit_the_kernels() -> None:
    pytest.importorskip("triton")
    pytest.importorskip("nvmath")
    from handgrad.ops import cuda as kernels

    for line, make in CASES.items():
        operation = operation_of(line)
        inspect.signature(getattr(kernels, operation)).bind(
            **make(Draw(torch.bfloat16, CPU)), **scratch(kernels, operation)
        )


def test_the_fp8_cases_fit_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the cases launch is launched as the kernels take it, here on the reference; each quantising operation is."""
    pytest.importorskip("triton")
    pytest.importorskip("nvmath")
    from handgrad.joins.fp8 import cuda as kernels

    monkeypatch.setattr(checking, "SCRATCH_BYTES", 64)
    launched: set[str] = set()

    def taken(name: str):
        def operation(*arguments: object, scratch: object = None, **named: object) -> None:
            signature = inspect.signature(getattr(kernels, name))
            with_scratch = {"scratch": scratch} if "scratch" in signature.parameters else {}
            signature.bind(*arguments, **named, **with_scratch)
            launched.add(name)
            getattr(fp8_reference, name)(*arguments, **named)

        return operation

    names = *OPERATIONS, *fp8.OPERATIONS
    kept = {"statistics_parts": fp8_reference.statistics_parts}
    ops = backend(fp8_reference, **{name: taken(name) for name in names} | kept)
    lines = list(check_fp8_kernels(ops, CPU))
    assert all(well for well, _ in lines), lines
    operations = {name for name in names if "Quantized" in str(inspect.signature(getattr(fp8_reference, name)))}
    quantised_on_the_way = {"bias_backward"}  # the end of `linear_backward`
    assert operations >= {"layernorm_forward", "attention_backward", "linear_residual_forward"}
    assert launched >= {"quantize", "classifier_forward_backward"} | operations - quantised_on_the_way


def scratch(ops: ModuleType, operation: str) -> dict[str, torch.Tensor]:
    takes = "scratch" in inspect.signature(getattr(ops, operation)).parameters
    return {"scratch": torch.empty(0, dtype=torch.uint8)} if takes else {}


@pytest.mark.nightly(but=["torch.float32", "torch.bfloat16"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_the_reference_passes(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checking, "SCRATCH_BYTES", 64)
    lines = list(check_kernels(reference, CPU, dtype))
    assert len(lines) == len(CASES) and all(well for well, _ in lines), lines
    assert any(re.fullmatch(r"layernorm_backward works \(relative error \d\.\de-\d+, .*\)", line) for _, line in lines)


def test_the_operations_of_a_cpu_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """In float32, where most of them are not the reference's. (In 16 bits its library rounds a layer norm's gradients.)"""
    monkeypatch.setattr(checking, "SCRATCH_BYTES", 64)
    lines = list(check_kernels(cpu, CPU, torch.float32))
    assert len(lines) == len(CASES) and all(well for well, _ in lines), lines


def test_the_reference_passes_with_dropout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checking, "SCRATCH_BYTES", 64)
    lines = list(check_dropout_kernels(dropout_operations(reference), CPU, torch.bfloat16))
    assert len(lines) == len(DROPOUT_CASES) and all(well for well, _ in lines), lines


def test_the_dropout_cases_fit_the_kernels() -> None:
    pytest.importorskip("triton")
    pytest.importorskip("nvmath")
    from handgrad.joins.dropout import cuda as kernels

    for line, make in DROPOUT_CASES.items():
        operation = operation_of(line)
        arguments = make(Draw(torch.bfloat16, CPU))
        inspect.signature(getattr(kernels, operation)).bind(**arguments, **scratch(kernels, operation))


def test_the_reference_passes_in_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checking, "SCRATCH_BYTES", 64)
    lines = list(check_fp8_kernels(fp8_reference, CPU))
    assert len(lines) == len(FP8_CASES) and all(well for well, _ in lines), lines
    assert (True, "quantize to fp8 works (no difference)") in lines
    assert any(re.fullmatch(r"linear_backward in fp8 works \(relative error \d\.\de-\d+, .*\)", line) for _, line in lines)


def test_what_the_fp8_cases_quantise_saturates_and_vanishes() -> None:
    """Else a kernel that wraps around or does not count would pass."""
    draw = Fp8Draw(fp8_reference, CPU)
    out = draw.output((192, 128), E4M3, 2)
    fp8_reference.quantize(out, draw(192, 128) ** 7)
    assert (out.statistics[[CLIPPED, VANISHED]] > 10).all()
    assert out.statistics[AMAX].max() * 2.0**2 > 448


def half_written(out, inp) -> None:
    reference.gelu_forward(out[:-1], inp[:-1])


def no_memory(*tensors, **settings) -> None:
    raise RuntimeError("out of\nresources")


def spoils_an_input(dbias_acc, dout, *, scratch=None) -> None:
    reference.bias_backward(dbias_acc, dout)
    dout.zero_()


BROKEN = {
    "gelu_forward": (half_written, "gelu_forward failed: relative error inf"),
    "verdict": (no_memory, "verdict failed: RuntimeError: out of resources; use --backend reference"),
    "bias_backward": (spoils_an_input, "bias_backward failed: relative error 1.0e+00"),
    "loss_sum": (lambda sum_acc, losses: None, "loss_sum failed"),
    "checksum": (lambda out, flat: reference.checksum(out, flat[1:]), "checksum failed: relative error"),
}


def test_a_wrong_kernel_does_not_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several wrong kernels at once: `doctor` reports each of them, and no other."""
    monkeypatch.setattr(checking, "SCRATCH_BYTES", 64)
    ops = backend(**{operation: broken for operation, (broken, _) in BROKEN.items()})
    failed = {line.split()[0]: line for well, line in check_kernels(ops, CPU, torch.bfloat16) if not well}
    assert failed.keys() == BROKEN.keys()
    for operation, (_, told) in BROKEN.items():
        line = failed[operation]
        assert line.startswith(told) and "\n" not in line and line.endswith("use --backend reference"), line


def rounds_elsewhere(out: Quantized, inp: torch.Tensor) -> None:
    fp8_reference.quantize(out, inp)
    assert out.rows is not None
    bits = out.rows.view(torch.uint8)
    bits[bits == bits[0, 0]] ^= 1  # another number in the last place, where it stands


def counts_nothing(out: Form, **arguments: torch.Tensor) -> None:
    fp8_reference.layernorm_forward(out, **arguments)
    if isinstance(out, Quantized):
        out.statistics[CLIPPED:] = 0


def forgets_to_transpose(dqkv: Form, **arguments: torch.Tensor) -> None:
    fp8_reference.attention_backward(replace(dqkv, columns=None) if isinstance(dqkv, Quantized) else dqkv, **arguments)


def one_percent_off(dweight_acc, **arguments) -> None:
    fp8_reference.linear_backward(dweight_acc=dweight_acc, **arguments)
    dweight_acc *= 0.99


def forgets_the_values(dqkv_inout: Form, qkv: torch.Tensor, rstd: torch.Tensor) -> None:
    fp8_reference.qk_norm_backward(dqkv_inout, qkv, rstd)
    if isinstance(dqkv_inout, Quantized) and dqkv_inout.rows is not None:
        dqkv_inout.rows.view(torch.uint8)[:, 2 * qkv.shape[1] // 3 :] = 0


def leaves_the_old_scale(dresidual_inout: Form, *tensors: torch.Tensor, **named: torch.Tensor) -> None:
    given = replace(dresidual_inout, current=False) if isinstance(dresidual_inout, Quantized) else dresidual_inout
    fp8_reference.rmsnorm_backward(given, *tensors, **named)


def no_such_product(**arguments) -> None:
    raise RuntimeError("no algorithm for\ntypes 28 and 29")


@pytest.mark.nightly(
    but=[
        "quantize-rounds_elsewhere-told0",
        "linear_backward-one_percent_off-told3",
        "rmsnorm_backward-leaves_the_old_scale-told6",
    ]
)
@pytest.mark.parametrize(
    ("operation", "broken", "told"),
    [
        ("quantize", rounds_elsewhere, ["quantize to fp8 failed: relative error"]),
        ("layernorm_forward", counts_nothing, ["layernorm_forward to fp8 failed: relative error 1.0e+00, at most 0.0e+00"]),
        (
            "attention_backward",
            forgets_to_transpose,
            [f"attention_backward to fp8{kind} failed: relative error inf" for kind in ("", ", columns in e5m2")],
        ),
        (
            "linear_backward",
            one_percent_off,
            [
                f"linear_backward in fp8{rows} failed: relative error 1.0e-02, at most 9.8e-04 expected"
                for rows in ("", ", of some rows")
            ],
        ),
        (
            "gelu_linear_backward",
            no_such_product,
            ["gelu_linear_backward in fp8 failed: RuntimeError: no algorithm for types 28 and 29; use"],
        ),
        ("qk_norm_backward", forgets_the_values, ["qk_norm_backward to fp8 failed: relative error"]),
        (
            "rmsnorm_backward",
            leaves_the_old_scale,
            [f"rmsnorm_backward to fp8{gain} failed: relative error" for gain in ("", ", without a gain")],
        ),
    ],
)
def test_a_wrong_fp8_kernel_does_not_pass(operation: str, broken, told: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checking, "SCRATCH_BYTES", 64)
    failed = [line for well, line in check_fp8_kernels(backend(fp8_reference, **{operation: broken}), CPU) if not well]
    assert len(failed) == len(told), failed
    for line, beginning in zip(failed, told, strict=True):
        assert line.startswith(beginning) and line.endswith("use --backend reference") and "\n" not in line, line


def test_without_a_gpu() -> None:
    assert list(doctor.examine_gpu(CPU)) == [(True, "the kernels need an NVIDIA GPU; on cpu runs use torch's own kernels")]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A GPU before Ampere, on whose machine no package is installed; returns where the driver says its version."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (7, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "Tesla V100")
    monkeypatch.setattr(doctor, "DRIVER", tmp_path / "version")

    def version(package: str) -> str:
        raise doctor.PackageNotFoundError(package)

    monkeypatch.setattr(doctor, "version", version)
    return tmp_path / "version"


def test_what_is_missing_on_a_gpu(gpu: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu.write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build\nGCC version: 12.3.0\n"
    )
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    lines = list(doctor.examine_gpu(CUDA))
    assert lines[0][0] and "driver 570.86.15" in lines[0][1] and "compute capability 7.0" in lines[0][1]
    assert {line.split()[0]: well for well, line in lines[1:5]} == {
        "triton": False,
        "nvmath-python": False,
        "nvidia-cudnn-frontend": True,
        "nvidia-ml-py": True,
    }
    assert len(lines) == 6 and not lines[5][0]
    assert lines[5][1].startswith("the kernels cannot run here: triton is not installed (pip install 'handgrad[gpu]')")
    assert lines[5][1].endswith("use --backend reference")


def test_a_gpu_that_is_too_old(gpu: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    lines = list(doctor.examine_gpu(CUDA))
    assert "driver of unknown version" in lines[0][1]
    assert "has compute capability 7.0, Triton needs 7.5; or use --backend reference" in lines[-1][1]
    assert doctor.half_precision(CUDA) == "fp16" and doctor.half_precision(CPU) == "bf16"


def test_the_kernels_are_launched(gpu: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("handgrad.machine.backend.why_no_kernels", lambda device: "")
    told = {"products": "cuBLASLt 13, 42 algorithms", "attention": "Triton"}
    asked = {"versions": lambda: told, "tuning": lambda: "algorithms from a table"}
    ops, fp8_ops = backend(**asked), backend(fp8_reference, **asked)
    modules = {"handgrad.ops.cuda": ops, "handgrad.joins.fp8.cuda": fp8_ops}
    modules["handgrad.ops.cuda.launch"] = backend(load_ahead=lambda: None)
    monkeypatch.setattr("importlib.import_module", modules.__getitem__)
    without_muon = {line: make for line, make in doctor.CASES.items() if not line.startswith("muon")}
    expected = ops, CUDA, torch.float16, without_muon
    monkeypatch.setattr(doctor, "check_kernels", lambda *found: iter([(found == expected, "checked")]))
    dropout = object()
    monkeypatch.setattr(doctor, "dropout_operations", {ops: dropout}.__getitem__)
    monkeypatch.setattr(doctor, "check_dropout_kernels", lambda *found: iter([(found[0] is dropout, "with dropout")]))
    monkeypatch.setattr(doctor.devices, "dtype_of", lambda device, precision: doctor.devices.DTYPES[precision])
    lines = list(doctor.examine_gpu(CUDA))
    assert lines[-6:] == [
        (True, "GEMMs by cuBLASLt 13, 42 algorithms; attention by Triton"),
        (True, "algorithms from a table"),
        (True, "checked"),
        (True, "with dropout"),
        (True, "--optimizer muon needs bf16, which compute capability 7.0 lacks: train with adamw"),
        (True, "--precision fp8 needs compute capability 8.9 (Ada, Hopper or newer), this GPU has 7.0: train in fp16"),
    ]
    monkeypatch.setattr(doctor, "check_fp8_kernels", lambda *found: iter([(found == (fp8_ops, CUDA), "checked in fp8")]))
    for capability in ((8, 9), (9, 0), (12, 0)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None, of=capability: of)
        monkeypatch.setattr(doctor, "check_kernels", lambda *found: iter([]))
        assert list(doctor.examine_gpu(CUDA))[-1] == (True, "checked in fp8")


@pytest.mark.fault(42)
def test_kernels_that_cannot_be_loaded(gpu: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("handgrad.machine.backend.why_no_kernels", lambda device: "")

    def fail(name: str) -> None:
        raise OSError("libcublasLt.so.13:\ncannot open")

    monkeypatch.setattr("importlib.import_module", fail)
    well, line = list(doctor.examine_gpu(CUDA))[-1]
    assert not well and "libcublasLt.so.13" in line and "\n" not in line and line.endswith("use --backend reference")
