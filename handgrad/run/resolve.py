"""Resolves a configuration. Only this module turns a `RunConfig` into a `Design`."""

import bisect
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

import torch

from handgrad import models
from handgrad.errors import UsageError
from handgrad.generation import rollouts
from handgrad.generation.decode import decode_buffers, with_cache
from handgrad.interop.sources import read_sizes
from handgrad.joins import distill, documents, offload, policy, preference
from handgrad.joins.dropout import bind as dropout
from handgrad.joins.fp8 import bind as fp8_bind, tables, with_lora
from handgrad.joins.fp8.formats import GRADIENT_FORMATS
from handgrad.joins.fp8.scaling import Fp8Design
from handgrad.joins.lora import tables as lora_tables
from handgrad.joins.lora.tables import LoraDesign
from handgrad.joins.parallel import gradient_sync
from handgrad.machine import devices
from handgrad.machine.backend import choose_backend, invariant_backend, plain_backend
from handgrad.machine.devices import accumulation_dtype
from handgrad.memory.activations import ActivationRow
from handgrad.memory.arena import Buffer, Plan, make_plan
from handgrad.memory.layout import Layout, Sharding, buckets_of, norm_blocks, shard_elements, state_layout
from handgrad.memory.rows import Table, flat_elements, freeze
from handgrad.networks import NETWORKS
from handgrad.networks.fp8 import gradient_format, takes_micro_batch
from handgrad.networks.lora import parse_lora
from handgrad.optimizers.adamw import AdamW
from handgrad.optimizers.codebook import CodebookAdamW
from handgrad.optimizers.muon import Muon
from handgrad.settings.config import TUNED, ModelShape, RunConfig
from handgrad.settings.objective import DPO, REVERSE
from handgrad.training.design import Batch, Design, Guards, Schedule
from handgrad.training.state import FROZEN, flat_buffers, update_scratch

MOST_AT_ONCE = 64  # answers that a rank decodes together, which bounds the cache


