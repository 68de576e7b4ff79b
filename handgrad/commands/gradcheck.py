"""handgrad gradcheck: compares gradients by hand with central differences of the forward; names the first wrong one."""

from argparse import Namespace

from handgrad.errors import NumericsError
from handgrad.tools.gradient_checks import TOLERANCE, Checked, check_models, check_operations


def run(parsed: Namespace) -> int:
    print("gradients by hand beside central differences of the forward: relative errors")
    wrong = []
    for checked in check_operations():
        shown = ", ".join(f"{gradient.of} {gradient.error:.0e}" for gradient in checked.gradients)
        print(f"{mark(checked)}  {checked.name}: {shown}", flush=True)
        wrong += [checked] * bool(checked.wrong)
    if wrong:
        raise NumericsError(mistake(wrong[0]))
    for checked in check_models():
        worst = max(checked.gradients, key=lambda gradient: gradient.error)
        count = f"{len(checked.gradients)} parameters of two layers"
        print(f"{mark(checked)}  {checked.name}: {count}, at most {worst.error:.0e} ({worst.of})", flush=True)
        wrong += [checked] * bool(checked.wrong)
    if wrong:
        raise NumericsError(wiring(wrong[0]))
    return 0


def mark(checked: Checked) -> str:
    return "FAIL" if checked.wrong else "ok  "


def mistake(checked: Checked) -> str:
    """Names the operation whose backward does not match its forward, with an example."""
    gradient = checked.wrong[0]
    return (
        f"the gradient of {gradient.of} from {checked.name} does not match the forward: at {gradient.worst}"
        f" {gradient.by_hand:.6g} by hand, {gradient.by_differences:.6g} by differences, a relative error of"
        f" {gradient.error:.2g} over all (at most {TOLERANCE:g}); see {checked.place}"
    )


def wiring(checked: Checked) -> str:
    """Names the wrong part of a network nearest to the loss: it spoils the gradients that the backward makes after it."""
    part = checked.wrong[-1].of.rpartition(".")[0]
    names = [gradient.of for gradient in checked.wrong if gradient.of.rpartition(".")[0] == part]
    right = [gradient.of for gradient in checked.gradients if gradient.right and gradient.of.rpartition(".")[0] == part]
    return (
        f"every operation is right, but {len(checked.wrong)} of {len(checked.gradients)} gradients of {checked.name} are"
        f" not; nearest to the loss {', '.join(names)}; right beside them: {', '.join(right) or 'none'}; see the backward"
        f" in {checked.place}"
    )
