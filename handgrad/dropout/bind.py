"""Binds dropout into the operations of a training.

GPT-2 drops numbers after the embedding, in attention's probabilities, and at the end of both branches of a block, before
they join the residual stream. The model calls operations by their plain names; those at such a site are bound here.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from itertools import count
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from handgrad.arena import Buffer
from handgrad.dropout.masks import Dropout
from handgrad.models.rows import KIND

SAMPLES = "dropout_samples"  # the buffer of the numbers of a micro-batch's samples


def dropout_buffers(batch: int) -> list[Buffer]:
    """The rows that dropout adds to a plan: masks take no memory."""
    return [Buffer(SAMPLES, (batch,), torch.int64, KIND)]


def dropout_operations(ops: ModuleType) -> ModuleType:
    """`handgrad.dropout.reference` or `handgrad.dropout.cuda`, beside the plain operations `ops`."""
    backend = ops.__name__.removeprefix("handgrad.ops.").split(".")[0]
    return import_module(f"handgrad.dropout.{backend}")


def sizing(ops: ModuleType) -> Any:
    """The sizes of scratch that a run with dropout needs: its attention has kernels of its own."""
    own = dropout_operations(ops).attention_scratch_bytes
    return SimpleNamespace(scratch_bytes=ops.scratch_bytes, attention_scratch_bytes=own)


def with_dropout(
    ops: ModuleType, w: Any, g: Any, act: Any, d: Any, *, samples: Tensor, probability: float, seed: int
) -> "WithDropout":
    """The plain operations `ops` with dropout at the sites of GPT-2, for passes over these weights, weight gradients,
    activations and their gradients. samples (B) int64: the numbers of a micro-batch's samples in the run."""
    blocks = [
        Block(
            lse=a.lse,
            proj_bias=b.proj_bias,
            fcproj_bias=b.fcproj_bias,
            dproj_weight_acc=db.proj_weight,
            dproj_bias_acc=db.proj_bias,
            dfcproj_weight_acc=db.fcproj_weight,
            dfcproj_bias_acc=db.fcproj_bias,
        )
        for a, b, db in zip(act.blocks, w.blocks, g.blocks, strict=True)
    ]
    return WithDropout(
        ops,
        dropout_operations(ops),
        samples=samples,
        probability=probability,
        seed=seed,
        blocks=blocks,
        dbranch=d.dln,
    )


@dataclass(frozen=True)
class Block:
    """The tensors by which a call is known to belong to a block: the very objects that the model passes, in every step.
    Objects, since gradients of different blocks may share memory (ZeRO 2)."""

    lse: Tensor  # of its attention
    proj_bias: Tensor
    fcproj_bias: Tensor
    dproj_weight_acc: Tensor
    dproj_bias_acc: Tensor
    dfcproj_weight_acc: Tensor
    dfcproj_bias_acc: Tensor


@dataclass(frozen=True)
class Branch:
    """A product whose output is dropped from before it joins the stream, in the backward."""

    dropout: Dropout
    dbias_acc: Tensor


