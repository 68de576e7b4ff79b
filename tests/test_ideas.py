"""The lines of docs/architecture.md that try an idea fit the reference, and their gradients are autograd's."""

import inspect
import re
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from handgrad.ops import reference
from handgrad.ops.reference import attention, decode

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def ideas() -> dict[str, str]:
    """The lines by the name of the operation that they belong into."""
    section = (ROOT / "docs" / "architecture.md").read_text().split("## Trying an idea")[1]
    (block,) = re.findall(r"```text\n(out\.copy_.*?)```", section, re.S)
    activation, loss, optimizer = block.split("\n\n")
    return {"gelu": activation, "classifier_forward_backward": loss, "adamw_update": optimizer}


def test_the_activation(ideas: dict[str, str]) -> None:
    inp = torch.linspace(-9, 9, 91, dtype=torch.float64, requires_grad=True)
    expected = F.silu(inp)
    (gradient,) = torch.autograd.grad(expected.sum(), inp)
    names: dict[str, Any] = {"torch": torch, "inp": inp.detach(), "out": torch.empty_like(inp.detach())}
    exec(ideas["gelu"], names)
    torch.testing.assert_close((names["out"], names["slope"]), (expected.detach(), gradient), rtol=1e-12, atol=1e-14)
    assert "slope = " in inspect.getsource(reference.gelu_backward) and "out.copy_(" in inspect.getsource(
        reference.gelu_forward
    )


def test_a_change_of_attentions_scores_reaches_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    """A text is written by the formula that was trained: token by token, and several tokens at once."""
    formula = attention.masked_scores
    capped = {"changed": False}

    def masked_scores(q: torch.Tensor, k: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        capped["changed"] = True
        return formula(q, k, torch.zeros_like(hidden)).div_(2).tanh_().mul_(2).masked_fill_(hidden, -torch.inf)

    monkeypatch.setattr(attention, "masked_scores", masked_scores)
    B, T, H, D, double = 2, 7, 3, 8, torch.float64
    qkv = torch.randn(B * T, 3 * H * D, dtype=double, generator=torch.Generator().manual_seed(0)).mul_(3)
    out, lse = torch.empty(B * T, H * D, dtype=double), torch.empty(B, H, T, dtype=double)
    reference.attention_forward(out, lse, qkv)
    caches, written = torch.full((2, B, H, T, D), torch.nan, dtype=double), torch.empty(B, T, H * D, dtype=double)
    for t in range(T):
        token = torch.empty(B, H * D, dtype=double)
        decode.attention_decode(token, *caches, qkv.view(B, T, -1)[:, t], torch.full((B,), t))
        written[:, t] = token
    torch.testing.assert_close(written.view_as(out), out, rtol=1e-12, atol=1e-13)
    places = torch.arange(B), torch.arange(T).repeat(B)
    decode.attention_append(appended := torch.empty_like(out), *caches, qkv, *places)
    torch.testing.assert_close(appended, out, rtol=1e-12, atol=1e-13)
    assert capped["changed"]


@pytest.mark.parametrize("softcap", [0.0, 5.0])
def test_the_term_of_the_loss(softcap: float, ideas: dict[str, str]) -> None:
    """The operation with these lines in the place of its own, with a cap of the logits as well."""
    source = textwrap.dedent(inspect.getsource(reference.classifier_forward_backward))
    old = re.findall(r"^ +losses\[rows\] = .*\n +p = log_p.exp_\(\).*\n", source, re.M)
    assert len(old) == 1
    new = "".join(f"        {line}\n" for line in ideas["classifier_forward_backward"].splitlines())
    names = dict(vars(inspect.getmodule(reference.classifier_forward_backward)))
    names["capped_blocks"] = names["log_softmax_blocks"]
    exec(source.replace(old[0], new), names)
    logits = torch.randn(7, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).mul_(3).requires_grad_()
    targets, V = torch.arange(7), 19
    z = softcap * torch.tanh(logits[:, :V] / softcap) if softcap else logits[:, :V]
    expected = F.cross_entropy(z, targets, reduction="none") + 1e-4 * z.logsumexp(1) ** 2
    (gradient,) = torch.autograd.grad(expected.sum(), logits)
    losses, dlogits = torch.empty(7, dtype=torch.float64), logits.detach().clone()
    one = torch.ones(1, dtype=torch.float64)
    names["classifier_forward_backward"](losses, dlogits, targets, one, vocab_size=V, softcap=softcap)
    torch.testing.assert_close((losses, dlogits), (expected.detach(), gradient), rtol=1e-12, atol=1e-14)


def test_the_optimizer(ideas: dict[str, str]) -> None:
    """Two steps of Lion (https://arxiv.org/abs/2302.06675), in the names of AdamW's own."""
    source = inspect.getsource(reference.adamw_update)
    old = re.findall(r"^    m\.mul_.*?(?=^    keep_moments)", source, re.M | re.S)
    assert len(old) == 1
    b1, b2, lr, decay = 0.9, 0.99, 0.01, 0.1
    w, m = torch.tensor([1.0, -2.0, 3.0]), torch.zeros(3)
    names: dict[str, Any] = {"weight": w.clone(), "m": m.clone(), "beta1": b1, "beta2": b2, "learning_rate": lr}
    for g in (torch.tensor([0.5, -0.1, 0.0]), torch.tensor([-0.01, 4.0, 1.0])):
        w = w - lr * (torch.sign(b1 * m + (1 - b1) * g) + decay * w)
        m = b2 * m + (1 - b2) * g
        exec(ideas["adamw_update"], names | {"g": g, "weight_decay": decay})
    torch.testing.assert_close((names["weight"], names["m"]), (w, m))
    assert all(name in old[0] for name in ("weight.mul_(1 - learning_rate * weight_decay)", "beta1", "beta2"))
