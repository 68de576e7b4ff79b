"""A palette for pictures: few colours that stand for all, and the nearest of them for each pixel.
Sums and distances are whole numbers, and exact: neither threads nor numpy's version change a palette's bits.
"""

from collections.abc import Iterable
from random import Random

import numpy as np

from handgrad.data.codes import RGB, Codes, View
from handgrad.errors import UsageError

MOST_PIXELS = 1 << 18  # that k-means sees
MOST_ROUNDS = 50  # of k-means
SEED = 512  # of k-means++
CHUNK = 1 << 18  # distances to hold at once: a core's cache holds them
GOLDEN = 2654435769  # 2^32 over the golden ratio


def train_palette(pictures: Iterable[np.ndarray], colours: int) -> np.ndarray:
    """The palette (colours, 3), uint8, of distinct colours, the darkest first, for pictures (..., 3), uint8.

    k-means (Lloyd, 1982) from seeds of k-means++ (Arthur and Vassilvitskii, 2007), over at most 2^18 pixels. Each round
    rounds its means, so that every distance is exact. Raises `UsageError`: too few colours."""
    points, weights = _sample(pictures, colours)
    palette, squares, draw = np.empty((colours, 3), np.int32), np.full(len(points), 1 << 18, np.int32), Random(SEED).random
    for n in range(colours):  # k-means++: pixels in proportion to the squared distance to the colours so far
        sums = (squares * weights).cumsum()
        palette[n] = points[sums.searchsorted(int(draw() * int(sums[-1])), side="right")]
        squares = np.minimum(squares, _squares(points, palette[n]))
    for _ in range(MOST_ROUNDS):
        before, chosen = palette, nearest(points, palette)
        counts = np.bincount(chosen, weights, colours)
        sums = np.stack([np.bincount(chosen, weights * channel, colours) for channel in points.T], 1)
        palette = np.unique(np.rint(sums[counts > 0] / counts[counts > 0, None]).astype(np.int32), axis=0)
        if len(palette) < colours:  # a cluster without pixels, or two with one mean
            squares = _squares(points, palette[nearest(points, palette)])
        while len(palette) < colours:
            palette = np.append(palette, points[None, squares.argmax()], 0)
            squares = np.minimum(squares, _squares(points, palette[-1]))
        if np.array_equal(palette, before):
            break
    luminance = palette @ np.array([299, 587, 114])  # in thousandths: ITU-R BT.601
    return palette[np.lexsort((*palette.T[::-1], luminance))].astype(np.uint8)


def nearest(pixels: np.ndarray, palette: np.ndarray) -> np.ndarray:
    """The index (...), uint16, in a palette (colours, 3) of the colour nearest to each pixel (..., 3); of equally near ones
    the lowest. It minimises |c|^2 - 2 p.c: |p - c|^2 less |p|^2, whole numbers below 2^24, which float32 holds exactly."""
    packed, indices = np.unique(_packed(pixels), return_inverse=True)
    points = np.concatenate([_unpacked(packed), np.ones((len(packed), 1))], 1, dtype=np.float32)
    terms = np.concatenate([-2.0 * palette, (palette.astype(np.float32) ** 2).sum(1, keepdims=True)], 1, dtype=np.float32)
    chosen, step = np.empty(len(points), np.uint16), max(1, CHUNK // len(palette))
    for first in range(0, len(points), step):
        chosen[first : first + step] = (points[first : first + step] @ terms.T).argmin(1)
    return chosen[indices].reshape(pixels.shape[:-1])


def plain_view(codes: Codes) -> View:
    """The view of codes that are pixels, or bytes of pixels."""
    palette, shape = np.array(codes.colours, np.uint8), (-1, codes.rows, codes.columns)

    def encode(pictures: np.ndarray) -> np.ndarray:
        return pictures.reshape(shape) if codes.decoder == RGB else nearest(pictures, palette)

    return View(codes.size, encode, codes.pixels)


def _sample(pictures: Iterable[np.ndarray], colours: int) -> tuple[np.ndarray, np.ndarray]:
    """Distinct colours (points, 3), at least `colours`, and the number of sampled pixels that have each. Pixel i is sampled
    if i times the golden ratio has a small fraction: evenly in the sequence, and out of step with the rows of a picture."""
    seen, parts, count, bound, total = np.zeros(1 << 24, bool), [np.empty((2, 0), np.int64)], 0, 1 << 32, 0
    for packed in map(_packed, pictures):
        seen[packed] = True
        keys = np.arange(total, total + len(packed)) * GOLDEN & 0xFFFFFFFF
        parts.append(np.stack([keys, packed])[:, keys < bound])
        count, total = count + parts[-1].shape[1], total + len(packed)
        while count > MOST_PIXELS:
            bound, whole = bound // 2, np.concatenate(parts, 1)
            parts = [whole[:, whole[0] < bound]]
            count = len(parts[0][0])
    if (most := len(every := np.flatnonzero(seen))) < colours:
        remedy = f"try --codes palette:{most}" if most > 1 else "name other pictures"
        raise UsageError(f"expected at least {colours} colours in the pictures, found {most}; {remedy}")
    points, weights = np.unique(np.concatenate(parts, 1)[1], return_counts=True)
    rare = np.setdiff1d(every, points)[: max(0, colours - len(points))]  # the sample may miss some
    return _unpacked(np.append(points, rare)), np.append(weights, np.ones_like(rare))


def _packed(pixels: np.ndarray) -> np.ndarray:
    """pixels (..., 3) -> (pixels), int32: 8 bits each for red, green and blue."""
    return pixels.reshape(-1, 3).astype(np.int32) @ np.array([1 << 16, 1 << 8, 1], np.int32)


def _unpacked(packed: np.ndarray) -> np.ndarray:
    return np.stack([packed >> 16, packed >> 8 & 255, packed & 255], -1).astype(np.int32)


def _squares(points: np.ndarray, colours: np.ndarray) -> np.ndarray:
    """Squared distances (points), int32, to one colour (3,), or to one for each point (points, 3)."""
    return np.square(points - colours) @ np.ones(3, np.int32)
