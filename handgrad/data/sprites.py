"""The built-in pictures: sprites of 14 x 14 pixels with captions whose probabilities are known, so the least loss is, too.

`sprite(seed, number)` draws one. As in stories.py every choice is uniform, so a caption that took choices among n_1, ...
n_k alternatives has probability 1 / (n_1 ... n_k): an integer span, and -log p is its logarithm, rounded once. So is the
picture's, once its caption is known. Two promises make this true, each with a test: a picture determines its caption
(`read`), and with it every choice; a caption says all that was drawn before it.

    caption   one figure or two; their places; the ground; for each figure its colour, never the other's, and its shape
    picture   for each figure whether it looks left or right
"""

import functools
import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from handgrad.data.questions import Draw

ROWS = COLUMNS = 14
TILE = 7  # rows and columns of a place
PALETTE = {
    "black": (26, 24, 38),
    "white": (255, 255, 255),
    "cream": (250, 234, 200),
    "mint": (190, 236, 214),
    "navy": (44, 50, 96),
    "red": (222, 56, 62),
    "gold": (242, 168, 28),
    "green": (52, 152, 72),
    "blue": (56, 132, 232),
    "purple": (142, 78, 190),
    "pink": (246, 128, 176),
}
COLOURS: tuple[tuple[int, int, int], ...] = tuple(PALETTE.values())  # red, green, blue of each code
CODE = {name: code for code, name in enumerate(PALETTE)}
GROUNDS = ("white", "cream", "mint", "navy")
INKS = ("red", "gold", "green", "blue", "purple", "pink")  # what a figure is drawn in; none is a ground
PLACES = ("top left", "top right", "bottom left", "bottom right")
LAYOUTS = tuple(tuple(itertools.combinations(PLACES, count)) for count in (1, 2))  # places of one figure, of two figures

# Figures that look left: `.` ground, `#` ink, `+` black, `o` white. None equals its mirror image.
LAYERS = ".#+o"
SHEET = """
    cat        fish       house      mushroom
    #.#....    ..##...    ...#...    ..###..
    ###...#    .####.#    ..####.    .#oo##.
    +#+...#    #+#####    .#####.    ##oo#o#
    ######.    ######.    #######    #######
    .#####.    #######    .#####.    ..+#+..
    .#####.    .####.#    .#o#+#.    ..###..
    .#...#.    ..##...    .###+#.    ..###..
"""


FIGURES = {  # the two pictures (2, TILE, TILE) of each shape, as indices into `LAYERS`
    name: np.array([[[LAYERS.index(pixel) for pixel in row[::turn]] for row in rows] for turn in (1, -1)])
    for name, *rows in zip(*map(str.split, SHEET.strip().splitlines()), strict=True)
}


class Sprite(NamedTuple):
    caption: str
    codes: np.ndarray  # (ROWS, COLUMNS) uint16, indices into COLOURS
    caption_span: int  # the product of the numbers of alternatives behind the caption
    picture_span: int  # behind the picture, once its caption is known

    @property
    def nats(self) -> float:
        """-log p(caption, picture). The order is free: a picture has the same `nats` alone, and its caption adds none."""
        return math.log(self.caption_span * self.picture_span)


class _CountedDraw(Draw):
    span = 1  # the product of the numbers of alternatives so far

    def below(self, count: int) -> int:
        self.span *= count
        return super().below(count)


def sprite(seed: int, number: int) -> Sprite:
    """Sprite `number` of the corpus `seed`: the same on every platform, in any order, in any process."""
    draw = _CountedDraw("sprite", seed, number)
    layouts = LAYOUTS[draw.below(len(LAYOUTS))]
    places = layouts[draw.below(len(layouts))]
    ground = draw.one(GROUNDS)
    inks = draw.some(INKS, len(places))
    shapes = [draw.one(tuple(FIGURES)) for _ in places]
    caption_span = draw.span
    codes = np.full((ROWS, COLUMNS), CODE[ground], np.uint16)
    for place, ink, shape in zip(places, inks, shapes, strict=True):
        top, left = (TILE * side for side in divmod(PLACES.index(place), 2))
        pose = FIGURES[shape][draw.below(len(FIGURES[shape]))]
        codes[top : top + TILE, left : left + TILE] = _colouring(ground, ink)[pose]
    return Sprite(_caption(places, inks, shapes, ground), codes, caption_span, draw.span // caption_span)


def read(codes: np.ndarray, wrong: int = 0) -> str | None:
    """The caption of a picture (ROWS, COLUMNS) of codes; None if no sprite looks so.

    Each place may have up to `wrong` wrong pixels. With 5 or fewer no other caption fits: shapes differ in 16 or more."""
    tiles = codes.reshape(2, TILE, 2, TILE).swapaxes(1, 2).reshape(4, 1, TILE * TILE)
    ground = max(GROUNDS, key=lambda name: np.count_nonzero(codes == CODE[name]))
    meanings, drawings = _drawings(ground)
    right = (tiles == drawings).sum(-1)  # (places, drawings) pixels
    if right.max(1).min() < TILE * TILE - wrong:
        return None
    nearest = [meanings[n] for n in right.argmax(1)]
    seen = [(place, *meaning) for place, meaning in zip(PLACES, nearest, strict=True) if meaning]
    if len(seen) not in (1, 2) or len({ink for _, ink, _ in seen}) < len(seen):
        return None
    places, inks, shapes = zip(*seen, strict=True)
    return _caption(places, inks, shapes, ground)


def _caption(places: Sequence[str], inks: Sequence[str], shapes: Sequence[str], ground: str) -> str:
    figures = [f"a {ink} {shape} {place}" for place, ink, shape in zip(places, inks, shapes, strict=True)]
    return f"{', '.join(figures)}, on {ground}"


def _colouring(ground: str, ink: str) -> np.ndarray:
    """The code of each of `LAYERS`."""
    return np.array([CODE[name] for name in (ground, ink, "black", "white")])


@functools.cache
def _drawings(ground: str) -> tuple[list[tuple[str, str] | None], np.ndarray]:
    """All that a place may show: ink and shape (None for nothing), and codes (drawings, pixels)."""
    meanings, drawings = list[tuple[str, str] | None]([None]), [np.full((1, TILE * TILE), CODE[ground])]
    for ink, (shape, poses) in itertools.product(INKS, FIGURES.items()):
        meanings += [(ink, shape)] * len(poses)
        drawings.append(_colouring(ground, ink)[poses].reshape(len(poses), -1))
    return meanings, np.concatenate(drawings)
