"""The built-in pictures: the same for ever, their probabilities are true, and a picture tells its caption."""

import hashlib
import itertools
import math
import random
import re

import numpy as np
import pytest

from handgrad.data import sprites
from handgrad.data.sprites import CODE, COLOURS, FIGURES, GROUNDS, INKS, PLACES, TILE, read, sprite

SPRITES = [sprite(0, number) for number in range(3000)]
ONE = re.compile(r"a (\w+) (\w+) (top left|top right|bottom left|bottom right), ")
CAPTION = re.compile(rf"(?:{ONE.pattern}){{1,2}}on (\w+)")

# What a corpus is made of must never change silently: losses are compared across versions.
GOLDEN = {
    (0, 0): "a green fish top left, on cream",
    (1337, 123_456): "a blue mushroom top right, a red mushroom bottom right, on cream",
    (2**63, 2**40): "a gold cat bottom left, a blue house bottom right, on navy",
}
GOLDEN_FIRST_THOUSAND = "5fa8338fafddb728a1f4c30a640a529d214d5ce1f27c7e74a127e762f77ee22e"


def figures_of(caption):
    return {place: (ink, shape) for ink, shape, place in ONE.findall(caption)}


def choices(one):
    """Every choice behind a sprite, read from its caption and its pixels, as (choice, number of alternatives)."""
    figures, ground = figures_of(one.caption), one.caption.split()[-1]
    read_back = [(len(figures), 2), (tuple(figures), math.comb(4, len(figures))), (GROUNDS.index(ground), 4)]
    for n, (place, (ink, shape)) in enumerate(figures.items()):
        colours = [CODE[name] for name in (ground, ink, "black", "white")]
        alike = (np.take(colours, FIGURES[shape]) == tile_at(one.codes, place)).all((1, 2))
        poses = np.flatnonzero(alike).tolist()
        assert len(poses) == 1, f"{shape} on {ground}: expected one pose, found {poses}"
        read_back += [(INKS.index(ink), 6 - n), (shape, 4), (poses[0], 2)]
    return read_back


def tile_at(codes, place):
    """The pixels of a place, to look at or to change."""
    top, left = ("bottom" in place) * TILE, ("right" in place) * TILE
    return codes[top : top + TILE, left : left + TILE]


def by_choices(monkeypatch, numbers):
    """The sprites whose choices are the digits of `numbers`, first choice first, instead of a hash's."""

    class Digits(sprites._CountedDraw):
        def __init__(self, _domain, _seed, number):
            self.number = number

    monkeypatch.setattr(sprites, "_CountedDraw", Digits)
    return [sprite(0, number) for number in numbers]


def distinct(drawn):
    return len({(one.caption, one.codes.tobytes()) for one in drawn})


def test_golden():
    assert {key: sprite(*key).caption for key in GOLDEN} == GOLDEN
    digest = hashlib.sha256()
    for one in SPRITES[:1000]:
        assert one.codes.dtype == np.uint16 and one.codes.shape == (14, 14)
        digest.update(one.caption.encode() + one.codes.astype("<u2").tobytes())
    assert digest.hexdigest() == GOLDEN_FIRST_THOUSAND


def test_every_choice_is_read_back():
    """So nats is -log p: the product over the alternatives of the choices that a reader sees."""
    every = [choices(one) for one in SPRITES]
    for one, chosen in zip(SPRITES, every, strict=True):
        spans = [count for _, count in chosen]
        assert one.caption_span * one.picture_span == math.prod(spans) and one.nats == math.log(math.prod(spans))
        assert one.picture_span == 2 ** len(figures_of(one.caption))
        assert math.log(one.caption_span) + math.log(one.picture_span) == pytest.approx(one.nats, rel=1e-15)
    seen = [{chosen[n][0] for chosen in every if n < len(chosen)} for n in range(9)]
    assert [len(each) for each in seen] == [2, 4 + 6, 4, 6, 4, 2, 6, 4, 2], "every alternative occurs"


