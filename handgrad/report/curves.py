"""Thins long series for drawing: what the eye sees stays, the file stays small."""

from collections.abc import Callable

import numpy as np


def smooth(values: np.ndarray, half_width: int, places: np.ndarray, average: Callable = np.mean) -> np.ndarray:
    """`average` at each of `places` over up to `half_width` neighbours on each side, non-finite ones left out.

    The window is centred, so the curve does not lag. Where the series starts it shrinks on both sides alike, because
    a loss falls steeply there; where it ends it stays wide and one-sided, because there the noise is all there is.
    A place whose own value is not finite stays NaN: a diverged stretch is a gap, not a bridge.
    """
    smoothed = np.full(len(places), np.nan)
    for i, place in enumerate(places):
        if np.isfinite(values[place]):
            reach = min(place, half_width)
            window = values[place - reach : place + reach + 1]
            smoothed[i] = average(window[np.isfinite(window)])
    return smoothed


def envelope(x: np.ndarray, y: np.ndarray, bins: int) -> tuple[np.ndarray, np.ndarray]:
    """At most 2 `bins` points: the lowest and the highest of each bin, in their order, so that every spike stays."""
    y = np.where(np.isfinite(y), y, np.nan)
    if len(y) <= 2 * bins:
        return x, y
    keep = []
    for places in np.array_split(np.arange(len(y)), bins):
        within = y[places]
        if np.isnan(within).all():
            keep.append(int(places[0]))  # one NaN breaks the line here
            continue
        keep.extend(sorted({int(places[np.nanargmin(within)]), int(places[np.nanargmax(within)])}))
    return x[keep], y[keep]


def thin(count: int, limit: int) -> np.ndarray:
    """At most `limit` (2 or more) indices of `count` items, evenly spread, with the first and the last."""
    return np.unique(np.linspace(0, count - 1, min(count, limit)).round().astype(int)) if count else np.empty(0, int)
