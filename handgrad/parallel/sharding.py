"""The lanes and ranks of a run, and the share of this process."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Sharding:
    """A rank hosts lanes / ranks neighbouring lanes. With ZeRO 0 every rank keeps everything, with 1 its shard of master
    weights and optimizer state, with 2 also its shard of the gradients alone."""

    lanes: int = 1
    rank: int = 0
    ranks: int = 1
    zero: int = 1
    rounded: bool = False  # gradients are rounded to bf16 on their way

    @property
    def lanes_per_rank(self) -> int:
        return self.lanes // self.ranks

    @property
    def levels(self) -> int:
        """Gradient buffers of a rank: the lane at work, and a partial sum for every level of the tree over its lanes."""
        return self.lanes_per_rank.bit_length()

    @property
    def shards(self) -> int:
        """Parts into which master weights and optimizer state are cut."""
        return self.ranks if self.zero else 1

    @property
    def shard(self) -> int:
        """This process's part."""
        return self.rank if self.zero else 0

    @property
    def shards_gradients(self) -> bool:
        return self.zero == 2 and self.ranks > 1
