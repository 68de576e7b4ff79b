"""An optimizer is a file: the tensors of its state, and its update of any range of the flat buffers.

It is a frozen dataclass with

    state(row)          the shapes of a parameter's state by name, in a checkpoint NAME.parameter, float32 or bf16: the
                        parameter's own shape or, if one call updates it whole, a smaller one
    whole(row)          true for a parameter that one call updates whole, with its shape; the others may be cut anywhere
    kind(row)           equal for parameters that one call may update together
    scratch_bytes(...)  bytes of `scratch` in its update: planned, where activations lie until the update
    update(...)         the new weights of the parameters and ranges that this process owns

Nothing else knows the names or the meaning of its state.
"""

from collections.abc import Hashable
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Owned:
    """A range of the flat buffers, or, with its shape, a parameter, that this process updates in one call."""

    kind: Hashable  # of its parameters
    published: Tensor  # the weights that the model reads
    weight: Tensor  # float32 master weights, or `published` itself
    gradient: Tensor
    state: dict[str, Tensor]  # of the same range; of a parameter with the shapes of its state
    first_element: int  # its place in the whole buffer
