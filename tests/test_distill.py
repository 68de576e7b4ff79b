"""Distillation: its gradient beside autograd's, its memory, its runs."""

from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from handgrad.ops import cpu, reference
from tests.test_operations import close, equal_autograd, nan, randn

BOTH = pytest.mark.parametrize("ops", [reference, cpu], ids=["reference", "cpu"])


def divergence(z: Tensor, y: Tensor, *, reverse: bool) -> Tensor:
    """torch's KL(q || p), or in reverse KL(p || q), of p = softmax(z) and q = softmax(y)."""
    log_p, log_q = z.log_softmax(1), y.log_softmax(1)
    inputs, targets = (log_q, log_p) if reverse else (log_p, log_q)
    return F.kl_div(inputs, targets, reduction="none", log_target=True).sum(1)


def capped(x: Tensor, softcap: float) -> Tensor:
    return softcap * torch.tanh(x / softcap) if softcap else x


# The gradient.


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("softcap", [0.0, 5.0])
@pytest.mark.parametrize(("N", "V", "Vp"), [(1, 2, 128), (9, 57, 128), (5, 128, 128)])
@BOTH
def test_the_gradient(ops: ModuleType, N: int, V: int, Vp: int, softcap: float, reverse: bool) -> None:
    def definition(logits_to_dlogits_inout: Tensor, teacher_logits: Tensor, **_: Any) -> dict[str, Tensor]:
        z = capped(logits_to_dlogits_inout[:, :V], softcap)
        return {"losses": divergence(z, teacher_logits[:, :V], reverse=reverse)}

    sizes = {"N": N, "V": V, "Vp": Vp, "softcap": softcap, "reverse": reverse}
    ran = equal_autograd(ops, "distill_forward_backward", definition, **sizes)
    assert (ran.of_inputs["logits_to_dlogits_inout"][:, V:] == 0).all()


@pytest.mark.parametrize("reverse", [False, True])
@BOTH
def test_weights_and_untrained_tokens(ops: ModuleType, reverse: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A weight for each token, and no loss without a target, in blocks of two rows."""
    for module in (reference.classifier, cpu.classifier):
        monkeypatch.setattr(module, "CLASSIFIER_BLOCK_ELEMENTS", 2 * 64)
    N, V, Vp = 7, 57, 64
    logits, teacher, weights = randn(N, Vp), randn(N, Vp, seed=1), torch.linspace(-1.0, 2.0, N, dtype=torch.float64)
    targets = torch.arange(N).index_fill(0, torch.tensor([3]), -1)
    leaf, trained = logits.clone().requires_grad_(), (targets >= 0).double()
    expected = divergence(capped(leaf[:, :V], 5.0), teacher[:, :V], reverse=reverse) * trained
    (expected * weights).sum().backward()
    losses, found = nan(N), logits.clone()
    options = {"vocab_size": V, "softcap": 5.0, "untrained": True, "reverse": reverse}
    ops.distill_forward_backward(losses, found, teacher, targets, weights, **options)
    assert leaf.grad is not None
    close(losses, expected.detach())
    close(found, leaf.grad)


@BOTH
def test_a_certain_teacher_is_a_target(ops: ModuleType) -> None:
    """Of a teacher that is sure of the target, the forward divergence is the cross-entropy, bit for bit."""
    N, V = 6, 128
    logits, targets, scale = randn(N, V), torch.arange(N) * 3, torch.full((1,), 0.25, dtype=torch.float64)
    teacher = torch.full((N, V), -1e4, dtype=torch.float64).scatter_(1, targets[:, None], 0.0)
    results = []
    for name, more in (("classifier", ()), ("distill", (teacher,))):
        losses, found = nan(N), logits.clone()
        getattr(ops, f"{name}_forward_backward")(losses, found, *more, targets, scale, vocab_size=V)
        results.append((losses, found))
    assert all(torch.equal(plain, taught) for plain, taught in zip(*results, strict=True))


@pytest.mark.parametrize("reverse", [False, True])
@BOTH
def test_a_student_like_its_teacher_has_nothing_to_learn(ops: ModuleType, reverse: bool) -> None:
    logits, targets, scale = randn(4, 64), torch.zeros(4, dtype=torch.int64), torch.ones(1, dtype=torch.float64)
    losses, found = nan(4), logits.clone()
    ops.distill_forward_backward(losses, found, logits.clone(), targets, scale, vocab_size=57, reverse=reverse)
    assert (losses == 0).all() and (found == 0).all()
