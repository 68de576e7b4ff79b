"""Log-likelihoods of given tokens under a model: many requests in few batches, summed per request.

A request is a sequence whose last tokens are scored. Requests are sorted by length, the longest first, and cut into
batches of about equally many tokens, so there is hardly any padding. Padding is on the right, where no scored token sees
it. Only the rows of the last layer norm whose next token is scored go through the head.

Memory for the activations is planned for one size: batches of other shapes view the same buffers. One copy
per batch brings all input from the host, and the results stay on the device until the end.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from handgrad.evaluation.loss import OnTokens
from handgrad.joins.parallel.ranks import Ranks
from handgrad.machine.devices import accumulation_dtype
from handgrad.memory.arena import Buffer
from handgrad.models import architecture, forward_buffers, head_chunk_tokens, named_activations
from handgrad.models.passes import run
from handgrad.settings.config import ModelShape

KIND = "evaluation"
LENGTH_MULTIPLE = 16  # of a batch's positions: few shapes to compile and tune kernels for
ROWS_MULTIPLE = 64  # the same for the rows that go through the head


@dataclass(frozen=True)
class Request:
    """Token ids (n). The last `scored` are scored, each given all before it: 1 <= scored < n."""

    tokens: np.ndarray
    scored: int


@dataclass(frozen=True)
class Batch:
    """Requests that go through the model together, by their numbers, as a (rows, length) array of tokens."""

    requests: tuple[int, ...]
    length: int

    @property
    def positions(self) -> int:
        return len(self.requests) * self.length


@dataclass(frozen=True)
class Likelihoods:
    """Per request: the sum of its scored tokens' log-likelihoods in nats, and True if each was the likeliest."""

    sums: np.ndarray  # (requests) float64
    greedy: np.ndarray  # (requests) bool


