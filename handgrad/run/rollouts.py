"""The rollouts of a run: what the model answers before a step, what each answer earns, and what a step trains.

Group g of a run is a prompt with `Policy.group` answers, neighbouring samples. Each rank samples its own rows, in the
micro-batches of the training, and all ranks gather all rows: a step's rollouts are a pure function of (weights, step,
prompts, seed). They lie in RUN/rollouts/step_00000012.jsonl, from which a run that stops between two updates goes on.
"""

import dataclasses
import functools
import hashlib
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from handgrad.data.batches import mix
from handgrad.data.prompts import longest_prompt, prompts_of
from handgrad.data.shards import Dataset
from handgrad.errors import DataError, HandgradError, NumericsError, UsageError, storage_errors
from handgrad.evaluation.rewards import Reward, Rewards, mean, mean_and_error
from handgrad.files import write_durably
from handgrad.generation.chat import Talk
from handgrad.generation.generate import StopText
from handgrad.generation.rollouts import ExactSampler, Rollout, fill_rows
from handgrad.joins.parallel.ranks import Ranks
from handgrad.joins.policy import DIFFERENCE, Policy
from handgrad.parsing import parse_json
from handgrad.run.assemble import Assembly
from handgrad.run.log import RunLog
from handgrad.settings.config import RunConfig
from handgrad.storage.run_files import ROLLOUTS
from handgrad.training.step import StepResult

SHOWN = 3  # answers that a validation shows
DRAW, HELD_OUT = 7, 8  # domain separators of seeds (batches has 1 to 3, pieces 4, mixture 5)


@dataclasses.dataclass(frozen=True)
class Block:
    """The rollouts of one sampling, of all ranks, in the order of the samples."""

    first: int  # 0-based step that made them
    rollouts: list[Rollout]
    rewards: list[float]
    advantages: list[float]
    figures: dict[str, float]  # for the record: means, shares, seconds

    @functools.cached_property
    def digests(self) -> dict[str, str]:
        """SHA-256 of all tokens, and of all rewards, for the audit's chain."""
        tokens = [[one.prompt, one.answer] for one in self.rollouts]
        every = {"tokens": tokens, "rewards": [reward.hex() for reward in self.rewards]}
        return {name: hashlib.sha256(json.dumps(each).encode()).hexdigest() for name, each in every.items()}


@dataclasses.dataclass(frozen=True)
class Answered:
    """A validation: the likeliest answers to held-out prompts."""

    divergence: float | None  # of sampled answers from the teacher's distribution, if there is one: nats a token
    reward: float
    stderr: float
    answer_tokens: float  # mean
    prompts: int
    shown: list[tuple[str, str, float]]  # (prompt, answer, reward)

    @property
    def loss(self) -> float:
        return -self.reward if self.divergence is None else self.divergence


