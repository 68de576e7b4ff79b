"""All backends keep one contract: the same operations, called in the same way."""

import importlib
import inspect

import pytest

pytest.importorskip("triton")
pytest.importorskip("nvmath")

from handgrad.joins import fp8
from handgrad.joins.fp8 import reference as fp8_reference
from handgrad.ops import DECODE_OPERATIONS, OPERATIONS, PICTURE_OPERATIONS, SET_UP, Backend, reference

CONTRACT = OPERATIONS + PICTURE_OPERATIONS + SET_UP
BACKENDS = ("ops.reference", "ops.cpu", "ops.cuda", "ops.cuda.tf32", "joins.fp8.reference", "joins.fp8.cuda")


def arguments(function) -> list:
    """(name, kind, default) of each. The reference does not use `scratch`; what `tf32` and `sums` bind is extra."""
    parameters = inspect.signature(function).parameters.values()
    return [(p.name, p.kind, p.name == "scratch" or p.default) for p in parameters if p.name not in ("tf32", "sums")]


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_operation_with_the_same_arguments(backend: str) -> None:
    module = importlib.import_module(f"handgrad.{backend}")
    assert isinstance(module.BACKEND, Backend)
    for specified, names in ((reference, CONTRACT), (fp8_reference, fp8.OPERATIONS if "fp8" in backend else ())):
        for name in names:
            assert arguments(getattr(module, name)) == arguments(getattr(specified, name)), name


@pytest.mark.parametrize("backend", ["ops.cpu", "ops.cuda", "ops.cuda.tf32"])
def test_every_operation_of_generation_with_the_same_arguments(backend: str) -> None:
    module = importlib.import_module(f"handgrad.{backend}").decode
    for name in DECODE_OPERATIONS:
        assert arguments(getattr(module, name)) == arguments(getattr(reference.decode, name)), name


def test_the_contract_names_every_operation() -> None:
    """The contract holds all that the reference imports into its first file."""
    imported = {name for name, value in vars(reference).items() if inspect.isfunction(value)}
    assert imported == set(CONTRACT)
