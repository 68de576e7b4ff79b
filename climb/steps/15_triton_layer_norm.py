"""Step 15: read 15_triton_layer_norm.md, write the kernel, then `handgrad climb check 15`. It needs no GPU."""

import triton
import triton.language as tl


@triton.jit
def triton_layer_norm(y, x, weight, bias, C, epsilon, BLOCK: tl.constexpr):
    """Program n of N writes row n of y: the layer norm of step 4, forward.

    y, x          pointers to (N, C), contiguous, float32 or bf16
    weight, bias  pointers to (C), of the same type
    C             channels; BLOCK, a power of two, is at least C
    epsilon       added to the variance

    All arithmetic is float32; a store rounds by itself.
    """
    raise NotImplementedError  # yours to write
