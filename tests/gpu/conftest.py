"""Shared by the tests on a CUDA GPU."""

from collections.abc import Iterator

import pytest
import torch

KEPT_BYTES = 1 << 30


@pytest.fixture(autouse=True)
def memory_given_back() -> Iterator[None]:
    """Returns torch's cached memory to the GPU after a test: the workers of `pytest -n` share it, and each would keep as
    much as its largest test took."""
    yield
    if torch.cuda.is_available() and torch.cuda.memory_reserved() > KEPT_BYTES:
        torch.cuda.empty_cache()
