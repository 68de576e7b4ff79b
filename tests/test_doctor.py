"""The doctor: what it says without a GPU and with one that is made up, and that a wrong kernel does not pass."""

import inspect
import re
from pathlib import Path
from types import ModuleType

import pytest
import torch

from handgrad import doctor, kernel_checks
from handgrad.kernel_checks import CASES, Draw, check_kernels
from handgrad.ops import reference

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def backend(**changed: object) -> ModuleType:
    made = ModuleType("changed")
    vars(made).update({name: getattr(reference, name) for name in reference.__all__} | changed)
    return made


def test_every_kernel_has_a_case() -> None:
    """Attention in one token and the sum of two tensors are plain torch in both backends."""
    not_kernels = {
        "attention_decode",
        "residual_forward",
        "attention_scratch_bytes",
        "check_sizes",
        "compile_ahead",
        "scratch_bytes",
        "versions",
    }
    assert {operation for operation, _ in CASES.values()} == set(reference.__all__) - not_kernels


def test_the_cases_fit_the_kernels() -> None:
    pytest.importorskip("triton")
    pytest.importorskip("nvmath")
    from handgrad.ops import kernels

    for operation, make in CASES.values():
        inspect.signature(getattr(kernels, operation)).bind(
            **make(Draw(torch.bfloat16, CPU)), **scratch(kernels, operation)
        )


def scratch(ops: ModuleType, operation: str) -> dict[str, torch.Tensor]:
    takes = "scratch" in inspect.signature(getattr(ops, operation)).parameters
    return {"scratch": torch.empty(0, dtype=torch.uint8)} if takes else {}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_the_reference_passes(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_checks, "SCRATCH_BYTES", 64)
    lines = list(check_kernels(reference, CPU, dtype))
    assert len(lines) == len(CASES) and all(well for well, _ in lines), lines
    assert any(re.fullmatch(r"layernorm_backward works \(relative error \d\.\de-\d+, .*\)", line) for _, line in lines)


def half_written(out, inp) -> None:
    reference.gelu_forward(out[:-1], inp[:-1])


def no_memory(*tensors, **settings) -> None:
    raise RuntimeError("out of\nresources")


def spoils_an_input(dbias_acc, dout, *, scratch=None) -> None:
    reference.bias_backward(dbias_acc, dout)
    dout.zero_()


@pytest.mark.parametrize(
    ("operation", "broken", "told"),
    [
        ("gelu_forward", half_written, "gelu_forward failed: relative error inf"),
        ("verdict", no_memory, "verdict failed: RuntimeError: out of resources; use --backend reference"),
        ("bias_backward", spoils_an_input, "bias_backward failed: relative error 1.0e+00"),
        ("loss_sum", lambda sum_acc, losses: None, "loss_sum failed"),
    ],
)
def test_a_wrong_kernel_does_not_pass(operation: str, broken, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_checks, "SCRATCH_BYTES", 64)
    failed = [line for well, line in check_kernels(backend(**{operation: broken}), CPU, torch.bfloat16) if not well]
    assert len(failed) == 1 and failed[0].startswith(told) and "\n" not in failed[0], failed
    assert failed[0].endswith("use --backend reference")


def test_without_a_gpu() -> None:
    assert list(doctor.examine_gpu(CPU)) == [
        (True, "the kernels need an NVIDIA GPU; on cpu runs take the reference operations")
    ]


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
    monkeypatch.setattr("handgrad.backend.why_no_kernels", lambda device: "")
    ops = backend(versions=lambda: {"products": "cuBLASLt 13, 42 algorithms", "attention": "Triton"})
    monkeypatch.setattr("importlib.import_module", {"handgrad.ops.kernels": ops}.__getitem__)
    monkeypatch.setattr(doctor, "check_kernels", lambda *found: iter([(found == (ops, CUDA, torch.float16), "checked")]))
    monkeypatch.setattr(doctor.world, "use_precision", lambda device, precision: doctor.world.DTYPES[precision])
    lines = list(doctor.examine_gpu(CUDA))
    assert lines[-2:] == [
        (True, "products by cuBLASLt 13, 42 algorithms; attention by Triton"),
        (True, "checked"),
    ]


def test_kernels_that_cannot_be_loaded(gpu: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("handgrad.backend.why_no_kernels", lambda device: "")

    def fail(name: str) -> None:
        raise OSError("libcublasLt.so.13:\ncannot open")

    monkeypatch.setattr("importlib.import_module", fail)
    well, line = list(doctor.examine_gpu(CUDA))[-1]
    assert not well and "libcublasLt.so.13" in line and "\n" not in line and line.endswith("use --backend reference")
