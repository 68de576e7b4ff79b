"""Pictures drawn: a grid, a PNG, blocks of colour in a terminal."""

import io

import numpy as np
import pyte
from PIL import Image

from handgrad.data import canvas

PICTURE = np.arange(3 * 2 * 3, dtype=np.uint8).reshape(3, 2, 3) * 10


def test_a_grid_is_about_square_with_white_gaps() -> None:
    pictures = [PICTURE + n for n in range(5)]
    sheet = canvas.grid(pictures)
    assert sheet.shape == (2 * 3 + canvas.GAP, 3 * 2 + 2 * canvas.GAP, 3)
    for n, picture in enumerate(pictures):
        y, x = n // 3 * (3 + canvas.GAP), n % 3 * (2 + canvas.GAP)
        assert np.array_equal(sheet[y : y + 3, x : x + 2], picture)
    assert (sheet[3 : 3 + canvas.GAP] == 255).all() and (sheet[:, 2 : 2 + canvas.GAP] == 255).all()
    assert (sheet[3 + canvas.GAP :, 2 * (2 + canvas.GAP) :] == 255).all(), "the sixth place is empty"


def test_small_pictures_are_enlarged_pixel_by_pixel() -> None:
    large = canvas.enlarged(PICTURE)
    assert large.shape == (129, 86, 3) and np.array_equal(large[::43, ::43], PICTURE)
    assert len({tuple(pixel) for pixel in large[:43, :43].reshape(-1, 3)}) == 1
    whole = np.zeros((canvas.LEAST_SIDE, 4, 3), np.uint8)
    assert canvas.enlarged(whole).shape == whole.shape


def test_a_png_holds_the_pixels() -> None:
    assert np.array_equal(np.array(Image.open(io.BytesIO(canvas.png(PICTURE)))), PICTURE)


def test_a_terminal_shows_two_pixels_in_a_character() -> None:
    """The last row of an odd number of rows is shown twice."""
    screen = pyte.Screen(2, 2)
    pyte.Stream(screen).feed(canvas.blocks(PICTURE).replace("\n", "\r\n"))
    for row, column in np.ndindex(2, 2):
        cell = screen.buffer[row][column]
        upper, lower = PICTURE[2 * row, column], PICTURE[min(2 * row + 1, 2), column]
        assert (cell.data, cell.fg, cell.bg) == ("▀", bytes(upper).hex(), bytes(lower).hex())
