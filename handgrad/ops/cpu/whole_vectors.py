"""Operations on each element whose bits do not depend on the number of threads.

torch gives each thread an equal stretch of a tensor and computes the few elements at its end one by one, where the formula
of some functions (GELU, sigmoid) rounds otherwise than in a vector. Here all stretches but the last are whole vectors.
"""

from collections.abc import Callable

import torch
from torch import Tensor

GRAIN_ELEMENTS = 32768  # torch's least share of a thread: at::internal::GRAIN_SIZE
VECTOR_ELEMENTS = 64  # a multiple of all that torch's loops take at once: two AVX-512 registers of 16-bit numbers


def by_whole_vectors(operation: Callable[..., object], *tensors: Tensor) -> None:
    """Calls `operation`, which computes an element of its output from those at the same place, on contiguous tensors of one
    size: at once if the threads' stretches are whole vectors anyway, else on most of the elements and on the rest."""
    elements = tensors[0].numel()
    whole = whole_vectors(elements, torch.get_num_threads())
    flat = [tensor.view(-1) for tensor in tensors]
    for part in (slice(0, whole), slice(whole, elements)):
        if part.start < part.stop:
            operation(*(tensor[part] for tensor in flat))


def whole_vectors(elements: int, threads: int) -> int:
    """The number of first elements that torch cuts into equal stretches of whole vectors."""
    for used in range(min(threads, -(-elements // GRAIN_ELEMENTS)), 1, -1):
        whole = elements - elements % (used * VECTOR_ELEMENTS)
        if -(-whole // GRAIN_ELEMENTS) >= used:  # so many threads take part in them as well
            return whole
    return elements
