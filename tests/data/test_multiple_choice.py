"""llm.c's evaluation file: byte by byte, from HellaSwag's jsonl, and what is refused."""

import json
import struct
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from handgrad.data.multiple_choice import Question, evaluation_bytes, read_evaluation, read_hellaswag, write_evaluation
from handgrad.data.tokenizer import load_tokenizer
from handgrad.errors import DataError

PAIR = [Question((1, 2, 3), ((4,), (5, 6), (7,), (50256, 0)), 2), Question((9,), ((8,),) * 4, 0)]


def test_the_layout_is_llmcs() -> None:
    first = struct.pack("<19H", 65535, 38, 0, 2, 4, 3, 1, 2, 3, 1, 4, 2, 5, 6, 1, 7, 2, 50256, 0)
    second = struct.pack("<15H", 65535, 30, 1, 0, 4, 1, 9, 1, 8, 1, 8, 1, 8, 1, 8)
    header = struct.pack("<4i", 20240522, 1, 2, 38) + bytes(1008)
    assert evaluation_bytes(PAIR) == header + first + second


tokens = st.lists(st.integers(0, 65534), min_size=1, max_size=9).map(tuple)


@settings(deadline=None, max_examples=30)
@given(st.lists(st.builds(Question, tokens, st.tuples(*[tokens] * 4), st.integers(0, 3)), min_size=1, max_size=5))
def test_what_is_written_is_read(tmp_path_factory: pytest.TempPathFactory, questions: list[Question]) -> None:
    path = tmp_path_factory.mktemp("q") / "some_val.bin"
    write_evaluation(path, questions)
    assert list(read_evaluation(path)) == questions
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_from_hellaswags_jsonl(tmp_path: Path) -> None:
    """Every ending with a space before it, encoded by itself, as llm.c's script does."""
    endings = ["opens the old gate.", "sings.", "counts to 42!", "walks  on"]
    records = [{"ctx": "A man on a hill. he", "endings": endings, "label": label, "ind": 7} for label in (3, "1")]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    gpt2 = load_tokenizer("gpt2")
    found = list(read_hellaswag(tmp_path / "a.jsonl", gpt2))
    assert [question.label for question in found] == [3, 1]
    assert gpt2.decode(found[0].context) == "A man on a hill. he"
    assert found[0].context == (32, 582, 319, 257, 12788, 13, 339)
    assert [gpt2.decode(ending) for ending in found[0].endings] == [" " + ending for ending in endings]
    assert found[0].endings[2] == (9853, 284, 5433, 0)


@pytest.mark.parametrize(
    "line",
    [
        *("[]", "{", '"x"', '{"ctx": "a", "endings": ["b", "c", "d", "e"]}', '{"ctx": "a", "endings": ["b"], "label": 0}'),
        '{"ctx": "", "endings": ["b", "c", "d", "e"], "label": 0}',
        '{"ctx": 1, "endings": ["b", "c", "d", "e"], "label": 0}',
        '{"ctx": "a", "endings": ["b", "c", "d", 5], "label": 0}',
        '{"ctx": "a", "endings": ["b", "c", "d", "e"], "label": 4}',
    ],
)
def test_a_line_that_is_none(line: str, tmp_path: Path) -> None:
    good = '{"ctx": "a", "endings": ["b", "c", "d", "e"], "label": 0}'
    (tmp_path / "a.jsonl").write_text(f"{good}\n{line}\n", encoding="utf-8")
    with pytest.raises(DataError, match=r"a\.jsonl line 2"):
        list(read_hellaswag(tmp_path / "a.jsonl", load_tokenizer("bytes")))


@pytest.mark.parametrize(
    "question",
    [
        *(Question((), ((1,),) * 4, 0), Question((1,), ((1,), (), (1,), (1,)), 0), Question((1,), ((1,),) * 3, 0)),
        *(Question((1,), ((1,),) * 4, 4), Question((65535,), ((1,),) * 4, 0), Question((1,) * 33000, ((1,),) * 4, 0)),
    ],
)
def test_what_the_format_cannot_hold(question: Question, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="found question 1 with"):
        write_evaluation(tmp_path / "x.bin", [PAIR[0], question])
    assert list(tmp_path.iterdir()) == []


def test_wrong_files(tmp_path: Path) -> None:
    """Cut, changed, of another kind: one line that says what was expected where."""
    path, whole = tmp_path / "h.bin", evaluation_bytes(PAIR)

    def told(content: bytes) -> str:
        path.write_bytes(content)
        with pytest.raises(DataError) as caught:
            read_evaluation(path)
        assert str(path) in str(caught.value)
        return str(caught.value)

    def changed(place: int, number: int) -> str:
        start = 1024 + 2 * place
        return told(whole[:start] + struct.pack("<H", number) + whole[start + 2 :])

    assert "found 20240520, GPT-2 tokens" in told(struct.pack("<i", 20240520) + whole[4:])
    assert "which is no llm.c file's" in told(b"PK" + whole[2:])
    assert "expected version 1" in told(whole[:4] + struct.pack("<i", 2) + whole[8:])
    assert "found 3" in told(b"abc") and "found 0" in told(b"")
    assert "expected 2 questions" in told(whole[: 1024 + 38]), "cut between two questions"
    assert "expected question 1 at byte 1062" in told(whole[:-2])
    assert "of uint16" in told(whole[:-1])
    assert "longest of 40 bytes" in told(whole[:12] + struct.pack("<i", 40) + whole[16:])
    for place, number in ((0, 1), (1, 36), (1, 40), (2, 1), (3, 4), (4, 3), (5, 0), (5, 60000), (6, 65535), (9, 2)):
        assert "expected question 0 at byte 1024" in changed(place, number)


@settings(deadline=None, max_examples=150)
@given(st.integers(0, len(evaluation_bytes(PAIR)) - 1), st.integers(1, 255), st.booleans())
def test_any_flipped_byte_is_seen_or_means_another_token(
    tmp_path_factory: pytest.TempPathFactory, place: int, flip: int, cut: bool
) -> None:
    content = bytearray(evaluation_bytes(PAIR))
    content[place] ^= flip
    path = tmp_path_factory.mktemp("q") / "h.bin"
    path.write_bytes(content[:place] if cut else content)
    try:
        found = read_evaluation(path)
    except DataError:
        return
    # A token, a label, or a word of the header that nobody reads.
    assert not cut and (16 <= place < 1024 or list(found) != PAIR) and len(found) == 2
