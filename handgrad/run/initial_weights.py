"""The weights that a run starts from when they are not drawn: opened, held against the run, taken up."""

from collections.abc import Callable

from handgrad.config import RunConfig
from handgrad.data.shards import Dataset
from handgrad.errors import DataError, UsageError
from handgrad.evaluation.load import Weights
from handgrad.interop.sources import SIZES, open_weights
from handgrad.models.parameters import parameter_table
from handgrad.parallel.ranks import Ranks
from handgrad.training.state import TrainingState


def open_start(config: RunConfig, dataset: Dataset, ranks: Ranks) -> Weights | None:
    """The weights of `init_from`, or None without it. The first rank opens them before the others do, so that a model of
    the Hub is downloaded once.

    Raises `UsageError`: the run has other sizes; `DataError`: another tokenizer, or what `open_weights` finds.
    """
    return opened_in_turn(lambda: open_fitting(config, dataset), ranks) if config.init_from else None


def opened_in_turn(opening: Callable[[], Weights], ranks: Ranks) -> Weights:
    """What `opening` opens, by the first rank before the others. Raises what it raises."""
    found: list[Weights] = []
    ranks.from_rank_0(lambda: found.append(opening()), "the weights")
    return found[0] if found else opening()


def open_fitting(config: RunConfig, dataset: Dataset) -> Weights:
    weights = open_weights(config.init_from)
    for name in SIZES:
        here, there = getattr(config, name), getattr(weights.shape, name)
        if name == "sequence_length" and here > there:
            raise UsageError(
                f"expected a sequence_length of at most the {there} positions of {config.init_from}, found {here};"
                f" try --sequence-length {there}"
            )
        if name != "sequence_length" and here != there:
            raise UsageError(
                f"{name} is {there} in {config.init_from} and {here} in this run; give no preset, --model or sizes to take"
                " those of the weights"
            )
    if weights.tokenizer.sha256 != dataset.tokenizer.sha256:
        raise DataError(
            f"{config.init_from} was trained with another tokenizer than {config.data};"
            " prepare the text with the tokenizer of the weights"
        )
    return weights


def take_weights(weights: Weights, state: TrainingState) -> None:
    """The weights into a state; the optimizer starts afresh. A run with fewer positions has the first of theirs."""
    for theirs, row in zip(parameter_table(weights.shape), state.table, strict=True):
        assert theirs.name == row.name
        state.take_weight(row, weights.weight(theirs)[: row.stored_rows])
