"""Operations for targets below 0, which mark tokens that are not trained.

`Batches.fill` alone writes such targets, and only where `Batches.trains_all` is False. So whoever has the batches decides
by it, and where all tokens are trained the classifier's kernels do not ask.
"""

from functools import partial
from typing import Any

from handgrad.models.overlay import Overlay


class WithUntrained(Overlay):
    """The operations `ops`, with the classifier's told that targets may be below 0."""

    def __init__(self, ops: Any):
        super().__init__(ops)
        self.classifier_forward = partial(ops.classifier_forward, untrained=True)
        self.classifier_forward_backward = partial(ops.classifier_forward_backward, untrained=True)
