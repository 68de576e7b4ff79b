"""Attention's kernels compiled for GPUs that are not there."""

import pytest

pytest.importorskip("triton")

from tests.distributed.runs import Launcher
from tests.kernels.attention_kernel_table import check
from tests.kernels.tables import compiled_rows


def test_shipped_configurations_compile(launcher: Launcher) -> None:
    """No spills, within shared memory, and on Hopper with its own tensor-core instructions."""
    rows = compiled_rows(launcher, "attention")
    assert len(rows) == 135
    check(rows)
