"""Palettes: trained on pictures, exact to the bit, and the nearest colour of one for each pixel."""

import numpy as np
import pytest

from handgrad.data import palette as module
from handgrad.data.palette import nearest, train_palette
from handgrad.errors import UsageError

RECORDED = [
    [54, 56, 57],
    [70, 69, 196],
    [186, 64, 59],
    [197, 61, 190],
    [60, 186, 55],
    [65, 197, 188],
    [197, 197, 64],
    [189, 186, 187],
]


def pictures(count: int, seed: int = 0) -> list[np.ndarray]:
    """Pictures of 16 x 16 pixels: each a ramp between two colours, with noise."""
    random = np.random.default_rng(seed)
    ramp = np.linspace(0, 1, 256).reshape(16, 16, 1)
    ends = random.uniform(0, 255, (count, 2, 1, 1, 3))
    clean = ends[:, 0] * ramp + ends[:, 1] * (1 - ramp)
    return list(np.clip(clean + random.normal(0, 4, clean.shape), 0, 255).astype(np.uint8))


def squared_error(images: list[np.ndarray], palette: np.ndarray) -> float:
    """Mean squared distance of pixels to the nearest colours."""
    pixels = np.stack(images).reshape(-1, 3)
    return float(((pixels.astype(int) - palette[nearest(pixels, palette)]) ** 2).sum(1).mean())


def plain_nearest(pixels: np.ndarray, palette: np.ndarray) -> np.ndarray:
    return ((pixels.astype(int)[..., None, :] - palette.astype(int)) ** 2).sum(-1).argmin(-1)


def test_a_grey_ramp_gives_even_greys() -> None:
    ramp = np.arange(256, dtype=np.uint8)[:, None].repeat(3, 1)
    palette = train_palette([ramp], 16)
    assert (palette == palette[:, :1]).all() and palette.dtype == np.uint8 and palette.shape == (16, 3)
    steps = np.diff(palette[:, 0].astype(int))
    assert steps.min() >= 10 and steps.max() <= 22
    assert squared_error([ramp], palette) < 1.2 * 3 * (16**2 - 1) / 12  # three channels of sixteen even steps


@pytest.mark.parametrize("count", [1, 2, 7, 100])
def test_few_colours_are_recovered_exactly(count: int) -> None:
    colours = np.unique(np.random.default_rng(count).integers(0, 256, (count, 3), dtype=np.uint8), axis=0)
    picture = colours[np.arange(6 * count).reshape(6, count) % count]
    palette = train_palette([picture], count)
    assert sorted(palette.tolist()) == sorted(colours.tolist())
    assert (palette[nearest(picture, palette)] == picture).all()


def test_colours_are_distinct_and_the_darkest_comes_first() -> None:
    palette = train_palette(pictures(20), 64)
    assert len(np.unique(palette, axis=0)) == 64
    luminance = palette.astype(int) @ [299, 587, 114]
    assert (np.diff(luminance) >= 0).all()


def test_red_orders_colours_of_one_luminance() -> None:
    equal = [[10, 40, 0], [11, 9, 157], [14, 30, 41]]
    assert len({299 * red + 587 * green + 114 * blue for red, green, blue in equal}) == 1
    assert train_palette([np.array([*equal[::-1], [0, 0, 9]], np.uint8)], 4).tolist() == [[0, 0, 9], *equal]


def test_the_same_pictures_give_the_same_bits() -> None:
    images = pictures(40)
    first = train_palette(iter(images), 32)
    assert (train_palette(iter(images), 32) == first).all()
    assert first.tobytes() != train_palette(pictures(40, seed=1), 32).tobytes()


def test_the_bits_depend_on_no_library() -> None:
    """Recorded with numpy 2.4.6: another numpy, BLAS or processor must give the same."""
    ramp = np.stack(np.meshgrid(np.arange(0, 256, 5), np.arange(0, 256, 3)), -1)
    picture = np.concatenate([ramp, (ramp[..., :1] * ramp[..., 1:]) % 256], -1).astype(np.uint8)
    assert train_palette([picture], 8).tolist() == RECORDED


def test_the_error_is_far_below_that_of_random_colours() -> None:
    images = pictures(40)
    random = np.random.default_rng(0)
    pixels = np.stack(images).reshape(-1, 3)
    drawn = pixels[random.choice(len(pixels), 64, replace=False)]
    trained = squared_error(images, train_palette(images, 64))
    assert trained < 0.75 * squared_error(images, drawn)
    assert trained < 0.5 * squared_error(images, random.integers(0, 256, (64, 3), np.uint8))


