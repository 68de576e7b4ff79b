"""Estimates data parallelism on more GPUs than were measured: arithmetic over measured rates, as a table.

    python -m benchmarks.efficiency

A step of W ranks takes the time of their micro-batches and of the exposed collectives. All gradients but the embeddings'
travel during the backward of the last micro-batch, all weights but the embeddings' during the forward of the first one. A
collective of n bytes over W ranks moves n (W - 1) / W out of each, at the rate of the slowest link, plus a fixed time for
each of its W - 1 messages.
"""

import json
from bisect import bisect_left
from dataclasses import dataclass
from pathlib import Path

from handgrad.memory.layout import buckets_of
from handgrad.memory.rows import flat_elements
from handgrad.models import parameter_table
from handgrad.settings import presets
from handgrad.settings.config import ModelShape

RESULTS = Path(__file__).parent / "results"
GPUS = (8, 32, 128, 512)
NODE = 8  # GPUs of a machine
FORWARD, BACKWARD = 0.23, 0.55  # of a micro-batch: the blocks' share; the rest is the loss head
PAYS = 0.9  # of linear: the threshold of the last column


@dataclass(frozen=True)
class Network:
    name: str
    gigabytes_per_second: float  # out of each GPU, between machines
    microseconds_per_message: float


@dataclass(frozen=True)
class Model:
    name: str
    preset: str
    micro_batch: int  # samples of 1024 tokens
    tokens_per_second: float  # of the slowest GPU alone


def measured(name: str) -> dict:
    return json.loads((RESULTS / f"{name}.json").read_text())


def networks() -> list[Network]:
    """NVLink as measured, the others at nominal rates, with a link for every GPU or one for the eight of a machine."""
    nvlink = measured("h200-x4-collectives")
    return [
        Network("NVLink", nvlink["exchange_gigabytes_per_second"], nvlink["small_collective_microseconds"] / 3),
        Network("InfiniBand, 400 Gb/s a GPU", 50.0, 5.0),
        Network("Ethernet, 400 Gb/s a machine", 50.0 / NODE, 20.0),
        Network("Ethernet, 100 Gb/s a machine", 12.5 / NODE, 20.0),
    ]


def models() -> list[Model]:
    found = []
    for name, preset, micro_batch in (("124M", "d12", 64), ("1558M", "d48", 16)):
        rows = measured(f"h200-x4-scaling-{name.lower()}")["rows"]
        alone = [min(row["tokens_per_second_by_gpu"]) for row in rows if row["contender"] == "alone"]
        found.append(Model(name, preset, micro_batch, sum(alone) / len(alone)))
    return found


def step_seconds(model: Model, network: Network, ranks: int, micro_steps: int) -> float:
    """The time of a step of `micro_steps` micro-batches on each rank; gradients travel in float32, weights in bf16."""
    sizes = presets.model(model.preset)
    shape = ModelShape(50257, 1024, sizes["num_layers"], sizes["num_heads"], sizes["channels"])
    table = parameter_table(shape, ranks)
    parameters, bare = flat_elements(table, ranks), buckets_of(table, ranks)[0].elements

    def collective(elements: int, itemsize: int, count: int) -> float:
        moved = elements * itemsize * (ranks - 1) / ranks / (network.gigabytes_per_second * 1e9)
        return moved + count * (ranks - 1) * network.microseconds_per_message * 1e-6

    micro_batch = model.micro_batch * 1024 / model.tokens_per_second
    hidden = len(buckets_of(table, ranks)) - 1
    bare_seconds = collective(bare, 4, 1) + collective(bare, 2, 1)
    backward = max(0.0, collective(parameters - bare, 4, hidden) - BACKWARD * micro_batch)
    forward = max(0.0, collective(parameters - bare, 2, hidden) - FORWARD * micro_batch)
    return micro_steps * micro_batch + bare_seconds + backward + forward


def efficiency(model: Model, network: Network, ranks: int, micro_steps: int) -> float:
    linear = micro_steps * model.micro_batch * 1024 / model.tokens_per_second
    return linear / step_seconds(model, network, ranks, micro_steps)


def pays_from(model: Model, network: Network, ranks: int) -> int:
    """The smallest number of micro-batches per rank and step that reaches `PAYS` of linear; more only come nearer to it."""
    return 1 + bisect_left(range(1, 1 << 20), PAYS, key=lambda n: efficiency(model, network, ranks, n))


def lines() -> list[str]:
    """A row per model and network; for each number of GPUs the efficiency with one and with eight micro-batches a rank, and
    the size of a step, in tokens, that reaches 90 % of linear."""
    return [
        f"| {model.name} | {network.name} | " + " | ".join(cell(model, network, ranks) for ranks in GPUS) + " |"
        for model in models()
        for network in networks()
    ]


def cell(model: Model, network: Network, ranks: int) -> str:
    if network.name == "NVLink" and ranks > NODE:
        return "–"
    tokens = pays_from(model, network, ranks) * model.micro_batch * 1024 * ranks
    shares = ", ".join(f"{efficiency(model, network, ranks, micro_steps):.0%}" for micro_steps in (1, 8))
    return f"{shares}, {tokens / 1e6:.1f}M"


if __name__ == "__main__":
    print("\n".join(lines()))
