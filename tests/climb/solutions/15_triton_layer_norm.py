import triton
import triton.language as tl


@triton.jit
def triton_layer_norm(y, x, weight, bias, C, epsilon, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    inside = column < C
    values = tl.load(x + row * C + column, mask=inside, other=0.0).to(tl.float32)
    mean = tl.sum(values, 0) / C
    centred = tl.where(inside, values - mean, 0.0)
    variance = tl.sum(centred * centred, 0) / C
    normal = centred / tl.sqrt(variance + epsilon)
    w = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + row * C + column, normal * w + b, mask=inside)
