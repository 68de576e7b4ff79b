"""Binds dropout into the operations of a training.

GPT-2 drops numbers after the embedding, in attention's probabilities, and at the end of both branches of a block, before
they join the residual stream. The model calls operations by their plain names; this module replaces them at these sites.
"""

from importlib import import_module
from itertools import count
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from handgrad.joins.dropout.reference import Dropout
from handgrad.memory.arena import Buffer
from handgrad.memory.rows import KIND
from handgrad.ops.compose import Overlay
from handgrad.ops.reference.attention import Mask
from handgrad.training.feed import SAMPLE_NUMBERS


def buffers(batch: int) -> list[Buffer]:
    """The rows that dropout adds to a plan. Masks take no memory."""
    return [Buffer(SAMPLE_NUMBERS, (batch,), torch.int64, KIND)]


def dropout_operations(ops: ModuleType) -> ModuleType:
    """`handgrad.joins.dropout.reference` or `handgrad.joins.dropout.cuda`, to match the backend's operations `ops`."""
    return import_module(f"handgrad.joins.dropout.{'cuda' if ops.BACKEND.name == 'cuda' else 'reference'}")


def scratch_sizes(ops: ModuleType) -> Any:
    """Scratch sizes for a run with dropout, whose attention has its own kernels."""
    own = dropout_operations(ops).attention_scratch_bytes
    return SimpleNamespace(scratch_bytes=ops.scratch_bytes, attention_scratch_bytes=own)


class WithDropout(Overlay):
    """The operations `ops` with dropout at the sites of GPT-2."""

    def __init__(
        self, ops: ModuleType, w: Any, g: Any, act: Any, d: Any, *, samples: Tensor, probability: float, seed: int
    ):
        """For passes over these weights, weight gradients, activations and their gradients. samples (B) int64: sample
        numbers of the micro-batch in the run.

        Identifies a call's site by a tensor argument: the model passes the same object in every step. (Addresses would not
        do: with ZeRO 2, gradients of different blocks may share memory.) `dbranch` (N, C) is workspace of the backward and
        may share memory with the output gradient of a block's layer norm, which is written next."""
        super().__init__(ops)
        self.dropout_ops, self.dbranch = dropout_operations(ops), d.dln
        self.mask = Mask(act.document_starts)
        sites = (Dropout(samples, probability, seed, site) for site in count())  # in forward order
        self.embedding = next(sites)
        self.sites: dict[Tensor, Dropout] = {}  # keys: attention's lse, a GEMM's bias, or its weight gradient
        self.dbias_acc: dict[Tensor, Tensor] = {}  # of GEMMs into the stream, by weight gradient
        for a, b, db in zip(act.blocks, w.blocks, g.blocks, strict=True):
            self.sites[a.lse], proj, fcproj = next(sites), next(sites), next(sites)
            self.sites |= {b.proj_bias: proj, db.proj_weight: proj, b.fcproj_bias: fcproj, db.fcproj_weight: fcproj}
            self.dbias_acc |= {db.proj_weight: db.proj_bias, db.fcproj_weight: db.fcproj_bias}

    def embedding_forward(self, out: Tensor, tokens: Tensor, wte: Tensor, wpe: Tensor) -> None:
        self.ops.embedding_forward(out, tokens, wte, wpe)
        self.dropout_ops.dropout_forward(out, out, self.embedding)

    def embedding_backward(
        self, dwte_acc: Tensor, dwpe_acc: Tensor, dout_inout: Tensor, *tokens: Tensor, scratch: Tensor
    ) -> None:
        """Applies dropout to dout in place: nothing reads it afterwards."""
        self.dropout_ops.dropout_backward(dout_inout, dout_inout, self.embedding)
        self.ops.embedding_backward(dwte_acc, dwpe_acc, dout_inout, *tokens, scratch=scratch)

    def attention_forward(self, out: Tensor, lse: Tensor, qkv: Tensor, *, scratch: Tensor) -> None:
        self.dropout_ops.attention_forward(out, lse, qkv, self.sites[lse], mask=self.mask)

    def attention_backward(
        self, dqkv: Tensor, dout: Tensor, out: Tensor, lse: Tensor, qkv: Tensor, *, scratch: Tensor
    ) -> None:
        tensors = dqkv, dout, out, lse, qkv
        self.dropout_ops.attention_backward(*tensors, self.sites[lse], scratch=scratch, mask=self.mask)

    def linear_residual_forward(
        self, out: Tensor, residual: Tensor, inp: Tensor, weight: Tensor, bias: Tensor, *, scratch: Tensor
    ) -> None:
        """Writes the GEMM to out and rereads it, because the library has no dropout epilogue."""
        self.ops.linear_forward(out, inp, weight, bias, scratch=scratch)
        self.dropout_ops.dropout_residual_forward(out, residual, self.sites[bias])

    # With dropout, the output gradient of such a GEMM is `dbranch` instead of the stream's gradient. So this class computes
    # its bias gradient. The layer norm above, which sums the stream's gradient for a plain GEMM, does not.

    def layernorm_backward(self, dresidual_inout: Tensor, *tensors: Tensor | None, scratch: Tensor) -> None:
        self.ops.layernorm_backward(dresidual_inout, *tensors[:-1], None, scratch=scratch)

    def drop_branch(self, dweight_acc: Tensor, dout: Tensor) -> Any:
        """Fills `dbranch` from the stream's gradient; returns it in the form that the GEMM reads."""
        self.dropout_ops.dropout_backward(self.dbranch, dout, self.sites[dweight_acc])
        return self.dbranch

    def gelu_linear_backward(
        self, dhidden: Tensor, dweight_acc: Tensor, dout: Tensor, *rest: Tensor, scratch: Tensor
    ) -> None:
        dbranch = self.drop_branch(dweight_acc, dout)
        self.ops.gelu_linear_backward(dhidden, dweight_acc, dbranch, *rest, scratch=scratch)
        self.ops.bias_backward(self.dbias_acc[dweight_acc], self.dbranch, scratch=scratch)

    def linear_backward(
        self, dinp: Tensor, dweight_acc: Tensor, dbias_acc: Tensor | None, dout: Tensor, *rest: Tensor, scratch: Tensor
    ) -> None:
        if dweight_acc not in self.dbias_acc:
            self.ops.linear_backward(dinp, dweight_acc, dbias_acc, dout, *rest, scratch=scratch)
            return
        dbranch = self.drop_branch(dweight_acc, dout)  # attention's projection
        self.ops.linear_backward(dinp, dweight_acc, None, dbranch, *rest, scratch=scratch)
        self.ops.bias_backward(self.dbias_acc[dweight_acc], self.dbranch, scratch=scratch)
