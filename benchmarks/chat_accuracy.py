"""Right answers to held-out questions: python -m benchmarks.chat_accuracy --out results/NAME.json

A small model trains from nothing on the built-in questions, a byte a token: conversations packed whole into rows, the
assistant's words alone trained. Then it answers greedily questions that its training never asked, in conversations of one
to three turns whose earlier answers are the right ones. Every question has one right answer; the record has the share of
them by kind. --folder keeps data and run: the command resumes.
"""

import argparse
from collections import Counter
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import torch

from benchmarks.record import write_record
from benchmarks.run_record import lines_of, losses, seconds_in_steps
from handgrad.api.model import Model, load
from handgrad.data.chat_template import ChatTemplate
from handgrad.data.prepare import PrepareOptions, prepare
from handgrad.data.questions import NAMES, check as is_right, conversation, kind_of
from handgrad.data.shards import open_dataset
from handgrad.generation.decode import decode_buffers, decode_tensors
from handgrad.generation.generate import Continuation, Decoder, SamplingOptions
from handgrad.memory.arena import make_plan
from handgrad.memory.rows import count_parameters
from handgrad.models import parameter_table
from handgrad.run.open import train
from handgrad.settings.config import RunConfig, check

CONVERSATIONS, ASKED, ASKED_SEED = 200_000, 2000, 1  # another seed than the data's: other held-out conversations
BATCH, LONGEST_ANSWER = 64, 24  # texts at once, tokens

Messages = list[dict[str, str]]

CONFIG = RunConfig(
    architecture="modern",
    num_layers=4,
    num_heads=4,
    channels=128,
    sequence_length=192,
    steps=2400,
    tokens_per_step=3072,
    micro_batch=16,
    learning_rate=4e-3,
    warmup_steps=100,
    schedule="linear",
    final_learning_rate_fraction=0.0,
    eval_every=400,
    eval_tokens=1 << 16,
    sample_tokens=0,
    save_every=0,
    keep_checkpoints=1,
    log_every=250,
    device="cpu",
    lanes=1,
)


def questions(number: int) -> list[Messages]:
    """The first `number` held-out questions, each with the turns before it, right answers and all."""
    found: list[Messages] = []
    for talk in (conversation(ASKED_SEED, place, held_out=True) for place in count()):
        messages = [{"role": role, "content": content} for role, content in talk]
        found += [messages[: turn + 1] for turn in range(0, len(messages), 2)]
        if len(found) >= number:
            return found[:number]
    raise AssertionError


def answers(model: Model, asked: list[Messages], temperature: float = 0.0, at_once: int = BATCH) -> list[str]:
    """The model's answer to each question, greedy at temperature 0, up to the end of its turn."""
    template, tokenizer = ChatTemplate(model.tokenizer), model.tokenizer
    assert template.end_tokens == {tokenizer.end_of_text}
    batch = min(at_once, len(asked))
    views = make_plan(decode_buffers(model.shape, batch, model.dtype, model.ops)).allocate(model.device)
    buffers, options = decode_tensors(model.shape, views), SamplingOptions(temperature=temperature)
    decoder = Decoder(model.shape, model.ops, model.weights, buffers, options, end_of_text=tokenizer.end_of_text)
    prompts = [template.render(messages, add_generation_prompt=True) for messages in asked]
    texts = [Continuation(prompt, LONGEST_ANSWER, seed) for seed, prompt in enumerate(prompts)]
    for _ in decoder.generate(iter(texts)):
        pass
    return [tokenizer.decode(text.tokens) for text in texts]


def accuracy(asked: list[Messages], given: list[str]) -> dict[str, list[int]]:
    """[right answers, questions] of each kind, and of all."""
    right, every = Counter[str](), Counter[str]()
    for messages, answer in zip(asked, given, strict=True):
        for name in (kind_of(messages) or "none", "all"):
            every[name] += 1
            right[name] += is_right(messages, answer)
    return {name: [right[name], every[name]] for name in (*NAMES, "all")}


def learn(config: RunConfig, asked: int) -> dict[str, Any]:
    """Trains, and asks so many questions; returns the record's figures."""
    train(check(config))
    model = load(config.out, device=config.device)
    held_out = questions(asked)
    given = answers(model, held_out)
    lines = lines_of(Path(config.out))
    return {
        "architecture": config.architecture,
        "parameters": count_parameters(parameter_table(model.shape)),
        "train_tokens": open_dataset(config.data).tokens("train"),
        "steps": config.steps,
        "tokens_per_step": config.tokens_per_step,
        "trained_tokens": sum(line["trained_tokens"] for line in lines["step"]),
        "seconds_in_steps": round(seconds_in_steps(lines), 1),
        "validation": losses(lines["validation"]),
        "accuracy": accuracy(held_out, given),
        "examples": [[messages[-1]["content"], answer] for messages, answer in zip(held_out[:20], given[:20], strict=True)],
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Right answers to held-out questions, of a small model trained here.")
    parser.add_argument("--folder", type=Path, default=Path("runs/chat-accuracy"), metavar="DIR", help="for data and run")
    parser.add_argument("--steps", type=int, default=CONFIG.steps, help="of training")
    parser.add_argument("--conversations", type=int, default=CONVERSATIONS, help="of the data")
    parser.add_argument("--asked", type=int, default=ASKED, help="held-out questions")
    parser.add_argument("--out", default="chat_accuracy.json", metavar="FILE", help="the results file")
    arguments = parser.parse_args()
    config = replace(CONFIG, data=str(arguments.folder / "questions"), out=str(arguments.folder / "run"))
    prepare(PrepareOptions("questions", Path(config.data), tokenizer="bytes", documents=arguments.conversations))
    figures = learn(replace(config, steps=arguments.steps), arguments.asked)
    for name, (good, every) in figures["accuracy"].items():
        print(f"{name:<10} {good / max(1, every):7.1%} of {every}")
    write_record(
        arguments.out,
        torch.device("cpu"),
        what="the share of right answers, greedy, to held-out questions of the built-in generator; bytes",
        figures=figures,
    )
