"""Loads a model for evaluation and sampling, without the state of training: its weights, the requested buffers, and a
decoder in memory that grows with the longest text."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from handgrad.data.chat_template import template_text
from handgrad.data.tokenizer import Tokenizer
from handgrad.data.tokenizer_loading import read_tokenizer
from handgrad.errors import DataError, UsageError
from handgrad.generation.decode import LEAST_CACHE, decode_buffers, decode_tensors, with_cache
from handgrad.generation.generate import Decoder, SamplingOptions
from handgrad.generation.pictures import decoder_of
from handgrad.machine import devices
from handgrad.machine.backend import choose_backend
from handgrad.memory.arena import Buffer, make_plan
from handgrad.memory.rows import ParameterRow, flat_elements
from handgrad.models import named_weights, parameter_table
from handgrad.networks.modern import of_stored
from handgrad.settings.config import FIELDS, STREAM, WHOLE, ModelShape, RunConfig, check, convert
from handgrad.storage.checkpoint import WEIGHTS_FILE, Checkpoint
from handgrad.storage.run_files import place_of

SIZES = ("num_layers", "num_heads", "channels", "sequence_length")  # of a model, as fields of a configuration
CHAT = "chat"  # in a manifest: true if the shards that a run trained on are conversations
LONGEST_WINDOW = 4096  # tokens; the default limit for a model from elsewhere
CONTEXT, MOST_CONTEXT = "context", 1 << 24  # in a manifest: context in tokens of the weights that a run started from
# All of a model's shape except the vocabulary.
SHAPE = (*SIZES, "architecture", "techniques", "llama", "gemma3", "olmo", "vqvae")


@dataclass(frozen=True)
class Weights:
    """A model's weights in any format, each read on request (`interop.sources` opens them)."""

    shape: ModelShape
    tokenizer: Tokenizer
    weight: Callable[[ParameterRow], Tensor]  # of a row of `shape`'s table: float32, row.stored_shape; or `DataError`
    origin: dict[str, Any]  # for a manifest: "from" a format, "source" in the user's words, "sha256" by file
    config: RunConfig  # of their run; only the sizes for imported weights
    checkpoint: Checkpoint | None = None  # holds them, if they are in a checkpoint of ours


def usual_window(weights: Weights) -> int:
    """Tokens of an evaluation's window: the run's sequence length. At most `LONGEST_WINDOW` for a model that no run of ours
    trained, imported or not: its whole context may not fit in memory."""
    if weights.checkpoint is None or "imported" in weights.checkpoint.manifest:
        return min(weights.shape.sequence_length, LONGEST_WINDOW)
    return weights.config.sequence_length


def trained_on_chats(saved: Checkpoint) -> bool:
    """True for a checkpoint of a run on conversations. Older ones do not record it: for them, packing of whole
    documents decides, the default for conversations."""
    said = saved.manifest.get(CHAT)
    return said if isinstance(said, bool) else checkpoint_config(saved).packing == WHOLE


def is_taught_to_talk(tokenizer: Tokenizer, saved: Checkpoint | None) -> bool:
    """True for a model with its own chat template, and for a checkpoint trained on conversations in the plain template."""
    return template_text(tokenizer) is not None or (saved is not None and trained_on_chats(saved))


def check_window(tokens: int, shape: ModelShape) -> None:
    """Raises `UsageError` for more tokens than the model's context, and for part of a picture."""
    if tokens and shape.network.pictures:
        raise UsageError(f"--context is for models of tokens; {shape.architecture} reads whole pictures")
    if tokens > shape.sequence_length:
        raise UsageError(f"--context must be at most {shape.sequence_length}, the model's own, found {tokens}")