class Rollouts:
    """The source of a run's samples: rollouts, a row each. `bind` gives it the model before the first step."""

    trains_all = False

    def __init__(self, config: RunConfig, dataset: Dataset, about: Policy):
        """Raises UsageError if a row does not hold the longest prompt and answer."""
        self.dataset, self.about, self.seed, self.steps = dataset, about, config.seed, config.steps
        self.reward_seconds, sequence_length = config.reward_seconds, config.sequence_length
        self.stop = StopText(dataset.tokenizer, config.answer_stop)
        (self.prompts,) = prompts_of(dataset, "train")
        self.samples = config.tokens_per_step // sequence_length  # of a step
        self.samples_per_epoch = len(self.prompts.prompts) * about.group
        longest = longest_prompt(dataset)
        if longest + about.answer_tokens > sequence_length + 1 or about.answer_tokens < 1:
            needed, room = longest + max(1, about.answer_tokens) - 1, sequence_length + 1 - longest
            raise UsageError(
                f"expected prompts and answers of at most {sequence_length + 1} tokens, found a prompt of {longest} and"
                f" answers of up to {max(1, about.answer_tokens)}; try"
                f" {f'--answer-tokens {room}' if room > 0 else 'shorter prompts'}, or --sequence-length {needed} if the"
                " weights have as many positions"
            )
        self.blocks: dict[int, Block] = {}  # the last two, by first step

    def bind(self, training: Assembly, decode: Any, ranks: Ranks, reward: str | Reward, folder: Path) -> "Rollouts":
        """Connects it to the model, to the buffers of its decoder, to the reward and to the run's folder."""
        self.training, self.ranks, self.folder = training, ranks, folder / ROLLOUTS
        self.rewards = Rewards(reward, self.reward_seconds)
        tokenizer = self.dataset.tokenizer
        ends = sorted(Talk(tokenizer).ends)
        self.decode_text: Callable[[list[int]], str] = tokenizer.decode
        self.teacher = training.model_ops if training.design.teacher is not None else None
        model_ops = training.model_ops if self.teacher is None else self.teacher.ops  # the student's
        model = training.state, model_ops, training.plain_ops, decode, ends, self.stop
        self.sampler, self.greedy = ExactSampler(*model), ExactSampler(*model, temperature=0.0)
        return self

    # The samples of a step.

    def block(self, step: int) -> Block:
        return self.blocks[self.about.first_step(step)]

    def before_step(self, step: int) -> None:
        """Makes the rollouts of a step, or reads the ones that it shares with an earlier step."""
        first = self.about.first_step(step)
        if step >= self.steps or first in self.blocks:
            return
        block = self.make(first) if first == step else self.stored(first)
        self.blocks = {**dict([*self.blocks.items()][-1:]), first: block}

    def fill(self, inputs: Tensor, targets: Tensor, first_sample: int, sampled: Tensor, *weights: Tensor) -> None:
        """Writes samples `first_sample`, ... into int64 CPU tensors (B, T), and into tensors (B T) each token's loss at
        sampling and, without a teacher, its advantage."""
        step, first = divmod(first_sample, self.samples)
        block = self.block(step)
        rows = slice(first, first + len(inputs))
        rollouts = block.rollouts[rows]
        fill_rows(inputs, targets, rollouts, self.pad)
        for out in (sampled, *weights):
            out.zero_()
        length = inputs.shape[1]
        for row, (rollout, advantage) in enumerate(zip(rollouts, block.advantages[rows], strict=True)):
            start = row * length + len(rollout.prompt) - 1
            stretch = slice(start, start + len(rollout.answer))
            for advantages in weights:
                advantages[stretch] = advantage
            sampled[stretch] = torch.tensor(rollout.losses, dtype=torch.float64).to(sampled.dtype)

    def has_gradient(self, first_sample: int) -> bool:
        """True if an answer of the micro-batch has an advantage."""
        step, first = divmod(first_sample, self.samples)
        return any(self.block(step).advantages[first : first + self.training.design.batch.micro_batch])

    @property
    def pad(self) -> int:
        return min(self.sampler.ends)

    def trained_tokens(self, first_sample: int, samples: int) -> int:
        """The tokens of all answers of a step, which its gradient is a mean over."""
        return sum(len(rollout.answer) for rollout in self.block(first_sample // self.samples).rollouts)

    # Sampling.

    def prompts_before(self, step: int) -> list[int]:
        """The prompt of each row of the rollouts made before `step`."""
        groups = self.samples // self.about.group
        first = step // self.about.updates * groups
        numbers = (self.prompts.of_group(group, self.seed) for group in range(first, first + groups))
        return [number for number in numbers for _ in range(self.about.group)]

    def make(self, step: int) -> Block:
        began, rows = time.perf_counter(), range(self.samples)
        prompts = self.prompts_before(step)
        seeds = [mix(self.seed, DRAW, step, row) >> 1 for row in rows]
        rollouts = [Rollout(self.prompts.prompts[n], seed) for n, seed in zip(prompts, seeds, strict=True)]
        own = self.share(rows)
        passes = self.complete(self.sampler, [rollouts[row] for row in own])
        sampled = time.perf_counter() - began
        earned = self.earned([rollouts[row] for row in own], [self.prompts.rows[prompts[row]] for row in own])
        parts = [(rollouts[row].answer, rollouts[row].losses, reward) for row, reward in zip(own, earned, strict=True)]
        everyone, rewards = self.ranks.all_gather_objects(parts, "the rollouts"), list[float]()
        for rollout, (answer, losses, reward) in zip(rollouts, (one for part in everyone for one in part), strict=True):
            rollout.answer, rollout.losses, rollout.exact = answer, losses, True
            rewards.append(reward)
        block = self.block_of(step, rollouts, rewards)
        block.figures.update(passes=passes, sampling_seconds=sampled, seconds=time.perf_counter() - began)
        if self.ranks.is_rank_0:
            self.store(block, prompts)
        return block

    def share(self, rows: Sequence[Any]) -> Sequence[Any]:
        """This rank's share of a step's rows."""
        count = len(rows) // self.ranks.size
        return rows[self.ranks.rank * count :][:count]

    def complete(self, sampler: ExactSampler, rollouts: Sequence[Rollout]) -> int:
        """Answers this rank's prompts, in whole micro-batches."""
        self.training.await_weights()
        self.ranks.set_status("its rollouts")
        return sampler.answer(self.micro_batches(rollouts), self.about.answer_tokens)

    def micro_batches(self, rollouts: Sequence[Rollout]) -> list[Sequence[Rollout]]:
        size = self.training.design.batch.micro_batch
        return [rollouts[first : first + size] for first in range(0, len(rollouts), size)]

    def earned(self, rollouts: Sequence[Rollout], rows: Sequence[Mapping[str, Any]]) -> list[float]:
        """The rewards of this rank's answers. All ranks raise the error of one."""
        rewards, error = list[float](), None
        try:
            rewards = self.rewards.of(rows, [self.text_of(rollout) for rollout in rollouts])
        except HandgradError as raised:
            error = raised
        for other in self.ranks.all_gather_objects(error, "the rewards"):
            if other is not None:
                other.shared = True
                raise other
        return rewards

    def text_of(self, rollout: Rollout) -> str:
        """An answer without the token or the text that ends it."""
        ended = bool(rollout.answer) and rollout.answer[-1] in self.sampler.ends
        return self.stop.before(self.decode_text(rollout.answer[:-1] if ended else rollout.answer))

    def block_of(self, step: int, rollouts: list[Rollout], rewards: list[float]) -> Block:
        size, advantages = self.about.group, list[float]()
        groups = [rewards[first : first + size] for first in range(0, len(rewards), size)]
        for group in groups:
            baseline = math.fsum(group) / size
            advantages += [reward - baseline for reward in group]
        tokens = [len(rollout.answer) for rollout in rollouts]
        figures = {
            "reward": mean(rewards),
            "answer_tokens": mean(tokens),
            "entropy": math.fsum(loss for one in rollouts for loss in one.losses) / sum(tokens),  # estimated, nats a token
            "unended": mean(not self.sampler.has_ended(one) for one in rollouts),
            "equal_groups": mean(len(set(group)) == 1 for group in groups),  # all of whose answers earn the same
        }
        return Block(step, rollouts, rewards, advantages, figures)

    # Between runs.

    def path_of(self, step: int) -> Path:
        return self.folder / f"step_{step:08d}.jsonl"

    def store(self, block: Block, prompts: Sequence[int]) -> None:
        """Writes a block, a rollout a line."""
        lines = list[str]()
        for number, rollout, reward in zip(prompts, block.rollouts, block.rewards, strict=True):
            line = {"prompt": number, "seed": rollout.seed, "reward": reward, "text": self.text_of(rollout)}
            lines.append(json.dumps({**line, "answer": rollout.answer, "losses": rollout.losses}) + "\n")
        with storage_errors(f"writing {self.folder}"):
            self.folder.mkdir(exist_ok=True)
            write_durably(self.path_of(block.first), "".join(lines))

    def stored(self, step: int) -> Block:
        """Reads the block that `step` made, on rank 0 for all. Raises `DataError` if it is damaged or missing."""
        path = self.path_of(step)

        def read() -> tuple[list[Rollout], list[float]]:
            rollouts, rewards = list[Rollout](), list[float]()
            try:
                with storage_errors(f"reading {path}"):
                    lines = [parse_json(line) for line in path.read_bytes().splitlines()] if path.is_file() else []
                for line in lines:
                    prompt = self.prompts.prompts[line["prompt"]]
                    rollouts.append(Rollout(prompt, line["seed"], line["answer"], line["losses"], exact=True))
                    rewards.append(float(line["reward"]))
            except (ValueError, KeyError, IndexError, TypeError):
                rollouts = []
            if len(rollouts) != self.samples:
                raise DataError(
                    f"expected the {self.samples} rollouts of the step in progress, found {len(rollouts)} in {path};"
                    f" restore the file, or start again from a checkpoint after a multiple of {self.about.updates} steps"
                )
            return rollouts, rewards

        return self.block_of(step, *self.ranks.from_rank_0(read, "the stored rollouts"))

    # What the run records.

    def record(self, log: RunLog, completed: int, result: StepResult) -> dict[str, Any]:
        """Records the figures of a step that sampled; returns every step's entry in the audit's chain. Raises
        `NumericsError` if the trainer's log-probabilities are not the sampler's."""
        block = self.block(completed - 1)
        difference = float(result.reports[DIFFERENCE].item()) if block.first == completed - 1 else 0.0
        if difference != 0:
            raise NumericsError(
                f"step {completed}: expected the sampler's log-probabilities in training, found a difference of"
                f" {difference:.3g}: memory or a processor is faulty, or an operation reads more than its inputs; start"
                " again from the last checkpoint"
            )
        if block.first == completed - 1:
            log.record("rollouts", step=completed, **block.figures, difference=difference)
        return {"rollouts": block.digests}

    def divergence(self, completed: int) -> float | None:
        """KL(policy || start) in nats a token, of the policy that sampled the answers of step `completed`, or of step 1
        before it. None without these answers or the start's weights, after a resume.

        The estimate is the mean of exp(d) - 1 - d with d = log p_start - log p over these tokens (Schulman's k3,
        http://joschu.net/blog/kl-approx.html): like -d it has the divergence as its expectation; it is never negative.
        """
        start, block = self.training.start, self.blocks.get(self.about.first_step(max(0, completed - 1)))
        if start is None or block is None:
            return None
        own = self.share(block.rollouts)
        self.training.await_weights()
        parameters = self.training.state.parameters
        present = parameters.to("cpu", copy=True)
        parameters.copy_(start)
        try:
            losses = [of_row for rows in self.micro_batches(own) for of_row in self.sampler.losses(rows)]
        finally:
            parameters.copy_(present)
        pairs = (zip(one.losses, of_row, strict=True) for one, of_row in zip(own, losses, strict=True))
        return self.per_token([[math.expm1(now - then) - (now - then) for now, then in pair] for pair in pairs])

    def per_token(self, rows: list[list[float]]) -> float:
        """The mean over the tokens of all ranks' rows."""
        sums = [(math.fsum(of_row), len(of_row)) for of_row in rows]
        everyone = [one for part in self.ranks.all_gather_objects(sums, "the divergence") for one in part]
        return math.fsum(one for one, _ in everyone) / sum(tokens for _, tokens in everyone)

    def held_out(self, most_tokens: int) -> Answered | None:
        """The rewards of greedy answers to validation prompts, the first that `most_tokens` allow, and the divergence of
        sampled ones from a teacher; None without prompts."""
        if not (shards := prompts_of(self.dataset, "validation")):
            return None
        (shard,) = shards
        count = max(1, min(len(shard.prompts), most_tokens // self.about.answer_tokens))
        size = self.training.design.batch.micro_batch
        own = [row for row in range(count) if row // size % self.ranks.size == self.ranks.rank]
        sampled, rollouts = (
            [Rollout(shard.prompts[row], mix(self.seed, HELD_OUT, row) >> 1) for row in own] for _ in range(2)
        )
        self.complete(self.greedy, rollouts)
        divergence = None
        if self.teacher is not None:
            self.complete(self.sampler, sampled)
            every = self.micro_batches(sampled)
            divergence = self.per_token([of_row for rows in every for of_row in self.sampler.losses(rows, self.teacher)])
        earned = self.earned(rollouts, [shard.rows[row] for row in own])
        parts = [(row, len(r.answer), paid, self.text_of(r)) for row, r, paid in zip(own, rollouts, earned, strict=True)]
        everyone = sorted(one for part in self.ranks.all_gather_objects(parts, "the answers") for one in part)
        rewards = [reward for _, _, reward, _ in everyone]
        texts = [(shard.rows[row]["messages"][-1]["content"], text, reward) for row, _, reward, text in everyone[:SHOWN]]
        return Answered(divergence, *mean_and_error(rewards), mean(tokens for _, tokens, _, _ in everyone), count, texts)
