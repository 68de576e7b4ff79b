"""The built-in questions: deterministic, each with one right answer, none of validation in training."""

from collections import Counter

import pytest

from handgrad.data import questions
from handgrad.data.prepare import PrepareOptions, prepare
from tests.data.test_chat import read_back

EXAMPLES = {
    "Say ba do.": "ba do",
    "Write bado in capitals.": "BADO",
    "Write ba do ka with dashes.": "ba-do-ka",
    "Write bado three times.": "bado bado bado",
    "What is the last letter of bado?": "o",
    "Spell bado backwards.": "odab",
    "How long is badon?": "5",
    "How often is a in badaka?": "3",
    "Put 9 10 2 2 in order.": "2 2 9 10",
    "Which is smaller, 30 or 9?": "9",
    "Which is larger, 30 or 9?": "30",
    "What is 58 + 67?": "125",
    "What is 67 - 58?": "9",
    "Ann has the red ball. Ben has the blue cup. Who has the cup?": "Ben",
    "Ann has the red ball. Ben has the blue cup. What colour is the ball?": "red",
}


def asked(*texts):
    return [{"role": "user", "content": text} for text in texts]


def as_messages(conversation):
    return [{"role": role, "content": content} for role, content in conversation]


@pytest.mark.parametrize("question", EXAMPLES)
def test_answers_by_hand(question):
    assert questions.check(asked(question), f" {EXAMPLES[question]}\n")
    assert not questions.check(asked(question), EXAMPLES[question] + "x") and not questions.check(asked(question), "")


def test_questions_about_turns_before():
    world = "Ann has the red ball. Ben has the blue cup. Who has the cup?"
    assert questions.check(asked(world, "What is 1 + 1?", "Who has the ball?"), "Ann")
    assert questions.check(asked("What is 1 + 1?", "And plus 9?", "And plus 5?"), "16")
    for unknown in (["And plus 1?"], ["Who has the cup?"], [world, "Who has the pen?"], ["Why?"], []):
        assert questions.known_answer(asked(*unknown)) is None and questions.kind_of(asked(*unknown)) is None
    told = [f"{one} has the {colour} cup. Who has the cup?" for one in questions.PEOPLE for colour in questions.COLOURS]
    assert len({questions.is_held_out([each, "What colour is the cup?"]) for each in told}) == 2, (
        "the world decides as well"
    )


def test_conversations():
    """Every answer is right; every kind occurs, in both splits; a number gives one conversation, another seed another."""
    kinds = Counter()
    for held_out in (False, True):
        for number in range(400):
            messages = as_messages(questions.conversation(3, number, held_out))
            assert len(messages) in (2, 4, 6)
            for turn in range(1, len(messages), 2):
                before = messages[:turn]
                assert questions.check(before, messages[turn]["content"])
                assert questions.is_held_out([m["content"] for m in before if m["role"] == "user"]) == held_out
                kinds[questions.kind_of(before), held_out] += 1
    assert {kind for kind, _ in kinds} == {*questions.NAMES} and min(kinds.values()) > 10
    assert len(kinds) == 2 * len(questions.NAMES)
    assert questions.conversation(3, 5, True) == questions.conversation(3, 5, True) != questions.conversation(4, 5, True)


def test_the_text_of_a_seed_stays():
    expected = (
        ("user", "Put 8 5 4 4 in order."),
        ("assistant", "4 4 5 8"),
        ("user", "Spell goga backwards."),
        ("assistant", "agog"),
    )
    assert questions.conversation(0, 0, False) == expected


def test_the_source(tmp_path, small_units):
    """By any number of workers the same bytes of bytes; what validation asks, training never does."""
    folders = [
        prepare(PrepareOptions("questions", tmp_path / str(n), workers=n, documents=600, validation_fraction=0.2)).dataset
        for n in (1, 2)
    ]
    assert folders[0].identity == folders[1].identity and folders[0].tokenizer.kind == "bytes" and folders[0].is_chat
    back = read_back(folders[0])
    assert (len(back["train"]), len(back["validation"])) == (480, 120)

    def told(text):
        turns = [turn.split("\n", 1) for turn in text.split("<|endoftext|>")[1:-1]]
        return [{"role": role, "content": content} for role, content in turns]

    single = {name: {told(text)[0]["content"] for text, _ in each} for name, each in back.items()}
    assert not single["train"] & single["validation"]
    for text, said in back["train"]:
        answers = [m["content"] for m in told(text) if m["role"] == "assistant"]
        assert said == "".join(f"{answer}<|endoftext|>" for answer in answers)
