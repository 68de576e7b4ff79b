"""Checkpoints of adapters: the weights that they adapt, found again, and both merged."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from handgrad.errors import DataError, UsageError
from handgrad.evaluation.load import Weights
from handgrad.joins.lora.merge import merged
from handgrad.joins.lora.tables import Adapter, adapters_of
from handgrad.memory.rows import ParameterRow
from handgrad.models import parameter_table
from handgrad.networks.lora import parse_lora
from handgrad.storage.checkpoint import WEIGHTS_FILE, Checkpoint

PLACE = "path"  # of the weights, in a manifest's word on where they came from


def located(weights: Weights) -> Weights:
    """The weights with their place in their origin: a run of adapters finds them there again."""
    folder = Path(weights.origin["source"]) if weights.checkpoint is None else weights.checkpoint.folder
    place = {PLACE: str(folder.absolute())} if folder.exists() else {}  # else a name on the Hub
    return replace(weights, origin=weights.origin | place)


def base_of(found: Checkpoint, open_weights: Callable[[str], Weights], elsewhere: str = "") -> Weights:
    """The weights that a checkpoint's adapters belong to, by `open_weights`; `elsewhere`: where they lie now. Raises
    `DataError` if they are gone, or others."""
    origin = found.manifest.get("init") or {}
    source, place = str(origin.get("source", "")), str(origin.get(PLACE, ""))
    where = place if place and Path(place).exists() else source
    where = elsewhere if elsewhere not in ("", source) else where
    try:
        base = open_weights(where)
    except (DataError, UsageError) as error:
        raise DataError(f"{found.folder} holds adapters of {source}, and {error}; put those weights back") from None
    then, now = origin.get("sha256", {}), base.origin["sha256"]
    if then != now:
        name = next(name for name in (*then, *now) if then.get(name) != now.get(name))
        was, found_now = (str(digests.get(name, "none"))[:12] for digests in (then, now))
        raise DataError(
            f"{found.folder} holds adapters of {where}, which has changed: expected {name} with SHA-256 {was}, found"
            f" {found_now}; put those weights back"
        )
    return replace(base, origin=origin)


def stored_adapters(found: Checkpoint, weights: Weights) -> tuple[tuple[Adapter, ...], Callable[[str], Tensor]]:
    """(a checkpoint's adapters, the function that reads a row of them)."""
    adapters = tuple(adapters_of(weights.shape, parse_lora(weights.config.lora)))
    shapes = {row.name: row.stored_shape for adapter in adapters for row in adapter.rows()}
    return adapters, lambda name: found.tensor(WEIGHTS_FILE, name, shapes[name])


def merged_checkpoint(weights: Weights, base: Weights) -> Weights:
    """A checkpoint's adapters merged with the weights that they adapt."""
    assert weights.checkpoint is not None
    adapters, tensor = stored_adapters(weights.checkpoint, weights)
    digests = {**weights.origin["sha256"], **{f"of the base, {name}": d for name, d in base.origin["sha256"].items()}}
    origin = weights.origin | {"sha256": digests}
    return replace(weights, weight=merging(base, {a.weight: a for a in adapters}, tensor), origin=origin)


def merging(
    base: Weights, adapters: Mapping[str, Adapter], tensor: Callable[[str], Tensor]
) -> Callable[[ParameterRow], Tensor]:
    """Reads a row of `base`, of whose positions a run may have the first alone, with its adapter added in float32."""
    rows = {row.name: row for row in parameter_table(base.shape)}

    def weight(row: ParameterRow) -> Tensor:
        values = base.weight(rows[row.name])[: row.stored_rows]
        adapter = adapters.get(row.name)
        if adapter is None:
            return values
        values = merged(values, adapter, tensor)
        if not values.isfinite().all():
            raise DataError(f"expected finite numbers in {row.name} with its adapter, found others; the adapters diverged")
        return values

    return weight
