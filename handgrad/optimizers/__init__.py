"""Optimizers, a file each: its state tensors, and its update of any range of the flat buffers.

An optimizer is a frozen dataclass with

    state(row)          shapes of a parameter's state by name (NAME.parameter in a checkpoint), float32 or bf16: the
                        parameter's shape or, if one call updates it whole, a smaller one
    whole(row)          true if one call updates the parameter whole, with its shape; others may be cut anywhere
    kind(row)           equal for parameters that one call may update together
    scratch_bytes(...)  bytes of `scratch` for an update, planned in memory that activations use before it
    update(...)         updates the parameters and ranges that this process owns

No other code knows the names or the meaning of its state.
"""

from collections.abc import Hashable
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Owned:
    """The target of one update call: a range of the flat buffers, or a whole parameter with its shape."""

    kind: Hashable  # of its parameters
    published: Tensor  # the weights that the model reads
    weight: Tensor  # float32 master weights, or `published` itself
    gradient: Tensor
    state: dict[str, Tensor]  # for the same range, or in the shapes of a whole parameter's state
    first_element: int  # offset in the whole flat buffer
