"""benchmarks/tuned_tables.py on a CUDA GPU: both steps are captured, and only the first one plans with the table."""

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

from benchmarks import tuned_tables
from benchmarks.contenders import Settings, tokens_of
from handgrad.ops.cuda import cublaslt


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_a_step_with_and_without_a_table(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The table has one algorithm for each product, the heuristic's own: so both steps take equal ones."""
    if precision == "fp8" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("fp8 needs Ada or Hopper")
    monkeypatch.setattr(cublaslt, "PLANS", {})
    monkeypatch.setattr(cublaslt, "frozen_algorithms", dict)
    settings = Settings(model="tiny", micro_batch=4, sequence_length=64, micro_steps=2, precision=precision)
    config, tokens = settings.config(), tokens_of(settings)
    without = tuned_tables.measure(config, tokens, {}, 1, 0.05)
    rows = {p.name(): [f"{int(word):x}" for word in plan.algorithm] for p, plan in cublaslt.PLANS.items()}
    assert rows and without["products"] == len(rows) and without["products_in_the_table"] == 0
    figures = tuned_tables.measure(config, tokens, rows, 2, 0.05)
    assert figures["products"] == figures["products_in_the_table"] == len(rows)
    assert not cublaslt.frozen_algorithms(), "the second step was planned without"
    assert len(figures["table_by_turn"]) == len(figures["heuristic_by_turn"]) == 2
    assert abs(figures["speed_lost_without_the_table"]) < 1
