from torch import Tensor


def two_ranks(pieces: list[Tensor]) -> Tensor:
    while len(pieces) > 1:
        pieces = [a + b for a, b in zip(pieces[::2], pieces[1::2], strict=True)]
    return pieces[0].clone()
