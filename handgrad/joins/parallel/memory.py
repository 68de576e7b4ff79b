"""The tensors that lanes and ranks add to a run's plan."""

from dataclasses import replace

import torch

from handgrad.memory.arena import Buffer
from handgrad.memory.layout import Buckets, Sharding, gradient_ring, norm_blocks_of, shard_elements


def with_sharding(rows: dict[str, Buffer], buckets: Buckets, sharding: Sharding) -> dict[str, Buffer]:
    """The flat buffers' rows (`training.state.flat_buffers`) as one rank has them: shards of the ranks' common tensors, a
    stack of sums for its lanes, and memory for buckets in flight."""
    elements, exact = rows["parameters"].shape[0], rows["gradients"].dtype
    shard = shard_elements(buckets, sharding.shards)
    rows = dict(rows)
    if "master" in rows:
        rows["master"] = replace(rows["master"], shape=(shard,))
    if sharding.shards_gradients:
        rows["gradient_shard"] = Buffer("gradient_shard", (shard,), exact, "gradients")
        elements = max(place.stop for place in gradient_ring(buckets).values())
    rows["gradients"] = replace(rows["gradients"], shape=(sharding.levels, elements))
    rows["losses_of_step"] = replace(rows["losses_of_step"], shape=(sharding.lanes,))
    if sharding.ranks > 1:
        rows["weight_checksums"] = Buffer("weight_checksums", (sharding.ranks,), torch.int64, "gradients")
        own_blocks = sum(norm_blocks_of(bucket) for bucket in buckets)
        rows["own_norms"] = Buffer("own_norms", (2, own_blocks), exact, "gradients")  # of a step and of the one before
        # The first bucket in memory is the last to be sent, and may be in flight together with the one before.
        first, *others = (bucket.wire_elements(sharding.ranks) for bucket in buckets)
        in_flight = first + max(others, default=0)
        rows["exchange"] = Buffer("exchange", (in_flight * exact.itemsize,), torch.uint8, "exchange")
    return rows
