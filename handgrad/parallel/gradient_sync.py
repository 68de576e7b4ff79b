"""The lanes' gradients, summed in one fixed tree, and the weights that come of it, handed to all ranks.

A rank adds up its own lanes' gradients first, as a stack of partial sums, then every bucket goes around: each rank gets
the other ranks' sums of the parts that it owns, and adds them by the same tree. Buckets go on their way while the backward
of the layers below still runs, on a stream of their own.

With `reduce_precision` bf16 every operand of every addition is rounded first, so that it makes no difference where in the
tree it had to travel.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from handgrad.config import RunConfig
from handgrad.models.transformer import Pause
from handgrad.parallel.buckets import RING, Bucket
from handgrad.parallel.ranks import Ranks
from handgrad.training.state import TrainingState


class Reduction:
    """What the lanes and ranks of a run have to do with each other in a step."""

    def __init__(self, config: RunConfig, state: TrainingState, ranks: Ranks):
        self.state, self.ranks = state, ranks
        self.zero = config.zero
        self.rounded = config.reduce_precision == "bf16"
        self.lanes = max(1, config.lanes) // ranks.size  # of this rank
        self.by_name = {bucket.name: bucket for bucket in state.buckets}
        cuda = state.device.type == "cuda" and ranks.size > 1
        self.stream = torch.cuda.Stream() if cuda else None
        self.published = {bucket.name: torch.cuda.Event() for bucket in state.buckets} if cuda else {}
        self.received = torch.cuda.Event() if cuda else None
        self.sending: list[tuple[Bucket, dist.Work]] = []
        self.publishing: dict[str, dist.Work] = {}  # on a CPU: the buckets whose weights are on their way

    # A rank's own lanes.

    def stack_lane(self, lane: int, part: slice, *, last: bool) -> None:
        """Joins the sum of the rank's `lane`, in `gradients`, with the sums that wait for it; unless it was the last lane,
        the result waits in turn."""
        stack, level = self.state.lane_stack[:, part], 0
        while lane >> level & 1:
            self.state.ops.tree_sum(stack[0], stack[:: level + 1][:2], rounded=self.rounded)
            level += 1
        if not last:
            stack[level + 1].copy_(stack[0])

    def launch_sums(self) -> None:
        """Every kind of sum once, for the kernels to be compiled."""
        if self.lanes > 1:
            self.stack_lane(1, slice(None), last=True)
        if self.ranks.size > 1:
            self.sum_pieces(self.state.buckets[0])

    # Between ranks.

    def on_its_way(self, pause: Pause) -> None:
        """In the last micro-step of the last lane: sends a bucket as soon as it is complete."""
        bucket = self.by_name[pause.bucket]
        self.aside(lambda: self.send(bucket))
        if self.zero == 2:
            self.make_place(self.state.buckets.index(bucket) - RING + 1)

    def send(self, bucket: Bucket) -> None:
        if self.beside(bucket):
            self.receive()  # before its buffer is used again; the first bucket in memory has another
        if self.received is not None:
            self.received.record()
        if self.lanes > 1:
            self.stack_lane(self.lanes - 1, bucket.flat, last=True)
        sent, received = self.buffers(bucket)
        if self.rounded:
            sent.copy_(self.state.gradients[self.state.gradient_places[bucket.name]])
        operation = f"gradients of {bucket.name}"
        self.sending.append((bucket, self.ranks.all_to_all(received, sent, operation, overlapped=self.beside(bucket))))

    def beside(self, bucket: Bucket) -> bool:
        """Whether kernels run while this bucket travels: not with the first in memory, the last of a backward and the one
        that the next forward begins with."""
        return bucket is not self.state.buckets[0]

    def make_place(self, index: int) -> None:
        """With zero 2: clears the place of a block's gradients, which the block RING above it had until it was received.
        The block in between is not yet begun: its backward already adds to one of this block's bias gradients."""
        if 0 < index < len(self.state.buckets) - 1:
            if self.received is not None:
                torch.cuda.current_stream().wait_event(self.received)
            self.state.gradients[self.state.gradient_places[self.state.buckets[index].name]].zero_()

    def receive(self) -> None:
        """Takes in the buckets that are on their way: the sum of the ranks' sums, where this rank owns it."""
        while self.sending:
            bucket, work = self.sending.pop(0)
            self.ranks.wait(work, f"gradients of {bucket.name}")
            owned = self.sum_pieces(bucket)
            if not self.zero:
                operation = f"gradients of {bucket.name} to all"
                work = self.ranks.all_gather(
                    self.state.gradients[bucket.flat], owned, operation, overlapped=self.beside(bucket)
                )
                self.ranks.wait(work, operation)

    def sum_pieces(self, bucket: Bucket) -> Tensor:
        """Adds the ranks' sums of what this rank owns of a bucket; returns its place in `gradients`."""
        owned = self.state.reduced(bucket)
        _, received = self.buffers(bucket)
        self.state.ops.tree_sum(owned, received.view(self.ranks.size, -1), rounded=self.rounded)
        return owned

    def buffers(self, bucket: Bucket) -> tuple[Tensor, Tensor]:
        """(what a rank sends of a bucket, what it receives): its gradients as they are, or rounded on their way."""
        gradients = self.state.gradients[self.state.gradient_places[bucket.name]]
        start = self.state.buckets[0].elements if self.beside(bucket) else 0
        received = self.state.exchange.view(gradients.dtype)[start : start + bucket.elements]
        if not self.rounded:
            return gradients, received
        halves = received.view(torch.bfloat16)[: 2 * bucket.elements]
        return halves[: bucket.elements], halves[bucket.elements :]

    def all_received(self) -> None:
        """The end of a step's gradients: the current stream goes on once the last bucket is summed."""
        self.aside(self.receive)
        if self.stream is not None:
            torch.cuda.current_stream().wait_stream(self.stream)

    def collect_sums(self) -> None:
        """Every rank's losses and, where they share, partial norms, on every rank."""
        state, ranks = self.state, self.ranks
        parts = [("losses", state.lane_losses)]
        if state.sharers > 1:
            parts.append(("norms", state.norm_partials))
        for what, full in parts:
            mine = full.view(ranks.size, -1)[ranks.rank]
            ranks.wait(ranks.all_gather(full, mine, what), what)
        if state.scaling is not None:
            scaling, what = state.scaling, "fp8 statistics"
            ranks.wait(ranks.all_gather(scaling.everyone, scaling.totals[: scaling.first_weight], what), what)
            scaling.join_ranks()

    # The new weights.

    def publish(self) -> None:
        """Starts to give every rank the others' new weights, in the order in which the next forward reads them."""
        if self.state.sharers > 1:
            self.aside(self.launch_publishing)

    def launch_publishing(self) -> None:
        for bucket in self.state.buckets:
            weights, operation = self.state.parameters, f"weights of {bucket.name}"
            mine = weights[bucket.owned(self.ranks.rank, self.ranks.size)]
            work = self.ranks.all_gather(weights[bucket.flat], mine, operation, overlapped=self.beside(bucket))
            if self.stream is None:
                self.publishing[bucket.name] = work
            else:
                self.ranks.wait(work, operation)
                self.published[bucket.name].record()

    def await_weights(self, name: str) -> None:
        """The current stream (on a CPU the host) goes on once this bucket's new weights are here."""
        if self.stream is not None:
            torch.cuda.current_stream().wait_event(self.published[name])
        elif name in self.publishing:
            self.ranks.wait(self.publishing.pop(name), f"weights of {name}")

    def await_all_weights(self) -> None:
        for bucket in self.state.buckets:
            self.await_weights(bucket.name)

    def aside(self, launch: Callable[[], None]) -> None:
        """Launches on the side stream, after what the current stream has been given so far."""
        if self.stream is None:
            launch()
            return
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            launch()
