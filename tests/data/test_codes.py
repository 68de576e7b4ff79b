"""Pictures in texts: codes, classes and captions as tokens and back, their form from a file, captions from rows."""

import dataclasses
import json
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, strategies as st

from handgrad.data.codes import (
    MISSING,
    Codes,
    caption_text,
    codes_of,
    codes_tokenizer,
    drawn,
    is_palette,
    parse_codes,
    parts_of,
    text_of,
)
from handgrad.data.pieces import captions_of
from handgrad.data.sources import SourceFile
from handgrad.errors import DataError, UsageError

COLOURS = tuple((3 * n, 255 - n, n) for n in range(40))
PLAIN = Codes(2, 3, COLOURS)
CLASSES = dataclasses.replace(PLAIN, classes=("cat", "hot dog"))
CAPTIONS = dataclasses.replace(PLAIN, captions=True)


def test_a_picture_with_its_class_is_a_token_each() -> None:
    tokenizer, picture = codes_tokenizer(CLASSES), np.array([[0, 39, 2], [3, 4, 5]])
    assert tokenizer.encode(f"<hot dog>{text_of(picture)}").tolist() == [41, 0, 39, 2, 3, 4, 5]
    assert tokenizer.vocab_size == 43 and tokenizer.end_of_text == 42
    assert codes_tokenizer(CAPTIONS).encode(f"é\n{text_of(picture[0])}").tolist() == [40 + 0xC3, 40 + 0xA9, 50, 0, 39, 2]


@given(st.lists(st.one_of(st.integers(0, 39), st.text(max_size=5), st.just("<cat>")), max_size=20))
def test_texts_come_back(parts: list[int | str]) -> None:
    text = "".join(text_of(np.array([part])) if isinstance(part, int) else part for part in parts)
    if not re.search("[\U000f0000-\U000f7fff]", "".join(part for part in parts if isinstance(part, str))):
        tokenizer = codes_tokenizer(dataclasses.replace(CAPTIONS, classes=("cat",)))
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_what_a_model_without_captions_refuses() -> None:
    with pytest.raises(DataError, match=r"^expected classes and codes alone, found the text 'hello'"):
        codes_tokenizer(CLASSES).encode("<cat>hello")
    with pytest.raises(DataError, match=r"^expected codes alone, found the text '<cat>'"):
        codes_tokenizer(PLAIN).encode("<cat>")
    with pytest.raises(DataError, match=r"^expected codes below 40, found 40: the picture has another palette"):
        codes_tokenizer(PLAIN).encode(text_of(np.array([39, 40])))
    with pytest.raises(UsageError, match=r"^expected a class of the model, found 'dog'; it has cat, hot dog$"):
        CLASSES.class_text("dog")
    assert CLASSES.class_text("1") == "<hot dog>"


def test_a_text_parts_into_words_and_pictures() -> None:
    first, second = np.arange(6).reshape(2, 3), np.array([7, 8, 9, 10])
    words, one, two, end = parts_of(f"a cat\n{text_of(first)}{text_of(second)} end", CAPTIONS)
    assert (words, end) == ("a cat\n", " end") and np.array_equal(one, first)
    assert two.tolist() == [[7, 8, 9], [10, MISSING, MISSING]]
    text, pictures = drawn([words, two], CAPTIONS.pixels)
    assert text == "a cat\n[2 x 3 picture]" and pictures[0][1].tolist() == [list(COLOURS[10]), [128] * 3, [128] * 3]


@pytest.mark.parametrize("codes", [PLAIN, CLASSES, CAPTIONS])
def test_the_form_travels_in_a_file(codes: Codes) -> None:
    content = codes_tokenizer(codes).json_bytes
    assert is_palette(content) and parse_codes(content, "here") == codes == codes_of(codes_tokenizer(codes))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("rows", 0),
        ("rows", 2.0),
        ("columns", 1 << 20),
        ("columns", True),
        ("colours", []),
        ("colours", [[1, 2]]),
        ("colours", [[1, 2, 256]]),
        ("colours", [[1, 2, None]]),
        ("colours", "red"),
        ("classes", ["cat", "cat"]),
        ("classes", ["<cat>"]),
        ("captions", 1),
        ("more", 1),
    ],
)
def test_a_damaged_form_is_refused(name: str, value: object) -> None:
    content = json.loads(codes_tokenizer(CLASSES).json_bytes) | {name: value}
    with pytest.raises(DataError, match=r"^expected a palette's rows, columns and colours in here, found others"):
        parse_codes(json.dumps(content).encode(), "here")


def test_a_caption_is_one_line() -> None:
    picture = np.zeros((2, 3), int)
    assert caption_text("a cat", picture, picture_first=True) == f"{text_of(picture)}a cat\n"
    for wrong in ("a\ncat", " ", f"a {text_of(picture)}"):
        with pytest.raises(DataError, match=r"^expected a caption of one line"):
            caption_text(wrong, picture, picture_first=False)


FILES = [SourceFile("a.png", Path("a.png"), 1, ""), SourceFile("b/many.bin", Path("b/many.bin"), 1, "")]


@pytest.mark.parametrize(
    ("rows", "told"),
    [
        ([("a.png", "one"), ("b/many.bin#0", "two")], r"found none for b/many.bin#1 and 0 more; add them"),
        (
            [("a.png", "one"), ("b/many.bin#0", "two"), ("b/many.bin#1", "x"), ("c.png", "x")],
            "found none for c.png and 0 more",
        ),
        ([("a.png", "one"), ("a.png", "two")], "expected one caption for each image, found a second for a.png in .*line 2"),
        ([("a.png", "one\ntwo")], "expected a caption of one line, found 'one.*line 1"),
    ],
)
def test_captions_and_pictures_belong_together(rows: list[tuple[str, str]], told: str, tmp_path: Path) -> None:
    path = tmp_path / "captions.jsonl"
    path.write_text("".join(json.dumps({"image": image, "caption": text}) + "\n" for image, text in rows))
    with pytest.raises(DataError, match=told) as error:
        captions_of(str(path), FILES, [1, 2])
    assert "\n" not in str(error.value)


def test_captions_in_the_order_of_the_pictures(tmp_path: Path) -> None:
    path = tmp_path / "captions.jsonl"
    rows = ("b/many.bin#1", "three"), ("a.png", " one "), ("b/many.bin#0", "two")
    path.write_text("".join(json.dumps({"image": image, "caption": text}) + "\n" for image, text in rows))
    assert captions_of(str(path), FILES, [1, 2]) == ["one", "two", "three"]
