"""The forward pass of an fp8 run's checkpoint in fp8, as the run itself validates."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from handgrad.arena import Buffer
from handgrad.config import ModelShape
from handgrad.errors import UsageError
from handgrad.evaluation.load import LoadedModel, Weights
from handgrad.fp8.forward import Fp8Forward
from handgrad.models import architecture, forward_rows, parameter_table
from handgrad.models.documents import document_buffers
from handgrad.models.rows import named
from handgrad.run.checkpointing import with_parts_left
from handgrad.run.resolve import resolve


class CheckpointForward:
    """Runs the GEMMs of a run's checkpoint as the run did: the same ones in fp8, at the same scales."""

    def __init__(self, source: Weights, shape: ModelShape, batch: int, device: torch.device, backend: str, *, packed: bool):
        """For `batch` samples of `shape.sequence_length` tokens at once. Raises `UsageError` for weights without scales."""
        manifest = {} if source.checkpoint is None else source.checkpoint.manifest
        if not manifest.get("fp8"):
            found = source.origin["source"]
            raise UsageError(f"{found} has no fp8 scales: expected a checkpoint of a run in fp8; use --precision bf16")
        if source.config.lora:
            found = source.origin["source"]
            raise UsageError(f"{found} has adapters, which are merged here, beside weights in fp8; use --precision bf16")
        self.saved, self.model = manifest["fp8"], architecture(shape)
        config = replace(source.config, micro_batch=batch, sequence_length=shape.sequence_length, backend=backend)
        design = resolve(with_parts_left(config, manifest), shape.vocab_size, device=device)
        length, chunk = shape.sequence_length, config.head_chunk_tokens
        rows = tuple(forward_rows(shape, batch, length, design.dtype, design.ops, chunk=chunk))
        self.forward = Fp8Forward(design.fp8, parameter_table(shape), rows, shape.fp8_parts)
        documents = document_buffers(self.model, batch, length) if packed else []
        self.activations: list[Buffer] = [*self.forward.activations, *documents]

    def quantized(self, loaded: LoadedModel, activations: dict[str, Tensor]) -> tuple[LoadedModel, dict[str, Any]]:
        """(the loaded model with its weights in fp8, the views of its activations with those in fp8)."""
        table, flat, layers = parameter_table(loaded.shape), loaded.views["parameters"], loaded.shape.num_layers
        weights = {row.name: row.view(flat) for row in table}
        tensors = self.forward.tensors(loaded.ops, loaded.views | activations, weights, self.saved)
        return replace(loaded, weights=named(self.model.Weights, weights | tensors, layers)), activations | tensors
