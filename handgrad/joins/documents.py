"""Document packing: several documents in one row of the batch, each computed as if alone. Inputs that keep them apart:

    document_starts (B, T) int32       start of each token's document, as an offset in the row
    positions (B, T) int64             each token's position in its document, from 0, for learned positions
    sorted_by_position (N) int32       0..N-1 sorted by position, stable

Attention reads the first, so that a token sees only its own document. Rotary angles are relative and need no change.
Operations read and update a position table like a word table. A model makes the same calls as for rows of one document;
this module binds the operations that read these inputs.

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
    """Scratch sizes for attention within documents, which has its own kernels."""
    own = partial(ops.attention_scratch_bytes, documents=True)
    return SimpleNamespace(scratch_bytes=ops.scratch_bytes, attention_scratch_bytes=own)


class WithDocuments(Overlay):
    """The operations `ops` for passes over activations `act` with document inputs."""

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
    """The operations `ops`, with a classifier that accepts targets below 0."""

    def __init__(self, ops: Any):
        super().__init__(ops)
        self.classifier_forward = partial(ops.classifier_forward, untrained=True)
        self.classifier_forward_backward = partial(ops.classifier_forward_backward, untrained=True)
        self.distill_forward_backward = partial(ops.distill_forward_backward, untrained=True)


def operations(ops: Any, act: Any, *, masked: bool = False) -> Any:
    """The operations for passes over `act`, whose rows may hold several documents. `masked`: some tokens not trained."""
    ops = WithMasked(ops) if masked else ops
    return ops if act.document_starts is None else WithDocuments(ops, act)
