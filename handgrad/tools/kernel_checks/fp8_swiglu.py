"""SwiGLU between fp8 products: beside the reference's quantising of the 16-bit result, as in `fp8`."""

from dataclasses import replace
from types import ModuleType

from handgrad.fp8.formats import E4M3, E5M2
from handgrad.tools.kernel_checks.checking import Compared, launch
from handgrad.tools.kernel_checks.draw import Arguments, C, F, N
from handgrad.tools.kernel_checks.fp8_checking import Fp8Draw, numbers, product, requantized
from handgrad.tools.kernel_checks.operations import swiglu_product_backward


def fp8_swiglu(ops: ModuleType, d: Fp8Draw) -> Compared:
    """Forward: the product in 16 bits, and the fp8 rows of its SwiGLU."""
    inp, weight = (d.operand(tensor) for tensor in d.product(2 * F, C).values())
    for current in (False, True):
        out, hidden, plain = d.output((N, F), E4M3, 6, columns=None, current=current), d.empty(N, 2 * F), d.empty(N, F)
        scaling = out.scaling.clone()
        launch(ops.linear_swiglu_forward, {"out": out, "hidden": hidden, "inp": inp, "weight": weight})
        yield product(hidden, numbers(inp) @ numbers(weight).t())
        ops.swiglu_forward(plain, hidden)
        yield from requantized(out, scaling, plain)


def fp8_swiglu_backward(ops: ModuleType, d: Fp8Draw) -> Compared:
    """The gradient before the SwiGLU, the columns of its output, and the weight's gradient from these."""
    for current in (False, True):
        arguments = swiglu_product_backward(d)
        hidden, dinp, before = arguments["hidden"], arguments["dinp"], arguments["dweight_acc"].double()
        dout, weight = d.operand(arguments["dout"], E5M2), d.operand(arguments["weight"])
        dhidden = d.output((N, 2 * F), E5M2, 12, current=current)
        inp = d.output((N, F), E4M3, 5, rows=None)
        scaling = dhidden.scaling.clone()
        given: Arguments = {**arguments, "dhidden": dhidden, "dout": dout, "inp": inp, "weight": weight}
        launch(ops.swiglu_linear_backward, given)
        yield product(dinp, numbers(dout) @ numbers(weight))
        yield product(arguments["dweight_acc"], before + numbers(dout).t() @ numbers(inp))
        dplain, plain = d.empty(N, 2 * F), d.empty(N, F)
        ops.swiglu_backward(dplain, dinp, hidden)
        yield from requantized(dhidden, scaling, dplain)
        ops.swiglu_forward(plain, hidden)
        yield from requantized(replace(inp, rows=None), inp.scaling.clone(), plain, counted=False)
