"""Captures of CUDA graphs: no garbage is collected in between."""

import gc
import weakref

import pytest

from handgrad.machine.graphs import no_collection


class Cycle:
    def __init__(self) -> None:
        self.me = self


def test_no_garbage_is_collected_during_a_capture() -> None:
    """However much a launch allocates; and afterwards it is again."""
    garbage = weakref.ref(Cycle())
    with no_collection():
        kept = [[] for _ in range(200_000)]
        assert garbage() is not None and kept
    assert gc.isenabled()
    gc.collect()
    assert garbage() is None


def test_the_collector_is_left_as_it_was() -> None:
    with pytest.raises(ZeroDivisionError), no_collection():
        _ = 1 / 0
    assert gc.isenabled()
    gc.disable()
    try:
        with no_collection():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