def make_batches(requests: Sequence[Request], context: int, positions_per_batch: int) -> list[Batch]:
    """Cuts all requests, the longest first, into batches of at most `positions_per_batch` positions (or a single request).

    Keeps only the last context + 1 tokens of a request that is longer than the model's `context` allows; at most `context`
    of them may be scored."""
    for number, request in enumerate(requests):
        scored, token_count = request.scored, len(request.tokens)
        assert 1 <= scored < token_count and scored <= context, f"request {number} scores {scored} of {token_count} tokens"
    lengths = np.array([min(len(request.tokens) - 1, context) for request in requests], dtype=np.int64)
    order = np.argsort(-lengths, kind="stable")
    batches, start = [], 0
    while start < len(order):
        length = min(-(-int(lengths[order[start]]) // LENGTH_MULTIPLE) * LENGTH_MULTIPLE, context)
        rows = max(1, positions_per_batch // length)
        batches.append(Batch(tuple(order[start : start + rows].tolist()), length))
        start += rows
    return batches


@dataclass(frozen=True)
class Block:
    """A batch in the single int32 tensor that is copied to the device: tokens (B, T), then for every scored token the row
    of the (B T, C) activations that predicts it, then the scored ids."""

    ids: Tensor
    rows: int  # B
    length: int  # T

    @property
    def scored(self) -> int:
        """Scored tokens, rounded up; the padding scores token 0 in row 0, and is never read."""
        return (self.ids.numel() - self.rows * self.length) // 2


class Workload:
    """The batches of one rank, packed on the host, to be scored again whenever the weights change."""

    def __init__(
        self,
        requests: Sequence[Request],
        shape: ModelShape,
        dtype: torch.dtype,
        ops: ModuleType,
        device: torch.device,
        *,
        positions_per_batch: int,
        ranks: Ranks,
        head_chunk: int = 0,
    ):
        """`positions_per_batch` (at least the model's context) bounds memory, and affects rounding as a micro-batch
        does. The ranks share whole batches, so no result depends on the number of ranks."""
        assert positions_per_batch >= shape.sequence_length
        self.shape, self.dtype, self.ops, self.ranks = shape, dtype, ops, ranks
        self.count = len(requests)
        self.batches = make_batches(requests, shape.sequence_length, positions_per_batch)
        # The most positions of any rank's batches, so all ranks have the same plan.
        self.positions = max((batch.positions for batch in self.batches), default=1)
        self.chunk = head_chunk_tokens(head_chunk, self.positions, shape.padded_vocab_size, dtype)
        self._pack(requests, pinned=device.type == "cuda")

    def _pack(self, requests: Sequence[Request], *, pinned: bool) -> None:
        batches = self.batches[self.ranks.rank :: self.ranks.size]
        contents: list[np.ndarray] = []
        self.results = 0  # one for every scored token of this rank's requests, and padding
        self.spans: list[int] = []  # per request: the index of its first result, then one past its last
        for batch in batches:
            tokens = np.zeros((len(batch.requests), batch.length), np.int32)
            rows, targets = [], []
            for row, number in enumerate(batch.requests):
                scored, ids = requests[number].scored, requests[number].tokens[-(self.shape.sequence_length + 1) :]
                tokens[row, : len(ids) - 1] = ids[:-1]
                last = row * batch.length + len(ids) - 1
                rows.append(np.arange(last - scored, last, dtype=np.int32))
                targets.append(ids[-scored:].astype(np.int32))
                self.spans += [self.results, self.results + scored]
                self.results += scored
            padding = np.zeros(-sum(map(len, rows)) % ROWS_MULTIPLE, np.int32)
            self.results += len(padding)
            contents.append(np.concatenate([tokens.reshape(-1), *rows, padding, *targets, padding]))
        flat = torch.from_numpy(np.concatenate([np.zeros(0, np.int32), *contents]))
        if pinned:
            flat = flat.pin_memory()
        pieces = flat.split([len(content) for content in contents])
        self.blocks = [Block(ids, len(b.requests), b.length) for ids, b in zip(pieces, batches, strict=True)]

    # Memory.

    def activation_buffers(self) -> list[Buffer]:
        """The buffers of the model's forward for the most positions of a batch; other shapes view them."""
        return forward_buffers(self.shape, 1, self.positions, self.dtype, self.ops, chunk=self.chunk)

    def _view(self, views: dict[str, Tensor], rows: int, length: int) -> Any:
        """The activations of one shape of batch, over the front of each buffer."""
        table = forward_buffers(self.shape, rows, length, self.dtype, self.ops, chunk=self.chunk)
        front = {b.name: views[b.name].view(-1)[: math.prod(b.shape)].view(b.shape) for b in table}
        return named_activations(self.shape, front)

    def buffers(self) -> list[Buffer]:
        """The buffers of scoring, besides the activations: input from the host, the head's input, and the results."""
        rows: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
            "block": ((max((block.ids.numel() for block in self.blocks), default=0),), torch.int32),
            "targets": ((max((block.scored for block in self.blocks), default=0),), torch.int64),
            "picked": ((self.chunk, self.shape.channels), self.dtype),
            "likeliest": ((self.chunk,), torch.int64),
            "losses": ((self.results,), accumulation_dtype(self.dtype)),
            "hits": ((self.results,), torch.bool),
        }
        return [Buffer(f"{KIND}.{name}", dims, kind, KIND) for name, (dims, kind) in rows.items()]

    # Scoring.

    def score(self, weights: Any, views: dict[str, Tensor], progress: OnTokens | None = None) -> Likelihoods:
        """The likelihoods of all requests, on every rank; `views`: of `activation_buffers` and `buffers`.

        Launches all batches without waiting for the device."""
        shapes: dict[tuple[int, int], Any] = {}
        done, total, results = 0, sum(block.rows * block.length for block in self.blocks), 0
        for number, block in enumerate(self.blocks):
            self.ranks.set_status(f"evaluation on tasks, batch {number}")
            size = block.rows, block.length
            if size not in shapes:
                shapes[size] = self._view(views, *size)
            self._score_block(weights, views, shapes[size], block, results)
            results += block.scored
            done += block.rows * block.length
            if progress is not None:
                progress(done, total)
        scores = np.zeros(0), np.zeros(0, bool)
        if self.blocks:
            # Each sum runs from an index to the next, so every second one is a request's; the last may end past the data.
            nats = views[f"{KIND}.losses"].cpu().double().numpy()
            hits = views[f"{KIND}.hits"].cpu().numpy()
            sums = np.add.reduceat(np.append(nats, 0.0), self.spans)[::2]
            scores = -sums, np.logical_and.reduceat(np.append(hits, True), self.spans)[::2]
        return self._gather(scores)

    def _score_block(self, w: Any, views: dict[str, Tensor], act: Any, block: Block, first_result: int) -> None:
        inbox = views[f"{KIND}.block"][: block.ids.numel()]
        inbox.copy_(block.ids, non_blocking=True)
        tokens, rows, targets = inbox.split([block.rows * block.length, block.scored, block.scored])
        act.tokens.copy_(tokens.view(block.rows, block.length))
        wanted = views[f"{KIND}.targets"][: block.scored]
        wanted.copy_(targets)
        run(architecture(self.shape).forward(self.ops, w, act, self.shape))
        for start in range(0, block.scored, self.chunk):
            stop = min(start + self.chunk, block.scored)
            chunk, results = slice(0, stop - start), slice(first_result + start, first_result + stop)
            picked, logits = views[f"{KIND}.picked"][chunk], views["logits"][chunk]
            likeliest = views[f"{KIND}.likeliest"][chunk]
            torch.index_select(act.lnf, 0, rows[start:stop], out=picked)
            self.ops.linear_forward(logits, picked, w.head, None, scratch=act.scratch)
            losses = views[f"{KIND}.losses"][results]
            sizes = {"vocab_size": self.shape.vocab_size, "softcap": self.shape.softcap}
            self.ops.classifier_forward(losses, logits, wanted[start:stop], **sizes)
            torch.argmax(logits[:, : self.shape.vocab_size], 1, out=likeliest)
            torch.eq(likeliest, wanted[start:stop], out=views[f"{KIND}.hits"][results])

    def _gather(self, results: tuple[np.ndarray, np.ndarray]) -> Likelihoods:
        """The results of all ranks, by request."""
        sums, greedy = np.full(self.count, np.nan), np.zeros(self.count, bool)
        for rank, (their_sums, their_greedy) in enumerate(self.ranks.all_gather_objects(results, "results of the tasks")):
            numbers = [number for batch in self.batches[rank :: self.ranks.size] for number in batch.requests]
            sums[numbers], greedy[numbers] = their_sums, their_greedy
        return Likelihoods(sums, greedy)
