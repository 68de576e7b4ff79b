"""Draws pictures of pixels: as a PNG, several as a grid, and in colour blocks for a terminal."""

import io

import numpy as np
from PIL import Image

LEAST_SIDE = 128  # pixels of a drawn picture: smaller ones are enlarged without smoothing
GAP = 2  # pixels between pictures of a grid, before enlarging


def enlarged(pixels: np.ndarray) -> np.ndarray:
    """pixels (rows, columns, 3), each repeated until the picture's longer side has at least `LEAST_SIDE` pixels."""
    times = -(-LEAST_SIDE // max(pixels.shape[:2]))
    return pixels.repeat(times, 0).repeat(times, 1)


def grid(pictures: list[np.ndarray]) -> np.ndarray:
    """Pictures (rows, columns, 3) of one size, side by side in about a square, on white."""
    rows, columns, _ = pictures[0].shape
    across = int(np.ceil(len(pictures) ** 0.5))
    down = -(-len(pictures) // across)
    sheet = np.full((down * (rows + GAP) - GAP, across * (columns + GAP) - GAP, 3), 255, np.uint8)
    for n, picture in enumerate(pictures):
        y, x = n // across * (rows + GAP), n % across * (columns + GAP)
        sheet[y : y + rows, x : x + columns] = picture
    return sheet


def png(pixels: np.ndarray) -> bytes:
    """pixels (rows, columns, 3), uint8, as a PNG file."""
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def blocks(pixels: np.ndarray) -> str:
    """pixels (rows, columns, 3) as lines for a terminal of 24-bit colour: a character shows two, one above the other."""
    pixels = np.concatenate([pixels, pixels[-1:]]) if len(pixels) % 2 else pixels
    pairs = np.concatenate([pixels[::2], pixels[1::2]], 2).tolist()  # (rows / 2, columns, 6): the upper pixel, the lower
    block = "\x1b[38;2;{};{};{};48;2;{};{};{}m\u2580".format
    return "\n".join("".join(block(*pair) for pair in row) + "\x1b[0m" for row in pairs)
