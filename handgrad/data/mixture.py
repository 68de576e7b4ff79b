"""Several data sets in one run, each with a weight: which set a sample comes from is a pure function of (seed, i).

Samples come in blocks of `BLOCK`, in which a keyed permutation orders the sets. After whole blocks each of K sets has given
its share of the samples, off by at most K / 2 (`shares`); within a block, by at most `BLOCK` / 4 more. A set's
j-th sample is the one that `Batches` gives to j, so each set keeps its own order and its own epochs.

A run that resumes with other weights or sets has phases: each set continues after the samples that it has given.
"""

import functools
import hashlib
import json
import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from handgrad.data.batches import Batches, mix, permute_all
from handgrad.data.preferences import has_pairs
from handgrad.data.shards import SPLITS, Dataset, open_dataset
from handgrad.errors import DataError, UsageError
from handgrad.storage.checkpoint import Checkpoint

if TYPE_CHECKING:
    from torch import Tensor

BLOCK = 32  # samples
SET_ORDER = 5  # domain separator in a hash key (batches has 1 to 3, pieces 4)
MIXTURE = "mixture"  # an identity entry: the phases of a run on several sets
WEIGHT = re.compile(r"(\d+\.?\d*|\.\d+)(e[-+]?\d\d?)?|\d+/0*[1-9]\d*", re.ASCII)
EXAMPLE = "--data shards/a=0.8,shards/b=0.2"


class WeightedSet(NamedTuple):
    """One of a run's data sets."""

    name: str  # in logs; "" for the only set of a run
    weight: Fraction  # its share of the samples
    dataset: Dataset


class Phase(NamedTuple):
    """The weights of sets, by their identities in ascending order, for the steps after `first_step`."""

    first_step: int
    weights: dict[str, Fraction]


@dataclass(frozen=True, eq=False)
class Mixture(Dataset):
    """Several sets as one dataset. `splits` has the shards of all; `sets` are in the user's order."""

    sets: tuple[WeightedSet, ...]
    phases: tuple[Phase, ...]

    @functools.cached_property
    def identity(self) -> str:
        """SHA-256 over the identities of the sets in ascending order; of a single set, its own."""
        known = sorted(one.dataset.identity for one in self.sets)
        return known[0] if len(known) == 1 else hashlib.sha256(json.dumps(known).encode()).hexdigest()

    @property
    def is_chat(self) -> bool:
        """True if a set holds conversations."""
        return any(one.dataset.is_chat for one in self.sets)


def apart(dataset: Dataset) -> tuple[WeightedSet, ...]:
    """The sets of a dataset."""
    return dataset.sets if isinstance(dataset, Mixture) else (WeightedSet("", Fraction(1), dataset),)


def normalised(weights: Mapping[str, str]) -> dict[str, Fraction]:
    """Weights as shares of 1. Raises `UsageError` unless each is a number above 0, like 0.8, 4, 1e-3 or 1/3."""
    for name, text in weights.items():
        if not WEIGHT.fullmatch(text) or not Fraction(text):
            raise UsageError(f"the weight of {name} must be a number above 0, like {EXAMPLE}, found {text!r}")
    total = sum(map(Fraction, weights.values()))
    return {name: Fraction(text) / total for name, text in weights.items()}


def named_sets(data: str) -> dict[str, Fraction]:
    """The folders in the setting `data`, with their weights. An existing folder is a single set, whatever its name. Raises
    `UsageError`: a set without a weight or twice, or the errors of `normalised`."""
    if Path(data).exists() or not re.search("[,=]", data):
        return {data: Fraction(1)}
    weights = dict[str, str]()
    for entry in map(str.strip, data.split(",")):
        folder, _, weight = entry.rpartition("=")
        if not folder:
            raise UsageError(f"data must name each set with its weight, like {EXAMPLE}, found {entry!r}")
        if folder in weights:
            raise UsageError(f"data names {folder} twice; give it once, with the sum of its weights")
        weights[folder] = weight
    return normalised(weights)


def open_data(data: str, model: str = "", *, chat: bool = False) -> Dataset:
    """Opens the set or sets in the setting `data`. Raises the errors of `named_sets` and `open_dataset`, `UsageError` for
    equal sets, `DataError` if their tokenizers differ or only some have a validation split."""
    weights = named_sets(data)
    opened = {folder: open_dataset(folder, model, chat=chat) for folder in weights}
    folder, first = next(iter(opened.items()))
    if len(opened) == 1:
        return first
    for other, dataset in opened.items():
        if has_pairs(dataset):
            raise UsageError(f"pairs are no part of several sets, found some in {other}; give them alone")
        one, two = first.tokenizer, dataset.tokenizer
        if (one.sha256, one.vocab_size) != (two.sha256, two.vocab_size):
            raise DataError(
                f"expected one tokenizer in all sets of data, found {one.kind} ({one.vocab_size} words) in {folder} and"
                f" {two.kind} ({two.vocab_size} words) in {other}; prepare one of them again with the other's"
                f" {'--codes' if first.codes else '--tokenizer'}"
            )
        if (same := next(name for name, one in opened.items() if one.identity == dataset.identity)) != other:
            raise UsageError(f"{same} and {other} in data hold the same tokens; give one, with the sum of their weights")
        if bool(dataset.splits["validation"]) != bool(first.splits["validation"]):
            without = folder if dataset.splits["validation"] else other
            raise DataError(f"expected a validation split in every set of data, found none in {without}; prepare it again")
    names = [Path(folder).name for folder in opened]
    names = names if len({*names, ""}) > len(names) else [*opened]
    return mixture(data, [WeightedSet(*one) for one in zip(names, weights.values(), opened.values(), strict=True)], (), 0)


