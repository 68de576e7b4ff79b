"""The cost of a run before it starts: memory by component, the largest micro-batch that fits, a bound on its speed."""

from dataclasses import replace

from handgrad import devices
from handgrad.arena import make_plan
from handgrad.backend import choose_backend
from handgrad.config import RunConfig, check
from handgrad.format import human_bytes, human_count, human_flops, human_seconds, memory_table
from handgrad.generation.decode import decode_buffers
from handgrad.models.rows import count_parameters
from handgrad.run.checks import check_shared_gradients, checkpoint_bytes, most_checkpoints
from handgrad.run.folder import settled_lanes
from handgrad.run.header import dropout_lines
from handgrad.run.resolve import largest_micro_batch, resolve, with_precision, with_tuned_gemms
from handgrad.tools.rates import gemm_flops
from handgrad.training.design import Design

RECOMPUTE_LEVELS = (0, 1, 2)


def describe_plan(config: RunConfig, vocab_size: int, ranks: int = 1) -> list[str]:
    """The lines of `handgrad plan`; memory is that of one of `ranks` equal ones. Raises `ConfigError` for lanes that they
    cannot share."""
    device = devices.resolve_device(config.device)
    config = with_precision(config, device)
    config = with_tuned_gemms(config, choose_backend(config.backend, device, config.precision))
    config = check(replace(config, lanes=settled_lanes(config, ranks)))
    check_shared_gradients(config, ranks)
    designs = [resolve(replace(config, recompute=level), vocab_size, ranks=ranks) for level in RECOMPUTE_LEVELS]
    design = designs[0]
    flops_per_token = design.model.flops_per_token(design.shape)
    tokens = config.steps * config.tokens_per_step
    rate, kind = gemm_flops(device, design.dtype), "bf16" if config.precision == "fp8" else config.precision
    lanes = f"{config.lanes} lanes x " if config.lanes > 1 else ""
    memory = "memory per rank" if ranks > 1 else "memory"
    checkpoints = most_checkpoints(config)
    lines = [
        f"model      {human_count(count_parameters(design.parameters))} parameters,"
        f" {human_flops(flops_per_token)} per token, forward and backward",
        f"run        {config.steps} steps of {config.tokens_per_step} tokens = {lanes}{config.micro_steps} x"
        f" {config.micro_batch} x {config.sequence_length}: {human_count(tokens)} tokens,"
        f" {human_flops(tokens * flops_per_token)}",
        f"device     {devices.describe(device)}; a large {kind} product runs at {human_flops(rate)}/s here",
        *dropout_lines(config, design),
        f"at best    {human_count(ranks * rate / flops_per_token)} tokens/s,"
        f" {human_seconds(tokens * flops_per_token / rate / ranks)} in all{f' on {ranks} such' if ranks > 1 else ''};"
        " expect half to three quarters of it",
        f"disk       {human_bytes(checkpoints * checkpoint_bytes(design))}: at most {checkpoints} checkpoints",
        "",
        f"{memory:<18}" + "".join(f"{f'recompute {level}':>16}" for level in RECOMPUTE_LEVELS),
        *memory_table([memory_bytes(design) for design in designs]),
        "",
    ]
    available = devices.available_bytes(device)
    for level in RECOMPUTE_LEVELS if available is not None else ():
        fitting = largest_micro_batch(replace(config, recompute=level), vocab_size, available or 0, ranks)
        whole = " (a whole step at once)" if fitting * config.lanes == config.samples_per_step else ""
        advice = f"--micro-batch {fitting}{whole}" if fitting else "not even one sample at a time"
        lines.append(f"fits       {human_bytes(available or 0)} free at recompute {level}: {advice}")
    return lines


def memory_bytes(design: Design) -> dict[str, int]:
    """Bytes of every allocation that a rank of this run makes."""
    generation = make_plan(decode_buffers(design.shape, 1, design.dtype, design.plain_ops))
    return design.plan.size_bytes | generation.size_bytes
