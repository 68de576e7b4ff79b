"""Pictures as documents: a class, or a caption before or after them, and their codes."""

import itertools
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from handgrad.data import sprites
from handgrad.data.batches import mix
from handgrad.data.codes import GREYS, RGB, VOCABULARY, Codes, caption_text, text_of
from handgrad.data.palette import plain_view, train_palette
from handgrad.data.pictures import Picture, class_names, picture_count, read_pictures
from handgrad.data.pieces import Pictures, Piece, split_of
from handgrad.data.recipe import SPRITES, PrepareOptions, palette_size, sides
from handgrad.data.sources import SourceFile

MOST_SAMPLED = 2048  # pictures that train the palette
DIRECTION = 6  # domain separator in a hash key (batches has 1 to 3, pieces 4, mixture 5)


def make_codes(options: PrepareOptions, files: list[SourceFile]) -> Codes:
    """The form of the pictures, with a palette trained on them. Raises the errors of `pictures` and `train_palette`."""
    if options.source == SPRITES:
        return Codes(sprites.ROWS, sprites.COLUMNS, sprites.COLOURS, captions=True)
    rows, columns = sides(options.size)
    if options.codes == RGB:
        return Codes(rows, 3 * columns, GREYS, decoder=RGB)
    classes, captions = () if options.join else class_names(files), bool(options.join)
    if options.coded is not None and options.codes.startswith(VOCABULARY):
        return options.coded
    if options.coded is not None:
        return replace(options.coded, classes=classes, captions=captions)
    counts = [picture_count(file) for file in files]
    total = min(sum(counts), options.documents or sum(counts))
    each = ((file, n) for file, count in zip(files, counts, strict=True) for n in range(count))
    sampled = itertools.islice(each, 0, total, max(1, -(-total // MOST_SAMPLED)))
    read = (read_pictures(file, rows, columns, strict=options.strict, first=n, count=1) for file, n in sampled)
    palette = train_palette((picture.pixels for pictures in read for picture in pictures), palette_size(options.codes))
    return Codes(rows, columns, tuple((int(red), int(green), int(blue)) for red, green, blue in palette), classes, captions)


def picture_pieces(unit: Pictures, codes: Codes) -> Iterator[Piece]:
    """The documents of a unit. Raises the errors of `read_pictures`."""
    view = unit.view or plain_view(codes)
    pictures = list[Picture]()
    for file, first, count in unit.parts:
        pictures += read_pictures(file, *view.size, strict=unit.strict, first=first, count=count)
    every = view.encode(np.stack([picture.pixels for picture in pictures]))
    for n, (picture, picked) in enumerate(zip(pictures, every, strict=True)):
        number = unit.number + n
        if unit.captions:
            first = picture_first(unit.seed, number)
            text = caption_text(unit.captions[n], picked, picture.name, picture_first=first)
        else:
            text = (codes.class_text(picture.label) if codes.classes else "") + text_of(picked)
        yield Piece(split_of(unit.seed, number, unit.block), True, text)


def sprite_piece(split: int, seed: int, number: int) -> Piece:
    """A sprite with its caption. The direction costs log 2: it is a choice between two."""
    sprite = sprites.sprite(seed, number)
    text = caption_text(sprite.caption, sprite.codes, picture_first=picture_first(seed, number))
    return Piece(split, True, text, sprite.nats + float(np.log(2)))


def picture_first(seed: int, number: int) -> bool:
    """True for the half of all documents whose caption comes after the picture."""
    return bool(mix(seed, DIRECTION, number) % 2)
