"""The rewards of a model's greedy answers to prompts: exact match, for most of the built-in rewards."""

from dataclasses import replace
from typing import Any

from handgrad.data.prompts import longest_prompt, open_prompts, prompts_of
from handgrad.data.shards import SPLITS
from handgrad.errors import UsageError
from handgrad.evaluation.load import LoadedModel, Machine, Weights
from handgrad.evaluation.rewards import Rewards, mean, mean_and_error
from handgrad.generation.chat import Talk
from handgrad.generation.decode import decode_buffers, decode_tensors
from handgrad.generation.generate import END_OF_TEXT, STOP, Continuation, Decoder, SamplingOptions, StopText
from handgrad.joins.parallel.ranks import Ranks
from handgrad.memory.arena import Buffer, make_plan
from handgrad.memory.rows import KIND
from handgrad.networks import ModelShape

AT_ONCE, USUAL_ANSWER = 64, 256  # answers; tokens of the longest


class Answers:
    """Plans the memory of answers, then computes their lines. `plan` and `beside`: as in other parts of an evaluation."""

    def __init__(
        self,
        source: Weights,
        data: str,
        reward: str,
        most_tokens: int,
        stop: str | None,
        shape: ModelShape,
        on: Machine,
        ranks: Ranks,
    ):
        """`data`: prompts, all of which are asked; without it, the held-out ones of the run. `stop`: ends an answer; None:
        as in the run. Raises the errors of `open_prompts`, and `UsageError` for prompts without room for an answer."""
        self.source, self.ranks = source, ranks
        self.name = data or source.config.data
        if not self.name:
            raise UsageError("--reward needs prompts: give --data FILE.jsonl, or questions")
        dataset = open_prompts(self.name, str(source.origin.get("source", "")))
        self.shards = [shard for split in (SPLITS if data else SPLITS[1:]) for shard in prompts_of(dataset, split)]
        if not self.shards:
            raise UsageError(f"expected held-out prompts in {self.name}, found none; give other prompts: --data FILE.jsonl")
        self.rewards = Rewards(reward, source.config.reward_seconds)
        self.most_tokens = most_tokens or source.config.answer_tokens or USUAL_ANSWER
        if (room := shape.sequence_length - longest_prompt(dataset)) < 1:
            raise UsageError(
                f"expected prompts below the model's {shape.sequence_length} tokens, found one of {-room} more"
            )
        self.most_tokens = min(self.most_tokens, room)
        self.stop = StopText(source.tokenizer, source.config.answer_stop if stop is None else stop)
        buffers = decode_buffers(shape, AT_ONCE, on.dtype, on.ops)
        self.plan, self.beside = make_plan([replace(buffer, kind=KIND) for buffer in buffers]), list[Buffer]()

    def lines(self, model: LoadedModel, views: dict[str, Any]) -> list[str]:
        """The mean reward with its standard error, and how many tokens the answers have."""
        asked = [pair for shard in self.shards for pair in zip(shard.rows, shard.prompts, strict=True)]
        own, tokenizer = asked[self.ranks.rank :: self.ranks.size], self.source.tokenizer
        about = model.shape, model.ops, model.weights, decode_tensors(model.shape, views), SamplingOptions(temperature=0)
        decoder = Decoder(*about, end_of_text=None, ends=Talk(tokenizer).ends)
        texts = [Continuation(prompt, self.most_tokens, 0) for _, prompt in own]
        for text in decoder.generate(texts):
            if not text.stopped and self.stop.ends(text.tokens):
                text.stopped = STOP
        said = [self.stop.before(tokenizer.decode(text.tokens)) for text in texts]
        earned = self.rewards.of([row for row, _ in own], said)
        self.rewards.close()
        ended = [text.stopped in (END_OF_TEXT, STOP) for text in texts]
        lengths = [len(text.tokens) + (text.stopped == END_OF_TEXT) for text in texts]  # as a validation counts them
        parts = [*zip(earned, lengths, ended, strict=True)]
        everyone = [one for part in self.ranks.all_gather_objects(parts, "the answers") for one in part]
        rewards, tokens, ends = zip(*everyone, strict=True)
        average, error = mean_and_error(rewards)
        return [
            f"prompts           {len(rewards)} in {self.name}, answered greedily",
            f"reward            {average:.4f} ± {error:.4f} ({self.rewards.spec})",
            f"answers           {mean(tokens):.1f} tokens, {mean(ends):.1%} of them ended",
        ]
