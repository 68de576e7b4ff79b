"""`handgrad gradcheck` finds every gradient right, and names the operation, or the part of a network, whose is not."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from handgrad.cli import main
from handgrad.commands import gradcheck
from handgrad.ops import OPERATIONS, PICTURE_OPERATIONS, reference
from handgrad.tools import gradient_checks
from handgrad.tools.gradient_checks import TOLERANCE, Compared, check_models, differences, slope

ROOT = Path(__file__).parents[1]
# Compositions of operations with a case of their own: the networks run them.
COMPOSED = {"gelu_linear_backward", "relu2_linear_backward", "swiglu_linear_backward", "bias_backward"}


def wrong(operation: Any, factor: float) -> Any:
    """The operation, with its first result times `factor`."""

    def changed(result: Tensor, *arguments: Any, **settings: Any) -> None:
        operation(result, *arguments, **settings)
        result.mul_(factor)

    return changed


def test_every_gradient_is_right(capsys: pytest.CaptureFixture) -> None:
    assert main(["gradcheck"]) == 0
    lines = capsys.readouterr().out.splitlines()[1:]
    assert all(line.startswith("ok    ") for line in lines)
    assert [line.split()[1].rstrip(":,") for line in lines[:7]] == list(gradient_checks.CASES)[:7]
    assert [line.split()[1] for line in lines[-6:]] == ["gpt2:", "modern:", "llama:", "gemma3:", "olmo:", "vqvae:"]


def test_every_backward_has_a_case() -> None:
    backwards = {name for name in (*OPERATIONS, *PICTURE_OPERATIONS) if name.endswith("_backward")}
    assert {name.partition(",")[0] for name in gradient_checks.CASES} == backwards - COMPOSED


@pytest.mark.parametrize("name", gradient_checks.CASES)
def test_a_millionth_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of any result of the operation: the first, which is an input's gradient or the losses."""
    operation = name.partition(",")[0]
    monkeypatch.setattr(gradient_checks, "CASES", {name: gradient_checks.CASES[name]})
    (checked,) = gradient_checks.check_operations()
    assert not checked.wrong and max(found.error for found in checked.gradients) < TOLERANCE / 10
    monkeypatch.setattr(reference, operation, wrong(getattr(reference, operation), 1 + 1e-6))
    (checked,) = gradient_checks.check_operations()
    assert checked.wrong[0].error >= 0.99e-6, "more where the result was added to a stream or a sum"


def test_the_operation_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    place = gradient_checks.place_of("gelu_backward")
    path, line = place.split(":")
    assert (ROOT / path).read_text().splitlines()[int(line) - 1].startswith("def gelu_backward(")
    monkeypatch.setattr(gradient_checks, "place_of", lambda name: place)
    monkeypatch.setattr(reference, "gelu_backward", wrong(reference.gelu_backward, 1.02))
    assert main(["gradcheck"]) == 76
    shown = capsys.readouterr()
    assert "FAIL  gelu_backward: inp 2e-02" in shown.out and "gpt2" not in shown.out
    assert shown.err.startswith("handgrad: the gradient of inp from gelu_backward does not match the forward: at [")
    assert shown.err.endswith(f"a relative error of 0.02 over all (at most 1e-07); see {place}\n")