def checkpoint_weights(saved: Checkpoint, named: str = "") -> Weights:
    """The weights of a checkpoint of ours, by the user's name `named`. `DataError`: invalid configuration or tokenizer."""
    tokenizer, config = read_tokenizer(saved.folder, saved.manifest.get("tokenizer")), checkpoint_config(saved)
    config = replace(config, data=data_of(saved))
    digests = {path.name: saved.manifest["files"][path.name]["sha256"] for path in saved.parts(WEIGHTS_FILE)}
    origin = {"from": "checkpoint", "source": named or str(saved.folder), "step": saved.step, "sha256": digests}

    def weight(row: ParameterRow) -> Tensor:
        return saved.tensor(WEIGHTS_FILE, row.name, row.stored_shape).to(torch.float32)

    shape = with_context(config.shape(tokenizer.vocab_size), saved.manifest.get("init"))
    return Weights(shape, tokenizer, weight, origin, config, saved)


def with_context(shape: ModelShape, init: Any) -> ModelShape:
    """Extends a run's shape to the context of the weights that it started from: its rotary positions reach that far, even
    if its rows were shorter. `init`: the manifest's entry about these weights."""
    context = init.get(CONTEXT) if isinstance(init, dict) else None
    if type(context) is not int or not shape.sequence_length < context <= MOST_CONTEXT:
        return shape
    return replace(shape, sequence_length=context)


def checkpoint_config(checkpoint: Checkpoint) -> RunConfig:
    """The configuration of a checkpoint's run, with defaults for newer settings. Raises `DataError` if it is invalid."""
    try:
        stored: dict[str, Any] = of_stored(checkpoint.manifest["config"])
        return check(RunConfig(**{name: convert(name, stored[name]) for name in FIELDS if name in stored}))
    except UsageError as error:
        raise DataError(f"{checkpoint.folder}: its configuration is invalid: {error}") from None


def data_of(saved: Checkpoint, *, needed: bool = False) -> str:
    """The data of a checkpoint's run, as `place_of` finds them."""
    return place_of("data", saved.folder.absolute().parents[1], saved.manifest["config"], saved.manifest, needed=needed)


def imported_config(shape: ModelShape, where: str = "") -> RunConfig:
    """The configuration for imported weights: the model's sizes. Raises `DataError` for invalid ones."""
    sizes = {name: getattr(shape, name) for name in SHAPE}
    step = {"steps": 1, "tokens_per_step": shape.sequence_length, "micro_batch": 1, "lanes": 1, "packing": STREAM}
    try:
        return check(RunConfig(data="", out="", **sizes, **step))
    except UsageError as error:
        raise DataError(f"{where}: its sizes are invalid: {error}") from None


class Machine(NamedTuple):
    """A device, and the dtype and operations of a precision on it."""

    device: torch.device
    precision: str  # never "auto"
    dtype: torch.dtype  # of weights and activations
    ops: ModuleType


def machine(device: torch.device, precision: str, backend: str) -> Machine:
    """The machine of a command that trains nothing; sets torch's switches for it. Raises `UsageError` as
    `devices.dtype_of` and `choose_backend` do."""
    precision = devices.resolve_precision(precision, device)
    dtype = devices.dtype_of(device, precision)
    devices.set_arithmetic(device, precision)
    return Machine(device, precision, dtype, choose_backend(backend, device, precision))


@dataclass
class LoadedModel:
    """Weights in the requested precision, their tokenizer, and the requested buffers."""

    shape: ModelShape
    tokenizer: Tokenizer
    ops: ModuleType
    device: torch.device
    weights: Any
    views: dict[str, Tensor]


def load_model(
    weights: Weights, device: torch.device, dtype: torch.dtype, ops: ModuleType, buffers: Sequence[Buffer]
) -> LoadedModel:
    """Loads the weights and allocates `buffers` beside them. Raises the errors of `Weights.weight`."""
    shape = weights.shape
    ops.check_sizes(**shape.kernel_sizes)
    table = parameter_table(shape)
    plan = make_plan([Buffer("parameters", (flat_elements(table),), dtype, "parameters"), *buffers])
    fewer = "try fewer at once (--micro-batch, --context of `evaluate`, --batch of `sample`, --context of `chat`)"
    check_available(plan.total_bytes, device, weights.origin["source"], f"{fewer} or --precision bf16")
    views = plan.allocate(device)
    flat = views["parameters"]
    for row in table:
        row.stored(flat).copy_(weights.weight(row))
    return LoadedModel(shape, weights.tokenizer, ops, device, named_weights(shape, flat, table), views)


