"""What a run will take, before it takes it: memory by component, the largest micro-batch that fits, time at the least."""

import time
from dataclasses import replace

import torch

from handgrad import devices
from handgrad.arena import make_plan
from handgrad.backend import choose_backend, settle_products
from handgrad.config import ModelShape, RunConfig, check
from handgrad.generation.decode import decode_buffers
from handgrad.models.parameters import count_parameters, flops_per_token, parameter_table
from handgrad.ops import reference
from handgrad.run.console import human_bytes, human_count, human_flops, human_seconds, memory_table
from handgrad.run.folder import settled_lanes
from handgrad.run.header import check_shared_gradients, checkpoint_bytes, dropout_lines, most_checkpoints
from handgrad.training.state import largest_micro_batch, training_plan

RECOMPUTE_LEVELS = (0, 1, 2)


def describe_plan(config: RunConfig, vocab_size: int, ranks: int = 1) -> list[str]:
    """The lines of `handgrad plan`; memory is that of one of `ranks` equal ones. Raises `ConfigError` for lanes that they
    cannot share."""
    device = devices.resolve_device(config.device)
    dtype = devices.use_precision(device, config.precision)
    ops = choose_backend(config.backend, device, config.precision)
    config = check(replace(settle_products(config, ops), lanes=settled_lanes(config, ranks)))
    check_shared_gradients(config, ranks)
    shape = config.shape(vocab_size)
    tokens = config.steps * config.tokens_per_step
    operations = tokens * flops_per_token(shape)
    rate, kind = product_rate(device, dtype), "bf16" if config.precision == "fp8" else config.precision
    lanes = f"{config.lanes} lanes x " if config.lanes > 1 else ""
    memory = "memory per rank" if ranks > 1 else "memory"
    checkpoints = most_checkpoints(config)
    lines = [
        f"model      {human_count(count_parameters(parameter_table(shape)))} parameters,"
        f" {human_flops(flops_per_token(shape))} per token, forward and backward",
        f"run        {config.steps} steps of {config.tokens_per_step} tokens = {lanes}{config.micro_steps} x"
        f" {config.micro_batch} x {config.sequence_length}: {human_count(tokens)} tokens, {human_flops(operations)}",
        f"device     {devices.describe(device)}; a large {kind} product runs at {human_flops(rate)}/s here",
        *dropout_lines(config),
        f"at best    {human_count(ranks * rate / flops_per_token(shape))} tokens/s,"
        f" {human_seconds(operations / rate / ranks)} in all{' on ' + str(ranks) + ' such' if ranks > 1 else ''};"
        " expect half to three quarters of it",
        f"disk       {human_bytes(checkpoints * checkpoint_bytes(config, vocab_size))}: at most {checkpoints} checkpoints",
        "",
        f"{memory:<18}" + "".join(f"{f'recompute {level}':>16}" for level in RECOMPUTE_LEVELS),
        *memory_table([memory_bytes(replace(config, recompute=level), shape, ranks) for level in RECOMPUTE_LEVELS]),
        "",
    ]
    available = devices.available_bytes(device)
    for level in RECOMPUTE_LEVELS if available is not None else ():
        level_config = replace(config, recompute=level)
        fitting = largest_micro_batch(level_config, shape, dtype, device, ops, available or 0, ranks)
        whole = " (a whole step at once)" if fitting * config.lanes == config.samples_per_step else ""
        advice = f"--micro-batch {fitting}{whole}" if fitting else "not even one sample at a time"
        lines.append(f"fits       {human_bytes(available or 0)} free at recompute {level}: {advice}")
    return lines


def memory_bytes(config: RunConfig, shape: ModelShape, ranks: int = 1) -> dict[str, int]:
    """Bytes of every allocation that a rank of a run with this configuration makes."""
    dtype = devices.DTYPES[config.precision]
    device = devices.resolve_device(config.device)
    ops = choose_backend(config.backend, device, config.precision)
    generation = make_plan(decode_buffers(shape, 1, dtype, ops))
    return training_plan(config, shape, dtype, device, ops, ranks).size_bytes | generation.size_bytes


def product_rate(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of a square `linear_forward`, the best of seven: of 1024 rows on a CPU, of 8192 on a GPU."""
    size = 1024 if device.type == "cpu" else 8192
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    out, best = torch.empty_like(a), float("inf")
    for _ in range(7):
        devices.synchronize(device)
        start = time.perf_counter()
        reference.linear_forward(out, a, b, None)
        devices.synchronize(device)
        best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best
