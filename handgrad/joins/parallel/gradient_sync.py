"""Gradient sync: sums the lanes' gradients in a fixed tree, then all-gathers the updated weights.

A rank first adds its own lanes' gradients with a stack of partial sums. Then it exchanges each bucket: it receives the
other ranks' sums for the parts that it owns, and adds them in the same tree. It sends a bucket on a separate stream, while
the backward of the layers below still runs.

With bf16 on the wire, every operand of every addition is rounded first, whether or not it crosses the wire.
"""

import contextlib
import itertools
from collections.abc import Iterator
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from handgrad.joins.parallel.ranks import Ranks
from handgrad.memory.arena import Buffer
from handgrad.memory.layout import Bucket, Buckets, Sharding, bucket_of, shard_elements
from handgrad.memory.rows import BLOCK_ELEMENTS, Table
from handgrad.training.state import TrainingState
from handgrad.training.step import Program

RING = 3  # blocks with gradients in memory at once, with ZeRO 2: current, in flight, and next


def gradient_ring(buckets: Buckets) -> dict[str, slice]:
    """With ZeRO 2, bucket name -> range of its gradients. Blocks share `RING` ranges in turn, other buckets own theirs."""
    slots, stop, blocks = {}, 0, block_buckets(buckets)
    for bucket in buckets:
        if bucket in blocks[RING:]:
            slots[bucket.name] = slots[blocks[blocks.index(bucket) - RING].name]
            continue
        slots[bucket.name] = slice(stop, stop + bucket.elements)
        stop += bucket.elements
    return slots


def block_buckets(buckets: Buckets) -> list[Bucket]:
    """The blocks' buckets, all of one size, in order."""
    return [bucket for bucket in buckets if bucket.name.startswith("blocks.")]


def moved(table: Table, buckets: Buckets, slots: dict[str, slice]) -> Table:
    """Moves the table's rows to their buckets' `slots`."""
    shifts = {bucket.name: slots[bucket.name].start - bucket.start for bucket in buckets}
    return tuple(replace(row, offset=row.offset + shifts[bucket_of(row, buckets).name]) for row in table)