def check_available(needed_bytes: int, device: torch.device, name: str, advice: str) -> None:
    """Raises `DataError` if `name` needs more memory than the device has left."""
    if (available := devices.available_bytes(device)) is not None and needed_bytes > available:
        raise DataError(f"{name} needs {needed_bytes >> 20} MiB, {device.type} has {available >> 20} MiB free; {advice}")


class GrowingMemory:
    """One allocation that successive plans reuse, as large as the largest so far."""

    def __init__(self, device: torch.device):
        self.device = device
        self.storage = torch.empty(0, dtype=torch.uint8, device=device)

    def holds(self, buffers: Iterable[Buffer]) -> bool:
        """True if `lay` would find the memory for them now."""
        available = devices.available_bytes(self.device)
        return available is None or make_plan(buffers).total_bytes <= available + self.storage.numel()

    def lay(self, buffers: Iterable[Buffer], purpose: str) -> dict[str, Tensor]:
        """Zeroed views of buffers of one kind, which overwrite all earlier views. Raises `DataError`, which names the
        `purpose`, if the device has too little memory."""
        plan = make_plan(buffers)
        ((kind, size_bytes),) = plan.size_bytes.items()
        if self.storage.numel() < size_bytes:
            self.storage = torch.empty(0, dtype=torch.uint8, device=self.device)  # frees it before allocating more
            if self.device.type == "cuda":
                torch.cuda.empty_cache()  # else the freed memory does not count as free
            check_available(size_bytes, self.device, purpose, "ask for fewer at once, or load with precision bf16")
            self.storage = torch.zeros(size_bytes, dtype=torch.uint8, device=self.device)
        else:
            self.storage[:size_bytes].zero_()
        return plan.lay_over({kind: self.storage})


class Writing:
    """Keeps a model's last decoder, with its recorded graph, for reuse."""

    def __init__(self, model: LoadedModel, dtype: torch.dtype):
        self.model, self.dtype = model, dtype
        self.memory = GrowingMemory(model.device)
        self.size = (0, 0)  # texts at once, tokens of the cache
        self.last: Decoder | None = None

    def decoder(self, batch: int, longest: int, options: SamplingOptions, ends: frozenset[int]) -> Decoder:
        """A decoder for `batch` texts at once, of up to `longest` tokens: the last one, if it fits the request. Raises
        `DataError` if there is no memory for its cache."""
        shape = with_cache(self.model.shape, longest)
        if self.last is None or self.size != (batch, shape.sequence_length):
            self.last = None  # or it would keep its memory
            buffers = decode_tensors(shape, self.memory.lay(self.table(batch, longest), f"writing {batch} text(s) at once"))
        elif (self.last.options, self.last.ends) == (options, ends):
            return self.last
        else:
            buffers = self.last.buf
        about = self.model.shape, self.model.ops, self.model.weights, buffers, options
        self.last = decoder_of(self.model.tokenizer, *about, end_of_text=None, ends=ends)
        self.size = batch, shape.sequence_length
        return self.last

    def table(self, batch: int, longest: int) -> list[Buffer]:
        return decode_buffers(with_cache(self.model.shape, longest), batch, self.dtype, self.model.ops)

    def fitting(self, tokens: int) -> int:
        """`tokens`, halved (down to `LEAST_CACHE`) until the device has memory for the cache of one text of this length."""
        while tokens > LEAST_CACHE and not self.memory.holds(self.table(1, tokens)):
            tokens = max(LEAST_CACHE, tokens // 2)
        return tokens