def resolve(
    config: RunConfig,
    vocab_size: int,
    *,
    rank: int = 0,
    ranks: int = 1,
    device: torch.device | None = None,
    ops: ModuleType | None = None,
    sizes: Any = None,
) -> Design:
    """Resolves `config` for one of `ranks`, with its memory plan. Allocates nothing.

    `device` and `ops` (plain operations) default to `config`'s. `sizes`: replaces the operations by their sizes, for
    kernels that this machine cannot run; the device is then torch's "meta", which has no memory. Raises `UsageError` for
    settings that the device or the backend does not support, and for unknown names."""
    device = devices.resolve_device(config.device) if device is None else device
    if config.shape(vocab_size).network.pictures and device.type not in ("cpu", "cuda"):
        raise UsageError(f"{config.architecture} runs on this machine's CPU or NVIDIA GPU so far; try --device cpu")
    config = with_precision(config, device)
    dtype = devices.dtype_of(device, config.precision)
    devices.check_optimizer(device, config.optimizer)
    plain_ops = sizes or ops or plain_backend(config.backend, device, config.precision)
    plain_ops = invariant_backend(plain_ops) if config.reward and sizes is None else plain_ops
    shape = config.shape(vocab_size)
    optimizer = optimizer_of(config, pictures=shape.network.pictures)
    model = models.architecture(shape)
    sharding = Sharding(max(1, config.lanes), rank, ranks, config.zero, config.reduce_precision == "bf16")

    parameters = freeze(models.parameter_table(shape, sharding.lanes, optimizer.whole), config.freeze)
    frozen, lora = (), None
    if config.lora:  # only the adapters train
        requested = parse_lora(config.lora)
        if sizes is None:
            lora_tables.check(requested, plain_ops)
        lora = LoraDesign(tuple(lora_tables.adapters_of(shape, requested)))
        parameters, frozen = lora.table(sharding.lanes), models.parameter_table(shape)
    layout = Layout(parameters, buckets_of(parameters, sharding.lanes))
    optimizer_state = {name: state_layout(name, layout, optimizer.state) for name in optimizer.state(parameters[0])}

    rows = activation_rows(config, shape, dtype, plain_ops, sizes)
    training_ops, fp8, fp8_only = plain_ops, None, frozenset[str]()
    if config.precision == "fp8":
        training_ops = sizes or fp8_bind.operations(plain_ops)
        fp8 = resolve_fp8(config, shape, frozen or parameters, rows, training_ops)
        fp8_only = with_lora.fp8_only(fp8) if frozen else fp8_only
    frozen, in_16_bits = with_lora.split_by_precision(frozen, fp8_only)

    state, host_state = state_buffers(config, layout, sharding, optimizer_state, dtype, device)
    buffers = [*state, *activation_buffers(config, rows, fp8, frozen or parameters, ranks, fp8_only)]
    teacher = teacher_of(config, shape)
    if config.packed:
        readers = [model] if teacher is None else [model, models.architecture(teacher.shape)]
        batch_sizes = config.micro_batch, shape.sequence_length
        buffers += {row.name: row for each in readers for row in models.document_buffers(each, *batch_sizes)}.values()
    if teacher is not None:
        buffers += distill.buffers(teacher, rows, dtype, plain_ops)
    if config.dropout:
        buffers += dropout.buffers(config.micro_batch)
    pairs = preference.Preference(config.dpo_beta, config.dpo_smoothing) if config.objective == DPO else None
    if pairs is not None:
        buffers += preference.buffers(config.micro_batch, shape.sequence_length, dtype)
    if (answers := policy_of(config, ranks) if config.reward else None) is not None:
        buffers += policy.buffers(config.micro_batch, shape.sequence_length, dtype, taught=teacher is not None)
        buffers += rollouts.buffers(shape, config.micro_batch * shape.sequence_length, plain_ops)
    if lora is not None:
        tokens = config.micro_batch * shape.sequence_length
        buffers.append(Buffer(FROZEN, (flat_elements(in_16_bits),), dtype, "frozen weights"))
        buffers += lora_tables.buffers(lora, frozen, tokens, dtype)
    if fp8_only:
        buffers.append(with_lora.dequant_scratch(frozen, fp8_only, dtype))
    buffers += update_scratch(optimizer.scratch_bytes(plain_ops, parameters, accumulation_dtype(dtype), device))
    buffers += offload.buffers(host_state)
    return Design(
        device=device,
        precision=config.precision,
        dtype=dtype,
        ops=training_ops,
        plain_ops=plain_ops,
        model=model,
        shape=shape,
        parameters=parameters,
        buckets=layout.buckets,
        sharding=sharding,
        batch=Batch(config.micro_batch, sharding.lanes, config.sequence_length, config.batch, config.overfit_one_batch),
        optimizer=optimizer,
        optimizer_state=optimizer_state,
        schedule=schedule_of(config),
        guards=guards_of(config),
        seed=config.seed,
        recompute=config.recompute,
        fp8=fp8,
        dropout=config.dropout,
        plan=make_plan(buffers),
        host_plan=make_plan(host_state),
        sample_tokens=config.sample_tokens,
        lora=lora,
        preference=pairs,
        policy=answers,
        teacher=teacher,
        frozen=frozen,
        fp8_only=fp8_only,
    )


# The memory of a run: activation rows, then the buffers of activations and state.


def activation_rows(
    config: RunConfig, shape: ModelShape, dtype: torch.dtype, plain_ops: Any, sizes: Any
) -> tuple[ActivationRow, ...]:
    """The model's activations and their gradients. `sizes`: as in `resolve`."""
    scratch_sizes = plain_ops
    if config.packed:
        scratch_sizes = documents.scratch_sizes(plain_ops)
    elif config.dropout and sizes is None:
        scratch_sizes = dropout.scratch_sizes(plain_ops)
    batch, length = config.micro_batch, shape.sequence_length
    chunk = models.head_chunk_tokens(config.head_chunk_tokens, batch * length, shape.padded_vocab_size, dtype)
    model = models.architecture(shape)
    return tuple(model.activations(shape, batch, length, dtype, scratch_sizes, chunk=chunk, training=True))