def test_rounds_lower_the_error_of_the_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    images = pictures(40)
    trained = squared_error(images, train_palette(images, 64))
    monkeypatch.setattr(module, "MOST_ROUNDS", 0)
    assert trained < 0.85 * squared_error(images, train_palette(images, 64))


def test_lost_clusters_take_the_farthest_pixels(monkeypatch: pytest.MonkeyPatch) -> None:
    """A round whose means all become black loses all clusters but one."""
    monkeypatch.setattr(module, "MOST_ROUNDS", 1)
    monkeypatch.setattr(np, "rint", np.zeros_like)
    pixels = np.random.default_rng(1).integers(0, 256, (300, 3), dtype=np.uint8)
    colours = [[0, 0, 0]]
    while len(colours) < 20:
        squares = ((pixels[:, None].astype(int) - np.array(colours)) ** 2).sum(-1).min(1)
        assert (squares == squares.max()).sum() == 1
        colours.append(pixels[squares.argmax()].tolist())
    assert sorted(train_palette([pixels], 20).tolist()) == sorted(colours)


def test_a_sample_is_bounded_and_even(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each column of the pictures is as frequent in the sample as the others, also when rows are a power of two long."""
    monkeypatch.setattr(module, "MOST_PIXELS", 1 << 12)
    columns = np.arange(32, dtype=np.uint8)[None, :, None].repeat(32, 0).repeat(3, 2)
    points, weights = module._sample(iter([columns] * 100), 2)
    assert 1 << 11 <= weights.sum() <= 1 << 12
    assert points[:, 0].tolist() == list(range(32))
    assert weights.min() > 0.9 * weights.mean() and weights.max() < 1.1 * weights.mean()


def test_a_sample_reaches_the_last_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_PIXELS", 1 << 10)
    images = [np.full((8, 8, 3), n, np.uint8) for n in range(100)]
    points, weights = module._sample(iter(images), 2)
    assert len(points) == 100 and weights.max() <= 2 * weights.min()


def test_rare_colours_count_although_the_sample_misses_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_PIXELS", 1 << 8)
    picture = np.zeros((64, 64, 3), np.uint8)
    picture[0, :5] = [[200, n, 0] for n in range(5)]
    assert len(module._sample([picture], 1)[0]) < 6  # the sample misses some
    assert train_palette([picture], 6).tolist() == [[0, 0, 0], *([200, n, 0] for n in range(5))]


@pytest.mark.parametrize(("count", "asked"), [(3, 4), (100, 512)])
def test_too_many_colours_are_refused(count: int, asked: int) -> None:
    picture = np.arange(count, dtype=np.uint8)[:, None].repeat(3, 1)
    with pytest.raises(UsageError) as refused:
        train_palette([picture, picture], asked)
    told = f"expected at least {asked} colours in the pictures, found {count}; try --codes palette:{count}"
    assert str(refused.value) == told
    assert len(train_palette([picture, picture], count)) == count


@pytest.mark.parametrize("colours", [1, 2, 17, 512])
def test_nearest_agrees_with_brute_force(colours: int) -> None:
    random = np.random.default_rng(colours)
    palette = random.integers(0, 256, (colours, 3), dtype=np.uint8)
    pixels = random.integers(0, 256, (3, 41, 59, 3), dtype=np.uint8)
    indices = nearest(pixels, palette)
    assert indices.dtype == np.uint16 and indices.shape == (3, 41, 59)
    assert (indices == plain_nearest(pixels, palette)).all()


def test_of_equally_near_colours_the_lowest_is_chosen() -> None:
    steps = np.arange(0, 256, 51)
    corners = np.stack(np.meshgrid(steps, steps, steps), -1).reshape(-1, 3).astype(np.uint8)
    twice = np.concatenate([corners[::-1], corners])  # each colour again
    middles = np.array([[25, 0, 0], [76, 76, 76], [255, 255, 255], [0, 0, 0]], np.uint8)
    even = np.array([[10, 0, 0], [20, 0, 0], [15, 5, 0], [15, 0, 5]], np.uint8)  # all at distance 5 from (15, 0, 0)
    assert (nearest(middles, twice) == plain_nearest(middles, twice)).all()
    assert nearest(middles, twice).max() < len(corners)
    assert [int(nearest(np.array([15, 0, 0], np.uint8), np.roll(even, n, 0))) for n in range(4)] == [0, 0, 0, 0]
    assert nearest(np.array([[12, 0, 0]], np.uint8), even).tolist() == [0]


def test_no_pixels_have_no_colours() -> None:
    assert nearest(np.empty((0, 32, 3), np.uint8), np.zeros((4, 3), np.uint8)).shape == (0, 32)
