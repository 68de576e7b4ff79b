"""Answers that the training forward itself chooses: the sampler's log-probabilities are the trainer's, bit for bit.

The Gumbel-max draw (`ops.decode.choose_tokens`) makes a token a function of its logits and of noise that a hash of (seed,
position, token id) gives. So an answer can be checked: with the noise of its seed, the logits of the training forward must
choose each of its tokens. `ExactSampler` drafts answers by decoding with a cache, which is fast and rounds differently. It
runs the training forward over the drafts, keeps each up to its first token that the forward would not choose, puts the
forward's choice there and drafts the rest again, until nothing changes. (Speculative decoding, Leviathan et al. 2023,
https://arxiv.org/abs/2211.17192, with the training forward as the target and equal noise instead of a rejection test.)

The result is a pure function of the weights, the prompt and the seed: the drafts decide only how long it takes. So it does
not depend on the number of texts decoded together, on the kernels of the decoder, or on the number of ranks.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from handgrad.errors import NumericsError
from handgrad.generation.generate import END_OF_TEXT, STOP, Continuation, Decoder, SamplingOptions, StopText
from handgrad.memory.arena import Buffer
from handgrad.memory.rows import KIND
from handgrad.models import architecture
from handgrad.models.passes import head_logits, head_losses
from handgrad.networks import ModelShape

CHOSEN, SEEDS, PLACES, SCRATCH = "rollouts.chosen", "rollouts.seeds", "rollouts.places", "rollouts.scratch"
MOST_ROWS = 1 << 15  # of logits in one choice: the rows are an axis of a CUDA grid, which has at most 65535


@dataclass(eq=False)
class Rollout:
    """A prompt and the model's answer to it."""

    prompt: list[int]
    seed: int
    answer: list[int] = field(default_factory=list)  # with the token that ends it, unless it reached its limit
    losses: list[float] = field(default_factory=list)  # -log p of each token of the answer, nats
    exact: bool = False  # the training forward chooses the whole answer


def buffers(shape: ModelShape, tokens: int, ops: Any) -> list[Buffer]:
    """The rows that the check of drafts adds to a plan. `tokens`: of a micro-batch."""
    numbers = [Buffer(name, (tokens,), torch.int64, KIND) for name in (CHOSEN, SEEDS, PLACES)]
    size_bytes = ops.decode.choosing_scratch_bytes(batch=min(tokens, MOST_ROWS), vocab_size=shape.vocab_size)
    return [*numbers, Buffer(SCRATCH, (size_bytes,), torch.uint8, KIND)]


