"""Several documents in one row of the batch, each as if it were alone: the inputs that keep them apart.

    document_starts (B, T) int32       the offset in its row at which a token's document starts
    positions (B, T) int64             of a token in its document, from 0, where a model learns its positions
    sorted_by_position (N) int32       0..N-1 ordered by position, equal positions in their order

Attention reads the first: a token sees its own document. Rotary angles are relative, so nothing else changes for them. A
table of positions is read and written like one of words. A model calls its operations as for rows of one document; the
operations that read these inputs are bound here.

Targets below 0 mark tokens that are not trained. Only `Batches.fill` writes them, and only if `Batches.trains_all` is
False; otherwise the classifier's kernels skip the test.
"""

from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

from torch import Tensor

from handgrad.ops.compose import Overlay
from handgrad.ops.reference.attention import Mask


def scratch_sizes(ops: ModuleType) -> Any:
    """The sizes of scratch where attention stays within documents: it has kernels of its own."""
    own = partial(ops.attention_scratch_bytes, documents=True)
    return SimpleNamespace(scratch_bytes=ops.scratch_bytes, attention_scratch_bytes=own)


class WithDocuments(Overlay):
    """The operations `ops` of passes over activations `act` that have these inputs."""

    def __init__(self, ops: Any, act: Any):
        super().__init__(ops)
        self.act = act
        mask = Mask(act.document_starts)
        self.attention_forward = partial(ops.attention_forward, mask=mask)
        self.attention_backward = partial(ops.attention_backward, mask=mask)

    def embedding_forward(self, out: Tensor, tokens: Tensor, wte: Tensor, wpe: Tensor) -> None:
        self.ops.decode.embedding_decode(out, tokens.view(-1), self.act.positions.view(-1), wte, wpe)

    def embedding_backward(
        self, dwte_acc: Tensor, dwpe_acc: Tensor, dout: Tensor, tokens: Tensor, sorted_positions: Tensor, *, scratch: Tensor
    ) -> None:
        by_position = self.act.positions, self.act.sorted_by_position
        self.ops.token_embedding_backward(dwte_acc, dout, tokens, sorted_positions, scratch=scratch)
        self.ops.token_embedding_backward(dwpe_acc, dout, *by_position, scratch=scratch)


class WithMasked(Overlay):
    """The operations `ops`, with the classifier's told that targets may be below 0."""

    def __init__(self, ops: Any):
        super().__init__(ops)
        self.classifier_forward = partial(ops.classifier_forward, untrained=True)
        self.classifier_forward_backward = partial(ops.classifier_forward_backward, untrained=True)


def operations(ops: Any, act: Any, *, masked: bool = False) -> Any:
    """The operations of passes over `act`, where its rows hold several documents or not; `masked`: some tokens are not
    trained."""
    ops = WithMasked(ops) if masked else ops
    return ops if act.document_starts is None else WithDocuments(ops, act)
