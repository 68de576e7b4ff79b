"""A CPU's threads do not change a bit, whatever their number: sizes that no number divides, every architecture, and every
call of torch by itself."""

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from handgrad.joins.dropout import reference as dropout_reference
from handgrad.joins.fp8 import reference as fp8_reference
from handgrad.joins.lora import bind as lora
from handgrad.ops import cases as operation_cases, cpu, reference
from handgrad.ops.cpu.linear import GRAIN_ELEMENTS, VECTOR_ELEMENTS, whole_vectors
from handgrad.run.open import train
from handgrad.settings.config import RunConfig
from handgrad.tools.kernel_checks import fp8, operations
from handgrad.tools.kernel_checks.fp8 import Fp8Draw
from tests.conftest import small_run

# 513 tokens a step: products, attention and every operation on each element have enough to do for several threads.
ROOT = Path(__file__).parents[1]
ODD = {"num_layers": 1, "num_heads": 5, "channels": 340, "sequence_length": 171, "micro_batch": 3, "tokens_per_step": 513}
SHORT = {"steps": 1, "eval_every": 0, "save_every": 0, "sample_tokens": 0, "audit_every": 1}
NETWORKS = {
    "gpt2": {},
    "gpt2 in bf16": {"precision": "bf16"},
    "gpt2 with dropout": {"dropout": 0.1},
    "modern": {"architecture": "modern"},
    "modern with value embeddings and Muon": {
        "architecture": "modern",
        "optimizer": "muon",
        "techniques": "rotary,qk_norm,softcap,value_embeddings,residual_scalars,input_scalars",
    },
    "llama": {"architecture": "llama", "llama": "kv_heads=1,qk_norm"},
}


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


NUMBERS = (1, 2)


