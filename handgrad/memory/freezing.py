"""Freezing: parameters that a run leaves as they are, by their names."""

import re
from collections.abc import Iterator
from dataclasses import replace
from fnmatch import fnmatchcase

from handgrad.errors import UsageError
from handgrad.memory.rows import Table
from handgrad.names import nearest_name

LAYERS = re.compile(r"blocks\.(\d+)-(\d+)(\..*)?")


def freeze(table: Table, patterns: str) -> Table:
    """The table with the rows frozen that one of the patterns names.

    Patterns are separated by commas. One names a row (`wte`, `blocks.3.qkv_weight`), all rows below a name (`blocks.3`),
    what a glob matches (`blocks.*.ln1_*`), or one of these for several layers (`blocks.0-5`, `blocks.0-5.fc_*`). Raises
    `UsageError` for a pattern that names no row, or a layer that is not there, and when nothing is left to train.
    """
    frozen: set[str] = set()
    for given in filter(None, (part.strip() for part in patterns.split(","))):
        for pattern in by_layer(given):
            below = pattern.rstrip(".") + ".*"
            found = {row.name for row in table if fnmatchcase(row.name, pattern) or fnmatchcase(row.name, below)}
            if not found:
                where = "" if pattern == given else f" ({given!r})"
                blocks = dict.fromkeys(filter(None, (row.name.rpartition(".")[0] for row in table)))
                near = nearest_name(pattern, [*(row.name for row in table), *blocks])
                raise UsageError(f"freeze names no parameter of this model: {pattern!r}{where}{near}")
            frozen |= found
    if len(frozen) == len(table):
        raise UsageError(f"freeze {patterns!r} leaves no parameter to train; name fewer")
    return tuple(replace(row, frozen=True) if row.name in frozen else row for row in table)


def by_layer(pattern: str) -> Iterator[str]:
    """`blocks.2-3.fc_*` -> `blocks.2.fc_*`, `blocks.3.fc_*`; another pattern as it is, and so a range without layers."""
    ranged = LAYERS.fullmatch(pattern)
    layers = range(int(ranged[1]), int(ranged[2]) + 1) if ranged else range(0)
    if not ranged or not layers:
        yield pattern
        return
    for layer in layers:
        yield f"blocks.{layer}{ranged[3] or ''}"
