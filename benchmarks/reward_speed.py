"""A step on rewards at a model's size: its exact rollouts, how long drafts and checks take, and the update.

Weights and prompts are random, so answers run to their limit. "exact" drafts answers and checks them until the training
forward chooses every token. Beside it, "decoding" is what `sample` does, with attention in training's tiles, and "heads
apart" with a program for every query head.

    python -m benchmarks.reward_speed --shape Llama-3.2-1B --out h100-reward-speed-llama-3_2-1b.json
"""

import argparse
import random
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.llama_twin import SHAPES, sizes
from benchmarks.record import keep_commit, rounded, write_record
from handgrad.data.prompts import PromptShard
from handgrad.data.shards import Dataset
from handgrad.data.tokenizer import bytes_tokenizer
from handgrad.generation.decode import decode_tensors
from handgrad.generation.generate import Continuation, Decoder, SamplingOptions
from handgrad.joins.parallel.ranks import Ranks
from handgrad.joins.policy import DIFFERENCE
from handgrad.machine import devices
from handgrad.machine.backend import plain_backend
from handgrad.run.assemble import assemble
from handgrad.run.resolve import generation_plan, resolve
from handgrad.run.rollouts import Rollouts
from handgrad.settings.config import RunConfig

GROUP, PROMPTS = 8, 64


class Clock:
    """Seconds and calls of a method, with the device idle before and after."""

    def __init__(self, call: Callable[..., Any], device: torch.device):
        self.call, self.device, self.seconds, self.calls = call, device, list[float](), 0

    def __call__(self, *arguments: Any) -> Any:
        devices.synchronize(self.device)
        begun = time.perf_counter()
        result = self.call(*arguments)
        devices.synchronize(self.device)
        self.seconds.append(time.perf_counter() - begun)
        return result


def dataset_of(vocab_size: int, prompt_tokens: int) -> Dataset:
    """Random prompts."""
    draw = random.Random(0)
    rows = tuple({"messages": [{"role": "user", "content": str(n)}]} for n in range(PROMPTS))
    prompts = tuple([draw.randrange(vocab_size) for _ in range(prompt_tokens)] for _ in range(PROMPTS))
    shards: Any = {"train": (PromptShard(Path("random"), rows, prompts),), "validation": ()}
    return Dataset(Path("random"), bytes_tokenizer(), shards, {"chat": True})


def measure(config: RunConfig, vocab_size: int, prompt_tokens: int, steps: int, out: Path) -> dict[str, Any]:
    """The figures of `steps` steps, the first of which, with its compilations and captures, does not count."""
    device = devices.resolve_device(config.device)
    design = resolve(config, vocab_size, device=device)
    rollouts = Rollouts(config, dataset_of(vocab_size, prompt_tokens), design.policy)
    training = assemble(design, rollouts, trained_tokens=rollouts.trained_tokens)
    decode = decode_tensors(design.shape, generation_plan(design).allocate(device))
    rollouts.bind(training, decode, Ranks(), lambda row, answer: float(hash(answer) % 2), out)
    rollouts.decode_text = lambda tokens: str(tokens)
    sampler, step = rollouts.sampler, training.stepper
    sampler.draft, sampler.check = Clock(sampler.draft, device), Clock(sampler.check, device)  # type: ignore[method-assign]
    figures = list[dict[str, Any]]()
    for number in range(steps):
        for clock in (sampler.draft, sampler.check):
            clock.seconds.clear()
        devices.synchronize(device)
        begun = time.perf_counter()
        result = step.step(number)
        whole = time.perf_counter() - begun
        block = rollouts.block(number)
        tokens = sum(len(rollout.answer) for rollout in block.rollouts)
        drafts, checks = sampler.draft.seconds, sampler.check.seconds
        sampling = sum(drafts) + sum(checks)
        figures.append(
            {
                "tokens": tokens,
                "passes": block.figures["passes"],
                "difference": float(result.reports[DIFFERENCE].item()),
                "first_draft_seconds": drafts[0],
                "drafts_seconds": sum(drafts),
                "checks_seconds": sum(checks),
                "checks": len(checks),
                "draft_tokens_per_second": tokens / drafts[0],
                "exact_tokens_per_second": tokens / sampling,
                "update_tokens_per_second": config.tokens_per_step / (whole - block.figures["seconds"]),
                "share_sampling": sampling / whole,
                "seconds": whole,
            }
        )
        print({name: rounded(value, 4) for name, value in figures[-1].items()}, flush=True)
    decoded = {"decoding": decoding(design, training, rollouts, decode)}
    if device.type == "cuda":
        from handgrad.ops.cuda import attention_decode

        before, attention_decode.FEW_PROGRAMS = attention_decode.FEW_PROGRAMS, 1 << 30
        decoded["heads apart"] = decoding(design, training, rollouts, decode)
        attention_decode.FEW_PROGRAMS = before
    print(decoded, flush=True)
    return {
        "steps": figures[1:],
        "decoding_tokens_per_second": decoded,
        "memory_bytes": design.plan.total_bytes + generation_plan(design).total_bytes,
        "config": {name: value for name, value in asdict(config).items() if value != getattr(RunConfig, name)},
    }


def decoding(design: Any, training: Any, rollouts: Rollouts, decode: Any) -> float:
    """Tokens per second of a step's answers, as `sample` decodes them, at the second time."""
    ops = plain_backend("auto", design.device, design.precision)
    decoder = Decoder(
        design.shape, ops, training.state.plain_weights, decode, SamplingOptions(temperature=1.0), end_of_text=None
    )
    block, speed = rollouts.blocks[max(rollouts.blocks)], 0.0
    for _ in range(2):
        texts = [Continuation(one.prompt, len(one.answer), one.seed) for one in block.rollouts]
        devices.synchronize(design.device)
        begun = time.perf_counter()
        for _ in decoder.generate(texts):
            pass
        devices.synchronize(design.device)
        speed = sum(len(text.tokens) for text in texts) / (time.perf_counter() - begun)
    return speed


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="A step on rewards at a model's size, with random weights.")
    parser.add_argument("--shape", default="Llama-3.2-1B", choices=list(SHAPES))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--rows", type=int, default=64, help="answers of a step")
    parser.add_argument("--micro-batch", type=int, default=16)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--answer-tokens", type=int, default=256)
    parser.add_argument("--steps", type=int, default=4, help="of which the first does not count")
    parser.add_argument("--folder", type=Path, default=Path("runs/reward-speed"), help="for the rollouts")
    parser.add_argument("--out", default="", help="the results file")
    options = parser.parse_args(given)
    keep_commit()
    options.folder.mkdir(parents=True, exist_ok=True)
    length = options.prompt_tokens + options.answer_tokens
    config = RunConfig(
        **sizes(options.shape),
        sequence_length=length,
        tokens_per_step=options.rows * length,
        micro_batch=options.micro_batch,
        lanes=1,
        packing="stream",
        objective="reward",
        reward="exact",
        rollouts=GROUP,
        answer_tokens=options.answer_tokens,
        steps=options.steps,
        learning_rate=1e-6,
        device=options.device,
        precision=options.precision,
    )
    found = measure(config, SHAPES[options.shape][0], options.prompt_tokens, options.steps, options.folder)
    if options.out:
        write_record(
            options.out,
            devices.resolve_device(options.device),
            what=__doc__.split("\n")[0],
            shape=options.shape,
            **rounded(found),
        )


if __name__ == "__main__":
    main()