class ExactSampler:
    """Answers prompts with the weights of a training."""

    def __init__(
        self,
        state: Any,
        model_ops: Any,
        plain_ops: Any,
        decode: Any,
        ends: Sequence[int],
        stop: StopText,
        temperature: float = 1.0,
    ):
        """`state`: a `TrainingState`; `model_ops`: the operations of its forward, which accept targets below 0; `plain_ops`
        and `decode`: operations and buffers of the decoder; `ends`: the tokens that end an answer, as `stop` does."""
        self.state, self.ops, self.plain_ops, self.shape = state, model_ops, plain_ops, state.design.shape
        self.options, self.ends, self.stop = SamplingOptions(temperature=temperature), frozenset(ends), stop
        model = self.shape, plain_ops, state.plain_weights, decode, self.options
        self.decoder = Decoder(*model, end_of_text=None, ends=self.ends)
        forward = architecture(self.shape).forward(model_ops, state.weights, state.activations, self.shape)
        self.forward = [stage.run for stage in forward]

    def answer(self, micro_batches: Sequence[Sequence[Rollout]], most_tokens: int) -> int:
        """Completes all rollouts, in the training's micro-batches; returns the most passes of its forward that one took."""
        passes, waiting = 0, list(micro_batches)
        while waiting:
            passes += 1
            drafted = [rollout for rows in waiting for rollout in rows if not rollout.exact]
            self.draft([rollout for rollout in drafted if not self.is_complete(rollout, most_tokens)], most_tokens)
            for rows in waiting:
                self.check(rows)
            waiting = [rows for rows in waiting if not all(rollout.exact for rollout in rows)]
        return passes

    def is_complete(self, rollout: Rollout, most_tokens: int) -> bool:
        return len(rollout.answer) == most_tokens or self.has_ended(rollout)

    def has_ended(self, rollout: Rollout) -> bool:
        """True if the answer ends by itself, not at its limit."""
        return bool(rollout.answer) and (rollout.answer[-1] in self.ends or self.stop.ends(rollout.answer))

    def draft(self, rollouts: Sequence[Rollout], most_tokens: int) -> None:
        """Continues answers with the decoder."""
        texts = [Continuation(one.prompt, most_tokens, one.seed, list(one.answer)) for one in rollouts]
        for text in self.decoder.generate(texts):
            if not text.stopped and self.stop.ends(text.tokens):
                text.stopped = STOP
        for rollout, text in zip(rollouts, texts, strict=True):
            rollout.answer = [*text.tokens, *([text.end] if text.stopped == END_OF_TEXT else [])]

    def check(self, rows: Sequence[Rollout]) -> None:
        """Runs the training forward over a micro-batch. Sets each rollout's losses; cuts an answer at the first token that
        the forward chooses otherwise, and ends it with that choice. A rollout is exact if nothing changed."""
        targets = self.read(rows)
        trained = (targets.view(-1) >= 0).nonzero().squeeze(1)
        seeds = torch.zeros(targets.shape, dtype=torch.int64)
        seeds[: len(rows)] = torch.tensor([rollout.seed for rollout in rows]).unsqueeze(1)
        for name, host in ((SEEDS, seeds), (PLACES, torch.arange(1, targets.shape[1] + 1).repeat(len(targets)))):
            self.state.views[name].copy_(host.view(-1))
        self.choose(trained)
        chosen, losses = (self.of_answers(rows, each) for each in (self.state.views[CHOSEN], self.state.activations.losses))
        for rollout, its_chosen, its_losses in zip(rows, chosen, losses, strict=True):
            accept(rollout, its_chosen, its_losses)

    def losses(self, rows: Sequence[Rollout], teacher: Any = None) -> list[list[float]]:
        """-log p of the tokens of each answer of a micro-batch, nats, by the present weights; with `teacher`, a
        `WithTeacher`, the divergence from it at these tokens."""
        self.read(rows, teacher.forward if teacher else ())
        head_losses(teacher or self.ops, self.state.weights, self.state.activations, self.shape)
        return self.of_answers(rows, self.state.activations.losses)

    def of_answers(self, rows: Sequence[Rollout], values: Tensor) -> list[list[Any]]:
        """The entries of `values` (B T) at the tokens of each answer."""
        lines = values.view(self.state.activations.targets.shape).tolist()
        spans = (slice(len(one.prompt) - 1, len(one.prompt) - 1 + len(one.answer)) for one in rows)
        return [line[span] for line, span in zip(lines, spans, strict=False)]

    def read(self, rows: Sequence[Rollout], before: Sequence[Callable[[], None]] = ()) -> Tensor:
        """Runs the training forward over a micro-batch, up to the head, after `before`; returns its targets (B, T), on the
        host."""
        act = self.state.activations
        inputs, targets = (torch.empty(act.tokens.shape, dtype=torch.int64) for _ in range(2))
        fill_rows(inputs, targets, rows, pad=min(self.ends))
        for device, host in ((act.tokens, inputs), (act.targets, targets)):
            device.copy_(host)
        for launch in (*before, *self.forward):
            launch()
        return targets

    def choose(self, trained: Tensor) -> None:
        """act.lnf -> act.losses, and the tokens chosen from the same logits. `trained`: the rows of answers, on the host;
        without a GPU only these are read, since the draws of a whole vocabulary for a row take as long as its GEMM."""
        act, views, sizes = self.state.activations, self.state.views, {"vocab_size": self.shape.vocab_size}
        options = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0, "scratch": views[SCRATCH]}
        options |= sizes | {"temperature": self.options.temperature}
        for rows, logits in head_logits(self.ops, self.state.weights, act):
            ours: Any = rows
            losses = act.losses[rows]
            if on_cpu := self.state.design.device.type == "cpu":
                ours = trained[(trained >= rows.start) & (trained < rows.stop)]
                logits, losses = logits[ours - rows.start], torch.empty_like(losses[: len(ours)])
            self.ops.classifier_forward(losses, logits, act.targets.view(-1)[ours], softcap=self.shape.softcap, **sizes)
            if self.shape.softcap:
                self.plain_ops.decode.softcap_forward(logits, softcap=self.shape.softcap)
            if on_cpu:
                chosen, drawn = torch.empty(len(ours), dtype=torch.int64), (views[SEEDS][ours], views[PLACES][ours])
                self.plain_ops.decode.choose_tokens(chosen, logits, None, *drawn, **options)
                act.losses[ours], views[CHOSEN][ours] = losses, chosen
                continue
            for first in range(rows.start, rows.stop, MOST_ROWS):
                some = slice(first, min(first + MOST_ROWS, rows.stop))
                drawn = views[SEEDS][some], views[PLACES][some]
                part = logits[first - rows.start : some.stop - rows.start]
                self.plain_ops.decode.choose_tokens(views[CHOSEN][some], part, None, *drawn, **options)


def fill_rows(inputs: Tensor, targets: Tensor, rollouts: Sequence[Rollout], pad: int) -> None:
    """Writes a rollout a row into int64 CPU tensors (B, T), padded with the token `pad`. Only answers have targets."""
    inputs.fill_(pad)
    targets.fill_(-1)
    for row, rollout in enumerate(rollouts):
        tokens, first = torch.tensor([*rollout.prompt, *rollout.answer]), len(rollout.prompt)
        inputs[row, : len(tokens) - 1] = tokens[:-1]
        targets[row, first - 1 : len(tokens) - 1] = tokens[first:]


def accept(rollout: Rollout, chosen: Sequence[int], losses: Sequence[float]) -> None:
    """Keeps an answer up to its first token that differs from the one `chosen`, which replaces it."""
    same = next((n for n, (a, b) in enumerate(zip(rollout.answer, chosen, strict=True)) if a != b), len(chosen))
    rollout.exact, rollout.losses = same == len(chosen), list(losses)
    if not rollout.exact:
        if chosen[same] < 0:
            raise NumericsError(
                "the model's logits are not finite while it answers: its weights have diverged; use an earlier checkpoint,"
                " or train again with a lower --learning-rate"
            )
        rollout.answer = [*rollout.answer[:same], chosen[same]]