class WithDropout(ModuleType):
    """The operations of a training that drops numbers. All that are not here are the plain ones."""

    def __init__(
        self,
        ops: ModuleType,
        dropout_ops: ModuleType,
        *,
        samples: Tensor,
        probability: float,
        seed: int,
        blocks: Sequence[Block],
        dbranch: Tensor,
    ):
        """`ops`: the plain operations; `dropout_ops`: `handgrad.dropout.reference` or `handgrad.dropout.cuda`, on the same
        device.

        samples (B) int64: the numbers of the micro-batch's samples in the run. `blocks` in the order of the forward, in
        which sites are numbered, the embedding first. dbranch (N, C): workspace of the backward of attention's projection
        and of the feed-forward's; it may lie where the output gradient of a block's layer norm is written next.
        """
        super().__init__(ops.__name__)
        self.ops, self.dropout_ops, self.dbranch = ops, dropout_ops, dbranch
        sites = (Dropout(samples, probability, seed, site) for site in count())
        self.embedding = next(sites)
        # A tensor as a key stands for the object that it is, not for its numbers.
        self.attention: dict[Tensor, Dropout] = {}
        self.forward: dict[Tensor, Dropout] = {}
        self.backward: dict[Tensor, Branch] = {}
        for block in blocks:
            attention, proj, fcproj = next(sites), next(sites), next(sites)
            self.attention[block.lse] = attention
            self.forward |= {block.proj_bias: proj, block.fcproj_bias: fcproj}
            self.backward[block.dproj_weight_acc] = Branch(proj, block.dproj_bias_acc)
            self.backward[block.dfcproj_weight_acc] = Branch(fcproj, block.dfcproj_bias_acc)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.ops, name)

    def embedding_forward(self, out: Tensor, tokens: Tensor, wte: Tensor, wpe: Tensor) -> None:
        self.ops.embedding_forward(out, tokens, wte, wpe)
        self.dropout_ops.dropout_forward(out, out, self.embedding)

    def embedding_backward(
        self, dwte_acc: Tensor, dwpe_acc: Tensor, dout_inout: Tensor, *tokens: Tensor, scratch: Tensor
    ) -> None:
        """Drops from dout in place: nobody reads it afterwards."""
        self.dropout_ops.dropout_backward(dout_inout, dout_inout, self.embedding)
        self.ops.embedding_backward(dwte_acc, dwpe_acc, dout_inout, *tokens, scratch=scratch)

    def attention_forward(self, out: Tensor, lse: Tensor, qkv: Tensor, *, scratch: Tensor) -> None:
        self.dropout_ops.attention_forward(out, lse, qkv, self.attention[lse])

    def attention_backward(
        self, dqkv: Tensor, dout: Tensor, out: Tensor, lse: Tensor, qkv: Tensor, *, scratch: Tensor
    ) -> None:
        self.dropout_ops.attention_backward(dqkv, dout, out, lse, qkv, self.attention[lse], scratch=scratch)

    def linear_residual_forward(
        self, out: Tensor, residual: Tensor, inp: Tensor, weight: Tensor, bias: Tensor, *, scratch: Tensor
    ) -> None:
        """Writes the product to out and reads it again: the library has no epilogue that drops."""
        self.ops.linear_forward(out, inp, weight, bias, scratch=scratch)
        self.dropout_ops.dropout_residual_forward(out, residual, self.forward[bias])

    # In the backward the output gradient of such a product is not the stream's, but `dbranch`, from which its bias gradient
    # is made here: the layer norm above, which sums the stream's gradient for the plain product, does not.

    def layernorm_backward(self, *tensors: Tensor | None, scratch: Tensor) -> None:
        self.ops.layernorm_backward(*tensors[:-1], None, scratch=scratch)

    def gelu_linear_backward(
        self, dhidden: Tensor, dweight_acc: Tensor, dout: Tensor, *rest: Tensor, scratch: Tensor
    ) -> None:
        branch = self.backward[dweight_acc]
        self.dropout_ops.dropout_backward(self.dbranch, dout, branch.dropout)
        self.ops.gelu_linear_backward(dhidden, dweight_acc, self.dbranch, *rest, scratch=scratch)
        self.ops.bias_backward(branch.dbias_acc, self.dbranch, scratch=scratch)

    def linear_backward(
        self, dinp: Tensor, dweight_acc: Tensor, dbias_acc: Tensor | None, dout: Tensor, *rest: Tensor, scratch: Tensor
    ) -> None:
        branch = self.backward.get(dweight_acc)
        if branch is not None:  # attention's projection
            self.dropout_ops.dropout_backward(self.dbranch, dout, branch.dropout)
            dout, dbias_acc = self.dbranch, branch.dbias_acc
        self.ops.linear_backward(dinp, dweight_acc, dbias_acc, dout, *rest, scratch=scratch)
