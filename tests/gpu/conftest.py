"""Shared by the tests on a CUDA GPU."""

from collections.abc import Iterator

import pytest
import torch

KEPT_BYTES = 1 << 30


@pytest.fixture(autouse=True)
def memory_given_back() -> Iterator[None]:
    """What torch keeps of a test's memory goes back to the GPU, which the workers of `pytest -n` share: 14 that each
    kept the 13 GB of a reference in float64 would fill an H200."""
    yield
    if torch.cuda.is_available() and torch.cuda.memory_reserved() > KEPT_BYTES:
        torch.cuda.empty_cache()