def mixture(data: str, sets: Sequence[WeightedSet], earlier: Sequence[Phase], step: int) -> Mixture:
    """`sets` as one dataset whose weights hold after `step`, unless the last of the `earlier` phases has them."""
    ordered = sorted(sets, key=lambda one: one.dataset.identity)
    weights = {one.dataset.identity: one.weight for one in ordered}
    splits = {name: tuple(shard for one in ordered for shard in one.dataset.splits[name]) for name in SPLITS}
    phases = (*earlier, *([] if earlier and earlier[-1].weights == weights else [Phase(step, weights)]))
    return Mixture(Path(data), sets[0].dataset.tokenizer, splits, None, tuple(sets), phases)


# Phases, as the identity of a run records them.


def phases_record(phases: Iterable[Phase]) -> list[Any]:
    """Phases as JSON: (first step, the weight of each set by its identity)."""
    return [[step, {name: str(weight) for name, weight in weights.items()}] for step, weights in phases]


def phases_of(identity: Mapping[str, Any]) -> list[Phase]:
    """The phases in the identity of a run; of a run on a single set, one. Raises `DataError` for damaged ones."""
    record = identity.get(MIXTURE, [[0, {str(identity.get("data")): "1"}]])
    try:
        return [Phase(int(step), normalised(weights)) for step, weights in record]
    except (UsageError, ValueError, TypeError, AttributeError):
        raise DataError(f"expected the weights of a run's sets, found {record!r:.80}; it was edited or damaged") from None


def continued(dataset: Dataset, resumed: Checkpoint | None) -> Dataset:
    """`dataset` for a run that resumes from a checkpoint, with the phases so far."""
    identity = (resumed.manifest.get("identity") or {}) if resumed else {}
    if resumed is None or not (isinstance(dataset, Mixture) or MIXTURE in identity):
        return dataset
    sets = [one._replace(name=one.name or dataset.folder.name) for one in apart(dataset)]
    return mixture(str(dataset.folder), sets, phases_of(identity), resumed.step)


def as_begun(data: str, identity: Mapping[str, Any]) -> str:
    """The setting `data` for a replay of a recorded run's last phase. Raises `DataError` if a set is missing."""
    folders = named_sets(data)
    if MIXTURE not in identity and len(folders) == 1:
        return data
    known, weights = {open_dataset(folder).identity: folder for folder in folders}, phases_of(identity)[-1].weights
    if missing := [name for name in weights if name not in known]:
        raise DataError(f"expected the run's set {missing[0][:12]} in {data}, found none; give --data with all its sets")
    return ",".join(f"{known[name]}={weight}" for name, weight in weights.items())


# Samples.


def shares(weights: Iterable[Fraction], samples: int) -> list[int]:
    """The number of the first `samples` samples that each set gives. They add up, and none falls as `samples` grows."""
    counts, left, rest = list[int](), samples, Fraction(1)
    for weight in weights:
        part = weight / rest  # of the samples that the sets before leave; the last set takes all
        counts.append((2 * left * part.numerator + part.denominator) // (2 * part.denominator))
        left, rest = left - counts[-1], rest - weight
    return counts


@functools.lru_cache(maxsize=64)
def order_of(weights: tuple[Fraction, ...], block: int, key: int) -> list[int]:
    """The set of each sample in a block, as an index into `weights`."""
    before, after = (shares(weights, blocks * BLOCK) for blocks in (block, block + 1))
    sets = [index for index, (a, b) in enumerate(zip(before, after, strict=True)) for _ in range(b - a)]
    return [sets[slot] for slot in permute_all(np.arange(BLOCK), BLOCK, key).tolist()]


class MixedBatches:
    """The samples of a run on several sets, with the methods of `Batches` that a run calls."""

    def __init__(self, sets: Mapping[str, Batches], phases: Sequence[Phase], first_samples: Sequence[int], seed: int):
        """`sets`: by identity; `first_samples`: of the phases."""
        self.sets, self.weights, self.seed = sets, [phase.weights for phase in phases], seed
        self.samples_per_epoch = sum(one.samples_per_epoch for one in sets.values())
        self.trains_all = all(one.trains_all for one in sets.values())
        self.first_samples = [0]
        self.before = [Counter[str]()]  # by phase: the samples that each set has given before it
        for first in first_samples[1:]:
            self.before.append(self.given(first)[1])
            self.first_samples.append(first)

    def given(self, sample: int) -> tuple[str, Counter[str]]:
        """(the identity of a sample's set, the number of samples before it by set)."""
        phase = bisect_right(self.first_samples, sample) - 1
        block, index = divmod(sample - self.first_samples[phase], BLOCK)
        names, weights = zip(*self.weights[phase].items(), strict=True)
        whole = Counter(dict(zip(names, shares(weights, block * BLOCK), strict=True)))
        order = [names[which] for which in order_of(weights, block, mix(self.seed, SET_ORDER, phase, block))]
        return order[index], self.before[phase] + whole + Counter(order[:index])

    def fill(self, inputs: "Tensor", targets: "Tensor", first_sample: int, document_starts: "Tensor | None" = None) -> None:
        """As `Batches.fill`."""
        for row in range(len(inputs)):
            (name, samples), at = self.given(first_sample + row), slice(row, row + 1)
            starts = None if document_starts is None else document_starts[at]
            self.sets[name].fill(inputs[at], targets[at], samples[name], starts)

    def trained_tokens(self, first_sample: int, samples: int) -> int:
        """As `Batches.trained_tokens`."""
        draws = map(self.given, range(first_sample, first_sample + samples))
        return sum(self.sets[name].trained_tokens(samples_drawn[name], 1) for name, samples_drawn in draws)
