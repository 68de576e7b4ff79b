"""Thins long series for drawing: the curve looks the same, the file stays small."""

from collections.abc import Callable

import numpy as np


def smooth(values: np.ndarray, half_width: int, picked: np.ndarray, average: Callable = np.mean) -> np.ndarray:
    """`average` at each of the indices `picked`, over up to `half_width` finite neighbours on each side.

    The window is centred, so the curve does not lag. At the start of the series it shrinks on both sides alike, because
    a loss falls steeply there; at the end it stays wide and one-sided, because only noise is left to average.
    An index whose own value is not finite stays NaN: a diverged stretch is a gap, not a bridge.
    """
    smoothed = np.full(len(picked), np.nan)
    for i, index in enumerate(picked):
        if np.isfinite(values[index]):
            reach = min(index, half_width)
            window = values[index - reach : index + reach + 1]
            smoothed[i] = average(window[np.isfinite(window)])
    return smoothed


def envelope(x: np.ndarray, y: np.ndarray, bins: int) -> tuple[np.ndarray, np.ndarray]:
    """At most 2 `bins` points: the lowest and the highest of each bin, in their order, so that every spike stays."""
    y = np.where(np.isfinite(y), y, np.nan)
    if len(y) <= 2 * bins:
        return x, y
    keep = []
    for indices in np.array_split(np.arange(len(y)), bins):
        within = y[indices]
        if np.isnan(within).all():
            keep.append(int(indices[0]))  # one NaN breaks the line here
            continue
        keep.extend(sorted({int(indices[np.nanargmin(within)]), int(indices[np.nanargmax(within)])}))
    return x[keep], y[keep]


def thin(count: int, limit: int) -> np.ndarray:
    """At most `limit` (2 or more) indices of `count` items, evenly spread, with the first and the last."""
    return np.unique(np.linspace(0, count - 1, min(count, limit)).round().astype(int)) if count else np.empty(0, int)