def norm_blocks_of(bucket: Bucket) -> int:
    """The number of sums of squares for a whole bucket."""
    return -(-bucket.elements // BLOCK_ELEMENTS)


def buffers(rows: dict[str, Buffer], buckets: Buckets, sharding: Sharding) -> dict[str, Buffer]:
    """Adapts the rows of `training.state.flat_buffers` to one rank: shards of the shared tensors, a stack of sums for its
    lanes, and memory for buckets in flight."""
    elements, exact = rows["parameters"].shape[0], rows["gradients"].dtype
    shard = shard_elements(buckets, sharding.shards)
    rows = dict(rows)
    if "master" in rows:
        rows["master"] = replace(rows["master"], shape=(shard,))
    if sharding.shards_gradients:
        rows["gradient_shard"] = Buffer("gradient_shard", (shard,), exact, "gradients")
        elements = max(slot.stop for slot in gradient_ring(buckets).values())
    rows["gradients"] = replace(rows["gradients"], shape=(sharding.levels, elements))
    rows["losses_of_step"] = replace(rows["losses_of_step"], shape=(sharding.lanes,))
    if sharding.ranks > 1:
        rows["weight_checksums"] = Buffer("weight_checksums", (sharding.ranks,), torch.int64, "gradients")
        own_blocks = sum(norm_blocks_of(bucket) for bucket in buckets)
        rows["own_norms"] = Buffer("own_norms", (2, own_blocks), exact, "gradients")  # of this step and the previous one
        # The first bucket in memory is sent last, and may be in flight together with the one sent before it.
        first, *others = (bucket.wire_elements(sharding.ranks) for bucket in buckets)
        in_flight = first + max(others, default=0)
        rows["exchange"] = Buffer("exchange", (in_flight * exact.itemsize,), torch.uint8, "exchange")
    return rows


class GradientSync:
    """The communication of a training step."""

    def __init__(self, state: TrainingState, ranks: Ranks):
        design = state.design
        self.state, self.ranks, self.ops, self.sharding = state, ranks, design.ops, design.sharding
        self.buckets = design.buckets
        self.by_name = {bucket.name: bucket for bucket in self.buckets}
        ring = gradient_ring(self.buckets) if self.sharding.shards_gradients else {}
        self.gradient_ranges = ring or {bucket.name: bucket.flat for bucket in self.buckets}  # bucket -> its gradients
        self.lane_sums = state.views["gradients"]  # (levels, elements): the current lane, then pending partial sums
        self.gradients = self.lane_sums[0]
        self.own_norms = state.views["own_norms"] if ranks.size > 1 else None  # (2, blocks) of this rank's own lanes
        starts = itertools.accumulate((norm_blocks_of(bucket) for bucket in self.buckets), initial=0)
        self.own_blocks = {bucket.name: first for bucket, first in zip(self.buckets, starts, strict=False)}
        self.step = 0
        cuda = design.device.type == "cuda" and ranks.size > 1
        self.stream = torch.cuda.Stream() if cuda else None
        self.weights_ready = {bucket.name: torch.cuda.Event() for bucket in self.buckets} if cuda else {}
        self.received = torch.cuda.Event() if cuda else None
        self.gradients_in_flight: list[tuple[Bucket, dist.Work]] = []
        self.weight_gathers: dict[str, dist.Work] = {}  # on a CPU: the buckets whose weights are in flight

    def launches(self, program: Program) -> Program:
        """Adds to the program the gather of sums before the update and of weights after it."""
        program = program.adding(compiled_ahead=[self.launch_sums])
        if self.ranks.size == 1:
            return program
        return program.adding(before_update=[self.gather_sums], after_update=[self.gather_weights])

    # A rank's own lanes.

    def stack_lane(self, lane: int, part: slice, *, last: bool) -> None:
        """Adds the sum of the rank's `lane` to the tree's pending partial sums; pending in turn, unless it was the last."""
        stack, level = self.lane_sums[:, part], 0
        while lane >> level & 1:
            self.ops.tree_sum(stack[0], stack[:: level + 1][:2], rounded=self.sharding.rounded)
            level += 1
        if not last:
            stack[level + 1].copy_(stack[0])

    def launch_sums(self) -> None:
        """Launches each kind of sum once, to compile its kernels."""
        if self.sharding.lanes_per_rank > 1:
            self.stack_lane(1, slice(None), last=True)
        if self.ranks.size > 1:
            for bucket in self.buckets:  # their sums start at any multiple of four bytes
                self.sum_own_squares(bucket)
            self.reduce_bucket(self.buckets[0])

    # Between ranks.

    def send_gradients(self, name: str) -> None:
        """Sends a complete bucket, in the last micro-step of the last lane."""
        bucket = self.by_name[name]
        with self.on_side_stream():
            if self.overlaps_kernels(bucket):
                self.reduce_received()  # before reusing its buffer; the first bucket in memory has its own
            if self.received is not None:
                self.received.record()
            if self.sharding.lanes_per_rank > 1:
                self.stack_lane(self.sharding.lanes_per_rank - 1, bucket.flat, last=True)
            self.sum_own_squares(bucket)
            sent, received = self.wire_buffers(bucket)
            if self.sharding.rounded:
                sent.copy_(self.gradients[self.gradient_ranges[name]])
            shares, overlapped = bucket.shares(self.ranks.size), self.overlaps_kernels(bucket)
            work = self.ranks.all_to_all(received, sent, f"gradients of {name}", shares, overlapped=overlapped)
            self.gradients_in_flight.append((bucket, work))
        if self.sharding.shards_gradients:
            self.clear_ring(bucket)

    def sum_own_squares(self, bucket: Bucket) -> None:
        """Sums the squares of this rank's own gradients in a bucket, which identify it if a repeated step differs."""
        assert self.own_norms is not None
        first = self.own_blocks[bucket.name]
        sums = self.own_norms[self.step % 2, first : first + norm_blocks_of(bucket)]
        self.ops.squared_norms(sums, self.gradients[self.gradient_ranges[bucket.name]], block_elements=BLOCK_ELEMENTS)

    def overlaps_kernels(self, bucket: Bucket) -> bool:
        """True if kernels run while this bucket travels: not the first, which is sent last and read first."""
        return bucket is not self.buckets[0]

    def clear_ring(self, sent: Bucket) -> None:
        """With ZeRO 2, after sending a block: zeroes the ring slot for the block `RING - 1` layers below. The slot held the
        block above the sent one, whose exchange is complete. This must come before the backward of the block in between,
        which already adds to a bias gradient in the slot."""
        blocks = block_buckets(self.buckets)
        if sent in blocks and (below := blocks.index(sent) - RING + 1) >= 0:
            if self.received is not None:
                torch.cuda.current_stream().wait_event(self.received)
            self.gradients[self.gradient_ranges[blocks[below].name]].zero_()

    def reduce_received(self) -> None:
        """Receives the buckets in flight and sums this rank's share of each over the ranks."""
        while self.gradients_in_flight:
            bucket, work = self.gradients_in_flight.pop(0)
            self.ranks.wait(work, f"gradients of {bucket.name}")
            owned = self.reduce_bucket(bucket)
            if not self.sharding.zero:
                operation = f"gradients of {bucket.name} to all"
                whole, shares = self.gradients[bucket.flat], bucket.shares(self.ranks.size)
                work = self.ranks.all_gather(whole, owned, operation, shares, overlapped=self.overlaps_kernels(bucket))
                self.ranks.wait(work, operation)

    def reduce_bucket(self, bucket: Bucket) -> Tensor:
        """Sums this rank's share of a bucket over the ranks; returns that share of the step's gradient."""
        shard = self.state.views.get("gradient_shard")
        rank, ranks = self.ranks.rank, self.ranks.size
        owned = self.gradients[bucket.owned(rank, ranks)] if shard is None else shard[bucket.local(rank, ranks)]
        _, received = self.wire_buffers(bucket)
        if owned.numel():
            self.ops.tree_sum(owned, received.view(ranks, -1), rounded=self.sharding.rounded)
        return owned

    def wire_buffers(self, bucket: Bucket) -> tuple[Tensor, Tensor]:
        """(send buffer, receive buffer) for a bucket. Sends the gradients themselves, or a rounded copy."""
        gradients = self.gradients[self.gradient_ranges[bucket.name]]
        exchange = self.state.views["exchange"].view(gradients.dtype)
        ranks, others = self.ranks.size, self.buckets[0].wire_elements(self.ranks.size)
        exchange = exchange[others:] if self.overlaps_kernels(bucket) else exchange[:others]
        elements = ranks * bucket.shares(ranks)[self.ranks.rank]
        if not self.sharding.rounded:
            return gradients, exchange[:elements]
        halves = exchange.view(torch.bfloat16)
        return halves[: bucket.elements], halves[bucket.elements : bucket.elements + elements]

    def await_gradients(self) -> None:
        """Makes the current stream wait until the step's last bucket is summed."""
        with self.on_side_stream():
            self.reduce_received()
        if self.stream is not None:
            torch.cuda.current_stream().wait_stream(self.stream)

    def gather_sums(self) -> None:
        """All-gathers the losses and, if each rank computes only its shard's, the partial norms."""
        parts = [("losses", self.state.losses_of_step)]
        if self.sharding.shards > 1:
            parts.append(("norms", self.state.norm_partials))
        for operation, full in parts:
            own = full.view(self.ranks.size, -1)[self.ranks.rank]
            self.ranks.wait(self.ranks.all_gather(full, own, operation), operation)

    # The new weights.

    def gather_weights(self) -> None:
        """Starts all-gathering the new weights, in the order in which the next forward reads them."""
        if self.sharding.shards == 1:
            return
        with self.on_side_stream():
            for bucket in self.buckets:
                weights, operation = self.state.parameters, f"weights of {bucket.name}"
                shard = weights[bucket.owned(self.ranks.rank, self.ranks.size)]
                whole, shares = weights[bucket.flat], bucket.shares(self.ranks.size)
                work = self.ranks.all_gather(whole, shard, operation, shares, overlapped=self.overlaps_kernels(bucket))
                if self.stream is None:
                    self.weight_gathers[bucket.name] = work
                else:
                    self.ranks.wait(work, operation)
                    self.weights_ready[bucket.name].record()

    def await_weights(self, name: str) -> None:
        """Makes the current stream (on a CPU the host) wait for this bucket's new weights."""
        if self.stream is not None:
            torch.cuda.current_stream().wait_event(self.weights_ready[name])
        elif name in self.weight_gathers:
            self.ranks.wait(self.weight_gathers.pop(name), f"weights of {name}")

    def await_all_weights(self) -> None:
        for bucket in self.buckets:
            self.await_weights(bucket.name)

    @contextlib.contextmanager
    def on_side_stream(self) -> Iterator[None]:
        """Switches to the side stream, ordered after the current stream's launches so far."""
        if self.stream is None:
            yield
            return
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            yield
