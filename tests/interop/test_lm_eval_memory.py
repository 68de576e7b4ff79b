"""The lm-eval adapter on a model with a long context: memory for the texts that are asked for. lm-eval itself, 450 MB with
its dependencies, is replaced by the few names that the adapter takes from it."""

import importlib
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from handgrad.api.model import Model, load
from handgrad.errors import UsageError
from handgrad.generation import decode
from tests.interop.models import make_checkpoint

CONTEXT = 131072


class TemplateLM:
    def __init__(self) -> None:
        self.cache_hook = SimpleNamespace(add_partial=lambda *_: None)

    @property
    def prefix_token_id(self) -> int:
        return self.eot_token_id  # type: ignore[attr-defined]


def windows(tokens: list[int], prefix: int, longest: int, context_len: int) -> Any:
    """(tokens before, tokens to predict) of windows side by side, each after one token of the one before."""
    for start in range(0, len(tokens), longest):
        yield [tokens[start - 1] if start else prefix], tokens[start : start + longest]


def greedy(model: Model, prompt: str, settings: dict[str, int]) -> str:
    """The likeliest text, by a whole forward for each token."""
    ids = list(prompt.encode())
    for _ in range(settings["max_gen_toks"]):
        if (token := int(model.logits([ids])[0, -1].argmax())) == model.tokenizer.end_of_text:
            break
        ids.append(token)
    return bytes(ids[len(prompt) :]).decode(errors="replace")


@pytest.fixture
def adapter(monkeypatch: pytest.MonkeyPatch) -> Any:
    names: dict[str, dict[str, Any]] = {
        "lm_eval": {},
        "lm_eval.models": {},
        "lm_eval.api": {},
        "lm_eval.api.model": {"TemplateLM": TemplateLM},
        "lm_eval.api.registry": {"register_model": lambda name: lambda cls: cls},
        "lm_eval.utils": {"get_rolling_token_windows": windows, "make_disjoint_window": lambda pair: pair},
    }
    for name, members in names.items():
        module = ModuleType(name)
        for member, value in members.items():
            setattr(module, member, value)
        monkeypatch.setitem(sys.modules, name, module)
        if "." in name:
            above, _, last = name.rpartition(".")
            setattr(sys.modules[above], last, module)
    monkeypatch.delitem(sys.modules, "handgrad.evaluation.lm_eval_adapter", raising=False)
    yield importlib.import_module("handgrad.evaluation.lm_eval_adapter")
    sys.modules.pop("handgrad.evaluation.lm_eval_adapter")


@pytest.fixture
def run(tmp_path: Path) -> str:
    sizes = (1, 2, 16, CONTEXT)
    return str(
        make_checkpoint(tmp_path / "run", "bytes", sizes=sizes, architecture="llama", llama="kv_heads=1", data="")[0]
    )


def test_a_long_context_costs_nothing_until_it_is_asked_for(
    adapter: Any, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned: list[int] = []
    make = adapter.make_plan

    def counting(buffers: Any) -> Any:
        planned.append((plan := make(buffers)).total_bytes)
        return plan

    monkeypatch.setattr(adapter, "make_plan", counting)
    model = adapter.HandgradLM(run, device="cpu", max_length=64)
    asked = [
        SimpleNamespace(args=("the river", {"max_gen_toks": 20})),
        SimpleNamespace(args=("a stone", {"max_gen_toks": 9})),
    ]
    found = model.generate_until(asked)
    alone = load(run, device="cpu")
    assert found == [greedy(alone, *request.args) for request in asked]
    whole = make(decode.decode_buffers(model.model.shape, 2, model.dtype, model.model.ops)).total_bytes
    assert len(planned) == 1 and planned[0] * 32 < whole

    text = "the old stone sings over the river. " * 8
    (total,) = model.loglikelihood_rolling([SimpleNamespace(args=(text,))])
    cut = windows(list(text.encode()), 256, 64, 1)
    apart = sum(-alone.losses([before + rest]).sum().item() for before, rest in cut)
    assert total == pytest.approx(apart, rel=1e-5)


def test_the_window_is_the_runs_unless_it_is_given(adapter: Any, run: str) -> None:
    assert adapter.HandgradLM(run, device="cpu", max_length="128").window == 128
    with pytest.raises(UsageError, match="must be at most 131072, the model's own"):
        adapter.HandgradLM(run, device="cpu", max_length=CONTEXT + 1)