@pytest.fixture(scope="module")
def runs(shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of each network by each number of threads, NUMBER/NETWORK: a process for each, whose environment names it as
    people do. (In torch's attention backward MKL has other bits on an Intel CPU after `torch.set_num_threads(1)`.)"""
    folder = tmp_path_factory.mktemp("threads")
    config = json.dumps(dataclasses.asdict(small_run(shards, folder)))
    for number in NUMBERS:
        command = [sys.executable, "-m", "tests.test_thread_bits", config]
        environment = {**os.environ, "OMP_NUM_THREADS": str(number)}
        subprocess.run(
            [*command, str(folder / str(number))], cwd=ROOT, env=environment, check=True, stdout=subprocess.DEVNULL
        )
    return folder


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.skipif(os.cpu_count() == 1, reason="torch has one thread on one core")
def test_any_number_of_threads_gives_the_same_bits(network: str, runs: Path) -> None:
    found = []
    for number in NUMBERS:
        links = [json.loads(line) for line in (runs / str(number) / network / "audit.jsonl").read_text().splitlines()]
        assert f", {number} threads" in links[0]["versions"]["device"]
        found.append([(link["state"], link["loss"], link["norm"]) for link in links if "loss" in link])
    assert len(found[0]) == SHORT["steps"]
    assert found[0] == found[1]


@pytest.mark.parametrize("operation", ["swiglu", "geglu", "gelu", "classifier"])
def test_functions_that_round_otherwise_in_vectors(operation: str) -> None:
    """Of many numbers, as few of those between two threads' stretches differ."""
    hidden = torch.randn(513, 2 * 1360, generator=torch.Generator().manual_seed(0))
    targets, scale = torch.zeros(513, dtype=torch.int64), torch.ones(1)

    def made() -> Tensor:
        out, changed, losses = torch.empty(513, 1360), hidden.clone(), torch.empty(513)
        if operation == "swiglu":
            cpu.swiglu_forward(out, hidden)
            cpu.swiglu_backward(changed, out, hidden)
        elif operation == "geglu":
            cpu.geglu_forward(out, hidden)
            cpu.geglu_backward(changed, out, hidden)
        elif operation == "gelu":
            cpu.gelu_forward(changed, hidden)
            cpu.gelu_backward(changed, hidden)
        else:
            changed = 15 * hidden[:, 1:]
            cpu.classifier_forward_backward(losses, changed, targets, scale, vocab_size=2700, softcap=15.0)
        return changed

    found = []
    for number in (1, 3, 5, 7):
        torch.set_num_threads(number)
        found.append(made())
    assert all(torch.equal(found[0], other) for other in found[1:])


# Calls whose numbers depend on no order, beside views and elementwise operations.
ORDERLESS = {"randn", "randint", "empty", "empty_like", "new_empty", "full", "full_like", "clone", "copy_", "_to_copy"}


class RepeatedCalls(TorchDispatchMode):
    """Repeats each call of torch that threads may share a hundred times, by one to four of them, once for its sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.seen, self.unequal = set[str](), set[str]()

    def __torch_dispatch__(self, call: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = [leaf for leaf in tree_leaves((args, kwargs or {})) if isinstance(leaf, Tensor)]
        orderless = call.is_view or torch.Tag.pointwise in call.tags or call.overloadpacket.__name__ in ORDERLESS
        shared = any(tensor.numel() >= GRAIN_ELEMENTS for tensor in tensors)
        name = f"{call} {[(tensor.dtype, *tensor.shape) for tensor in tensors]}"
        if shared and not orderless and name not in self.seen:
            self.seen.add(name)
            for number in (1, 2, 3, 4):
                torch.set_num_threads(number)
                results = [self.results(call, args, kwargs or {}) for _ in range(25)]
                if not all(all(map(torch.equal, results[0], other)) for other in results):
                    self.unequal.add(name)
            torch.set_num_threads(1)
        return call(*args, **kwargs or {})

    def results(self, call: Any, args: Any, kwargs: Any) -> list[Tensor]:
        """The bytes of what the call returns and of what it changes, on copies of its arguments."""
        args, kwargs = tree_map_only(Tensor, Tensor.clone, (args, kwargs))
        tensors = (leaf for leaf in tree_leaves((call(*args, **kwargs), args, kwargs)) if isinstance(leaf, Tensor))
        return [tensor.reshape(-1).contiguous().view(torch.uint8) for tensor in tensors]


@pytest.mark.nightly  # the runs above have these calls
def test_every_call_of_torch_repeats_its_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the cases of `doctor`, with just enough rows for several threads."""
    monkeypatch.setitem(operation_cases.SIZES, "T", 160)
    for module in (operation_cases, operations, fp8):
        monkeypatch.setattr(module, "T", 160, raising=False)
        monkeypatch.setattr(module, "N", 320)
    cpu_device, repeated = torch.device("cpu"), RepeatedCalls()
    drawn = operation_cases.Draw(torch.float32, cpu_device)
    cases = [(ops, *case) for ops in (reference, cpu) for case in operations.CASES.items()]
    cases += [(dropout_reference, *case) for case in operations.DROPOUT_CASES.items()]
    for ops, line, make in cases:
        arguments = make(drawn)
        with repeated:
            getattr(ops, operations.operation_of(line))(**arguments)
    inp, weight, dout = drawn(320, 128), drawn(512, 128), drawn(320, 512)
    with repeated:
        lora.add_linear_forward(dout.clone(), inp, weight)
        lora.add_linear_backward(inp.clone(), weight.clone(), dout, inp, weight)
        for case in ("quantize to fp8", "transpose of fp8", "linear_forward in fp8", "linear_backward in fp8"):
            list(fp8.FP8_CASES[case](fp8_reference, Fp8Draw(fp8_reference, cpu_device)))
    assert len(repeated.seen) > 50 and not repeated.unequal


@pytest.mark.parametrize("threads", [1, 2, 3, 7, 64])
@pytest.mark.parametrize("elements", [1, 100, GRAIN_ELEMENTS, 2 * GRAIN_ELEMENTS + 1, 513 * 1360, 5 * GRAIN_ELEMENTS - 1])
def test_stretches_of_threads_are_whole_vectors(elements: int, threads: int) -> None:
    """As torch cuts them: a thread for each begun grain, stretches of equal length rounded up."""
    whole = whole_vectors(elements, threads)
    used = min(threads, -(-whole // GRAIN_ELEMENTS))
    assert elements - whole < max(threads, 1) * VECTOR_ELEMENTS or used == 1
    assert used <= 1 or -(-whole // used) % VECTOR_ELEMENTS == 0
    rest = elements - whole
    assert rest <= GRAIN_ELEMENTS and (whole == elements or whole % VECTOR_ELEMENTS == 0)


if __name__ == "__main__":
    for _network, _changes in NETWORKS.items():
        _values: dict[str, Any] = json.loads(sys.argv[1]) | ODD | SHORT | _changes
        train(RunConfig(**_values | {"out": f"{sys.argv[2]}/{_network}"}))
