"""Both backends keep one contract: the same operations, called in the same way."""

import inspect

import pytest

pytest.importorskip("triton")
pytest.importorskip("nvmath")

from handgrad.ops import cuda as kernels
from handgrad.ops import reference


def test_both_show_the_same_operations() -> None:
    assert kernels.__all__ == reference.__all__


@pytest.mark.parametrize("name", reference.__all__)
def test_the_same_arguments_in_the_same_order(name: str) -> None:
    """`scratch` is optional in the reference, which does not use it; all else is equal."""
    ours, specified = (inspect.signature(getattr(backend, name)).parameters.values() for backend in (kernels, reference))
    assert [(p.name, p.kind) for p in ours] == [(p.name, p.kind) for p in specified]
    for p, q in zip(ours, specified, strict=True):
        assert p.name == "scratch" or p.default == q.default, p.name