def test_a_gradient_that_is_no_number_is_wrong(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setattr(reference, "linear_backward", wrong(reference.linear_backward, torch.nan))
    assert main(["gradcheck"]) == 76
    assert "the gradient of inp from linear_backward" in (err := capsys.readouterr().err) and " nan by hand" in err


def test_the_part_of_the_network_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    """While every operation is right: here a composition of two."""
    monkeypatch.setattr(reference, "gelu_linear_backward", wrong(reference.gelu_linear_backward, 1.01))
    assert main(["gradcheck"]) == 76
    shown = capsys.readouterr()
    assert [line.split()[1] for line in shown.out.splitlines() if line.startswith("FAIL")] == ["gpt2:"]
    found = shown.err.partition("nearest to the loss ")[2]
    near, _, right = found.partition("; right beside them: ")
    assert "blocks.1.fc_weight" in near and "blocks.0" not in near
    assert right == "blocks.1.fcproj_weight, blocks.1.fcproj_bias; see the backward in handgrad/models/gpt2.py\n"


def found_wrong(monkeypatch: pytest.MonkeyPatch, name: str, changed: Any) -> list[str]:
    """The gradients that a changed operation of the reference gives a case of its own wrong."""
    monkeypatch.setattr(gradient_checks, "CASES", {name: gradient_checks.CASES[name]})
    monkeypatch.setattr(reference, name, changed)
    (checked,) = gradient_checks.check_operations()
    return [compared.of for compared in checked.wrong]


def test_a_sum_in_the_place_of_a_result_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """An operation that adds to what it should write."""
    right = reference.linear_backward

    def adding(dinp: Tensor, *arguments: Any) -> None:
        before = dinp.clone()
        right(dinp, *arguments)
        dinp.add_(before)

    assert found_wrong(monkeypatch, "linear_backward", adding) == ["inp"]


def test_tokens_mixed_up_are_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradients of a batch's tokens differ."""
    right = reference.linear_backward

    def mixing(dinp: Tensor, dweight: Tensor, dbias: Tensor, dout: Tensor, *arguments: Any) -> None:
        right(dinp, dweight, dbias, dout.flip(0), *arguments)

    assert found_wrong(monkeypatch, "linear_backward", mixing) == ["inp", "weight"]


def test_a_result_in_the_place_of_a_sum_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the head makes its weight's gradient in several chunks of tokens."""
    right = reference.linear_backward

    def clearing(dinp: Tensor, dweight: Tensor, *arguments: Any, **settings: Any) -> None:
        dweight.zero_()
        right(dinp, dweight, *arguments, **settings)

    assert found_wrong(monkeypatch, "linear_backward", clearing) == ["weight"]
    heads = [[compared.of for compared in checked.wrong] for checked in check_models()]
    assert heads == [["wte"], ["wte"], ["head"], ["wte"], ["head"], []], (
        "the Llama and the OLMo do not tie it to the embedding"
    )


@pytest.mark.nightly(but=["swiglu_linear_backward-llama+olmo"])
@pytest.mark.parametrize(
    ("operation", "network"),
    [
        ("gelu_linear_backward", "gpt2"),
        ("relu2_linear_backward", "modern"),
        ("qk_norm_rotary_backward", "modern"),
        ("swiglu_linear_backward", "llama+olmo"),
        ("geglu_backward", "gemma3"),
    ],
)
def test_a_millionth_is_found_in_a_network(operation: str, network: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a composition in the blocks, whatever its weights and biases are at the start."""
    monkeypatch.setattr(reference, operation, wrong(getattr(reference, operation), 1 + 1e-6))
    found = {checked.name: len(checked.wrong) for checked in check_models()}
    assert all(found.pop(each) > 2 for each in network.split("+")) and not any(found.values())


def test_the_mistake_is_told_where_it_is(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    """The first wrong operation, and its number that is farthest off."""

    def off(operation: Any) -> Any:
        def changed(result: Tensor, *arguments: Any) -> None:
            operation(result, *arguments)
            result[3, 2] += 1000

        return changed

    for name in ("gelu_backward", "swiglu_backward"):
        monkeypatch.setattr(reference, name, off(getattr(reference, name)))
    monkeypatch.setattr(gradient_checks, "place_of", str)
    assert main(["gradcheck"]) == 76
    found = re.search(r"of inp from gelu_backward .* at \[3, 2\] (\S+) by hand, (\S+) by dif", capsys.readouterr().err)
    assert found and float(found[1]) - float(found[2]) == pytest.approx(1000, rel=1e-3)


def test_the_largest_error_of_a_network_is_shown(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    errors = {"a": 2e-9, "b": 8e-9, "c": 1e-9}
    gradients = [Compared(of, error, "", 0.0, 0.0) for of, error in errors.items()]
    monkeypatch.setattr(gradient_checks, "CASES", {})
    monkeypatch.setattr(gradcheck, "check_models", lambda: iter([gradient_checks.Checked("gpt2", "", gradients)]))
    assert main(["gradcheck"]) == 0
    assert capsys.readouterr().out.endswith("ok    gpt2: 3 parameters of two layers, at most 8e-09 (b)\n")


def test_a_change_of_both_ways_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """An activation of one's own needs no second program to be checked: SiLU, as docs/architecture.md has it."""
    section = (ROOT / "docs" / "architecture.md").read_text().split("## Trying an idea")[1]
    lines = section.split("```text\n")[1].partition("\n\n")[0].splitlines()

    def forward(out: Tensor, inp: Tensor) -> None:
        exec(lines[0], {"torch": torch, "out": out, "inp": inp})

    def backward(dhidden_inout: Tensor, inp: Tensor) -> None:
        names = {"torch": torch, "inp": inp}
        exec("\n".join(lines[1:]), names)
        dhidden_inout.mul_(names["slope"])

    monkeypatch.setattr(gradient_checks, "CASES", {"gelu_backward": gradient_checks.CASES["gelu_backward"]})
    monkeypatch.setattr(reference, "gelu_forward", forward)
    assert [found.right for checked in gradient_checks.check_operations() for found in checked.gradients] == [False]
    monkeypatch.setattr(reference, "gelu_backward", backward)
    assert [found.right for checked in gradient_checks.check_operations() for found in checked.gradients] == [True]


def test_differences_of_a_polynomial() -> None:
    """x^3: 3 x^2, by h^2 too large."""
    x = torch.tensor([[1.0, -2.0], [0.5, 3.0]], dtype=torch.float64)
    before = x.clone()
    found = differences(lambda: (x**3).sum().item(), x)
    torch.testing.assert_close(found, 3 * x**2, rtol=1e-8, atol=1e-8)
    direction = torch.tensor([[1.0, 0.0], [0.0, 1.0]], dtype=torch.float64)
    assert slope(lambda: (x**3).sum().item(), x, direction) == pytest.approx(3 + 27, rel=1e-8)
    assert torch.equal(x, before), "set back"