def test_every_sprite_of_one_figure(monkeypatch):
    """All of them, by exhaustive choice: different, each with its probability, half of all together."""
    drawn = by_choices(monkeypatch, range(0, 2 * 768, 2))
    assert {one.caption_span * one.picture_span for one in drawn} == {2 * 768} and distinct(drawn) == 768
    captions = {one.caption for one in drawn}
    assert len(captions) == 4 * 4 * 6 * 4 and {one.caption_span for one in drawn} == {2 * len(captions)}


def test_every_caption_of_two_figures(monkeypatch):
    """All captions once; all pictures of one caption."""
    captions = 6 * 4 * (6 * 5) * (4 * 4)
    drawn = by_choices(monkeypatch, range(1, 2 * captions, 2))
    assert len({one.caption for one in drawn}) == captions and {one.caption_span for one in drawn} == {2 * captions}
    alike = by_choices(monkeypatch, range(1 + 2 * 1000, 2 * captions * 4, 2 * captions))
    assert {one.caption for one in alike} == {drawn[1000].caption} and distinct(alike) == len(alike) == 4
    assert {one.picture_span for one in alike} == {4}


def test_captions():
    for one in SPRITES:
        assert read(one.codes) == one.caption and CAPTION.fullmatch(one.caption), one.caption
        figures = figures_of(one.caption)
        assert [*figures] == [place for place in PLACES if place in figures], "in reading order"
        inks = [ink for ink, _ in figures.values()]
        assert len({*inks}) == len(inks) and one.caption.split()[-1] not in inks


def test_no_wrong_pixel():
    """One wrong pixel, whichever and of whichever colour, or one that is missing: no sprite looks so."""
    codes = sprite(0, 3).codes
    for row, column, code in itertools.product(range(0, 14, 3), range(14), range(-1, len(COLOURS))):
        wrong = codes.astype(np.int64)
        wrong[row, column] = code
        assert (read(wrong) is None) == (code != codes[row, column])


@pytest.mark.parametrize("count", (1, 5))
def test_wrong_pixels(count):
    generator = random.Random(count)
    for one in SPRITES[:200]:
        codes = one.codes.astype(np.int64)
        for place in PLACES:
            tile = tile_at(codes, place)
            for pixel in generator.sample(range(TILE * TILE), count):
                tile[divmod(pixel, TILE)] += generator.choice((-11, 1, 5, 11))
        assert read(codes, wrong=count) == one.caption and read(codes, wrong=count - 1) is None


def test_pictures_outside_the_grammar():
    codes = {name: sprites._colouring("mint", name)[FIGURES["cat"][0]] for name in INKS}

    def picture(**inks):
        drawn = np.full((14, 14), CODE["mint"], np.uint16)
        for place, ink in inks.items():
            tile_at(drawn, place)[:] = codes[ink]
        return drawn

    cat, other = "a red cat top right", "a blue cat bottom left"
    assert read(picture(top_right="red")) == f"{cat}, on mint"
    assert read(picture(top_right="red", bottom_left="blue")) == f"{cat}, {other}, on mint"
    assert read(picture()) is None and read(picture(), wrong=5) is None
    assert read(picture(top_right="red", bottom_left="red")) is None, "one colour twice"
    assert read(picture(top_right="red", bottom_left="blue", top_left="gold")) is None, "three figures"
    for code in (-1, CODE["black"], CODE["red"]):
        assert read(np.full((14, 14), code)) is None


def test_shapes_are_unmistakable():
    """Any two shapes differ in at least 16 of a place's 49 pixels, however they look; from nothing in 26."""
    for (_, some), (_, others) in itertools.combinations(FIGURES.items(), 2):
        assert (some[:, None] != others).sum((2, 3)).min() >= 16
    assert all((poses != 0).sum((1, 2)).min() >= 26 for poses in FIGURES.values())
    assert all((poses == 1).sum((1, 2)).min() >= 24 for poses in FIGURES.values()), "so do two inks"


def test_colours():
    """Inks and grounds share no colour, and any two colours are far apart."""
    assert not {*GROUNDS} & {*INKS} and len(COLOURS) == len(CODE) == 11
    assert all(0 <= value <= 255 for colour in COLOURS for value in colour)
    assert all(math.dist(some, other) > 50 for some, other in itertools.combinations(COLOURS, 2))
