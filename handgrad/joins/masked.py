"""Operations for targets below 0, which mark tokens that are not trained.

Only `Batches.fill` writes negative targets, and only if `Batches.trains_all` is False; otherwise the classifier's kernels
skip the test.
"""

from functools import partial
from typing import Any

from handgrad.ops.compose import Overlay


class WithUntrained(Overlay):
    """The operations `ops`, with the classifier's told that targets may be below 0."""

    def __init__(self, ops: Any):
        super().__init__(ops)
        self.classifier_forward = partial(ops.classifier_forward, untrained=True)
        self.classifier_forward_backward = partial(ops.classifier_forward_backward, untrained=True)