def activation_buffers(
    config: RunConfig,
    rows: tuple[ActivationRow, ...],
    fp8: Fp8Design | None,
    weights: Table,
    ranks: int,
    fp8_only: frozenset[str],
) -> list[Buffer]:
    """Buffers of the activations and, in fp8, of quantised tensors and their scales. `weights`: the model's; `fp8_only`:
    names of weights that exist only in fp8."""
    if fp8 is None:
        return [row.buffer(config.recompute) for row in rows if not row.of]
    quantized = tables.activation_buffers(rows, fp8.forms, fp8.gemms, fp8.gradients, config.recompute)
    buffers = [*fp8.buffers(weights, ranks), *quantized]
    return with_lora.with_shared_operand(buffers) if fp8_only else buffers


def state_buffers(
    config: RunConfig,
    layout: Layout,
    sharding: Sharding,
    optimizer_state: dict[str, Layout],
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[list[Buffer], list[Buffer]]:
    """(device buffers, host buffers) of weights, gradients, optimizer state and the scalars of a step."""
    flat = flat_buffers(
        layout.elements,
        dtype,
        device,
        {name: shard_elements(state.buckets, sharding.shards) for name, state in optimizer_state.items()},
        master_weights=config.master_weights,
        rounded_moments=config.moments == "bf16",
        blocks=norm_blocks(layout.buckets, sharding.lanes),
    )
    if sharding.lanes > 1:
        flat = gradient_sync.buffers(flat, layout.buckets, sharding)
    if not config.offload:
        return list(flat.values()), []
    flat, host = offload.divided(flat)
    return list(flat.values()), host


# The parts of a design.


def teacher_of(config: RunConfig, shape: ModelShape) -> distill.Teacher | None:
    """The run's teacher, by the sizes of its weights. Raises the errors of `read_sizes`."""
    if not config.teacher:
        return None
    sizes = read_sizes(config.teacher) | {"sequence_length": shape.sequence_length}
    return distill.Teacher(ModelShape(shape.vocab_size, **sizes), config.teacher_divergence == REVERSE)


def optimizer_of(config: RunConfig, *, pictures: bool = False) -> AdamW | Muon:
    """`pictures`: of a network that may have a codebook."""
    adamw_of = CodebookAdamW if pictures else AdamW
    adamw = adamw_of(config.beta1, config.beta2, config.adam_epsilon, config.weight_decay, config.seed)
    if config.optimizer == "adamw":
        return adamw
    rate = config.matrix_learning_rate / config.learning_rate if config.matrix_learning_rate else 1.0
    return Muon(adamw, momentum=0.95, beta2=config.beta2, weight_decay=config.weight_decay, rate=rate)


def policy_of(config: RunConfig, ranks: int) -> policy.Policy:
    rows = config.tokens_per_step // config.sequence_length // ranks
    settings = config.rollouts, config.answer_tokens, config.updates, config.clip_ratio
    return policy.Policy(*settings, at_once=min(MOST_AT_ONCE, rows))


def guards_of(config: RunConfig) -> Guards:
    skips, loss_scaling = (config.skip_loss_z, config.skip_norm_z), config.precision == "fp16"
    return Guards(config.clip_norm, *skips, loss_scaling, config.check_ranks_every, config.audit_every)


def schedule_of(config: RunConfig) -> Schedule:
    peak, final_fraction = config.learning_rate, config.final_learning_rate_fraction
    return Schedule(config.schedule, peak, final_fraction, config.warmup_steps, config.steps, config.cooldown_fraction)


def resolve_fp8(
    config: RunConfig, shape: ModelShape, weights: Table, rows: tuple[ActivationRow, ...], ops: ModuleType
) -> Fp8Design:
    in_bf16 = config.fp8_keep_bf16.replace(TUNED, "")
    gemms = tables.fp8_gemms(in_bf16, config.fp8_head_gemms, shape.num_layers, shape.fp8_parts)
    forms = with_lora.with_16_bits(shape.forms) if config.lora else shape.forms
    gradients = GRADIENT_FORMATS[gradient_format(config)]
    return Fp8Design(
        forms=forms,
        gemms=gemms,
        gradients=gradients,
        table=tables.quantized_table(weights, rows, forms, gemms, gradients),
        delayed=config.fp8_scaling == "delayed",
        window=config.fp8_window,
        margin=config.fp8_margin,
        count_every=config.fp8_count_every,
        saturation_steps=config.fp8_saturation_steps,
        widen=config.fp8_on_saturation == "widen",
        statistics_parts=ops.statistics_parts(
            batch=config.micro_batch,
            length=shape.sequence_length,
            num_heads=shape.num_heads,
            head_width=shape.head_width,
            channels=shape.channels,
            feed_forward=shape.feed_forward,
            widest=tables.longest_side(weights),
            padded_vocab_size=shape.padded_vocab_size,
        ),
    )


# Choices before a design, and plans from it.


def micro_batches(config: RunConfig) -> list[int]:
    """The micro-batch sizes (samples) that divide a lane's steps and that the precision supports, smallest first."""
    samples, rest = divmod(config.batch.common // config.sequence_length, max(1, config.lanes))
    return [n for n in range(1, samples + 1) if not rest and samples % n == 0 and takes_micro_batch(config, n)]


def largest_micro_batch(
    config: RunConfig,
    vocab_size: int,
    available_bytes: int,
    ranks: int = 1,
    *,
    most: int | None = None,
    resolved: Callable[..., Design] = resolve,
) -> int:
    """Returns the largest of `micro_batches`, up to `most`, whose memory fits; 0 if none fits. `resolved`: replaces
    `resolve` for a device that this machine lacks."""
    choices = [n for n in micro_batches(config) if most is None or n <= most]

    def fits(micro_batch: int) -> bool:
        design = resolved(replace(config, micro_batch=micro_batch), vocab_size, ranks=ranks)
        return sum(memory_bytes(design).values()) <= available_bytes

    if choices and fits(choices[-1]):
        return choices[-1]
    index = bisect.bisect_left(choices, True, key=lambda samples: not fits(samples))  # more samples take more memory
    return choices[index - 1] if index else 0


def with_precision(config: RunConfig, device: torch.device) -> RunConfig:
    """Replaces precision "auto" by the one that suits the network and the device."""
    precision = NETWORKS[config.architecture].precision(config.precision)
    return replace(config, precision=devices.resolve_precision(precision, device))


def with_tuned_gemms(config: RunConfig, device: torch.device) -> RunConfig:
    """Replaces "auto" and "tuned" by names of GEMMs. "tuned": the GEMMs that `benchmarks.tune` measured as faster in
    bf16. Raises `UsageError` for a backend that cannot run."""
    ops = choose_backend(config.backend, device, config.precision)
    if config.precision != "fp8":
        return config
    config = replace(config, fp8_head=config.fp8_head_gemms, fp8_gradients=gradient_format(config))
    if config.fp8_keep_bf16 != TUNED:
        return config
    tokens = config.micro_batch * config.sequence_length
    return replace(config, fp8_keep_bf16=ops.tuned_keep_bf16(tokens=tokens, channels=config.channels))


def generation_plan(design: Design) -> Plan:
    """The memory plan for generating one text at a time, or a step's rollouts; empty for pictures. The cache of one
    text holds the token that starts a document and the generated ones, not a whole context."""
    if design.shape.network.pictures:
        return make_plan(())
    if design.policy is not None:
        return make_plan(decode_buffers(design.shape, design.policy.at_once, design.dtype, design.plain_ops))
    return make_plan(decode_buffers(with_cache(design.shape, 1 + design.sample_tokens), 1, design.dtype, design.plain_ops))


def memory_bytes(design: Design) -> dict[str, int]:
    """Bytes of each allocation that a rank of this run makes on its device."""
    return design.plan.size_bytes | generation_plan(design).size_bytes
