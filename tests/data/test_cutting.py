"""Cutting a text never changes a token, nor tears a character."""

import pytest
from hypothesis import given, settings, strategies as st

from handgrad.data import pieces
from handgrad.data.pieces import cut, file_cut
from handgrad.data.tokenizer_loading import load_tokenizer

PIECES_OF_TEXT = st.lists(
    st.sampled_from(["a", "bc", " ", "  ", "\n", "\n\n", "'s", "7", "!?", "é", "\xa0", "\x1c", "\t", "中"])
)


@settings(max_examples=200, deadline=None)
@given(PIECES_OF_TEXT.map("".join), st.integers(1, 7), st.integers(1, 9))
def test_cutting_never_changes_a_token(text, piece, block):
    gpt2 = load_tokenizer("gpt2")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pieces, "PIECE_CHARACTERS", piece)
        parts = list(cut(text[i : i + block] for i in range(0, len(text), block)))
    assert "".join(parts) == text
    assert [t for part in parts for t in gpt2.encode(part).tolist()] == gpt2.encode(text).tolist()


@pytest.mark.fault(27)
def test_cutting_is_forced_only_after_a_million_characters_without_a_blank():
    lengths = [len(part) for part in cut(["x" * 50_000] * 60)]
    assert lengths == [1 << 20, 1 << 20, 3_000_000 - (2 << 20)]
    assert max(len(part) for part in cut(["word " * 10_000] * 60)) < 312_200


@settings(max_examples=200, deadline=None)
@given(PIECES_OF_TEXT.map("".join).map(str.encode), st.floats(0.01, 0.5))
def test_a_file_is_cut_between_characters(tmp_path_factory, content, fraction):
    path = tmp_path_factory.getbasetemp() / "cut.txt"
    path.write_bytes(content)
    with path.open("rb") as file:
        place = file_cut(file, len(content), fraction)
    assert int(len(content) * (1 - fraction)) <= place <= len(content)
    assert content[:place].decode() + content[place:].decode() == content.decode()


def test_a_file_is_cut_after_a_line_where_there_is_one(tmp_path):
    (tmp_path / "a.txt").write_text("one two three\nfour five six\n\nseven eight")
    with (tmp_path / "a.txt").open("rb") as file:
        assert file_cut(file, 39, 0.9) == 14
        assert file_cut(file, 39, 0.6) == 18  # before a blank: no other line starts right after a single newline


@pytest.mark.parametrize(("text", "cut_at"), [("one two three\nfour five six.", 14), ("one two thre\nfour five six..", 17)])
def test_a_file_is_cut_in_its_middle_or_behind_it(text: str, cut_at: int, tmp_path) -> None:
    """The middle of 28 bytes is byte 14: a line that begins there is the second part, one at byte 13 is none."""
    (tmp_path / "a.txt").write_text(text)
    with (tmp_path / "a.txt").open("rb") as file:
        assert file_cut(file, 28, 0.5) == cut_at
