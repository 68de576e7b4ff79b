"""Write conversations about the built-in stories: someone asks for a story, and then about it.

`docs/own_chat_model.md` trains a model on them that tells stories and answers.
"""

# %% What a story answers, with a pattern for the answer.
import json
import random
import re
from pathlib import Path

from handgrad.data.stories import BOYS, GIRLS, GRAMMAR, story

HERO, COLOUR = "|".join(GIRLS + BOYS), "|".join(GRAMMAR["color"])
FACTS = {
    "Who is the story about?": rf"\b({HERO})\b",
    "When does it happen?": r"\b(One \w+ \w+)",
    "Where does {0} live?": rf"({HERO}).*? lived ([^.]+)\.",
    "What colour is the {1}?": rf"\b({COLOUR}) (\w+)",
    "Who helps?": r'" (?:answered|replied|laughed|sang|called) (the \w+)',
    "How does it end?": r"([^.]+)\.$",
}


def facts(text: str) -> dict[str, str]:
    """The questions that a story answers, and their answers."""
    found = {question: match for question, pattern in FACTS.items() if (match := re.search(pattern, text))}
    answers = {question: match[2 if "{0}" in question else 1].strip() for question, match in found.items()}
    return {q.format(found[q][1], found[q].groups()[-1]): f"{a[0].upper()}{a[1:]}." for q, a in answers.items() if a}


# %% A conversation: a greeting now and then, a wish, a story, two questions, perhaps thanks.
WISHES = (
    "Tell me a story.",
    "Tell me a story about {hero}.",
    "I want a story about {hero}.",
    "A story with a {thing}, please.",
)


def conversation(number: int) -> list[dict[str, str]]:
    draw, text = random.Random(number), story(1, number).text
    hero, thing = re.search(FACTS["Who is the story about?"], text), re.search(FACTS["What colour is the {1}?"], text)
    known = facts(text)
    said = [("Hello!", "Hello! Shall I tell you a story?")] if draw.random() < 0.2 else []
    said += [(draw.choice(WISHES).format(hero=hero[1], thing=thing[0]), text)]
    said += [(question, known[question]) for question in draw.sample(sorted(known), 2)]
    said += [("Thank you!", "You are welcome.")] if draw.random() < 0.2 else []
    return [message for q, a in said for message in ({"role": "user", "content": q}, {"role": "assistant", "content": a})]


# %% The file for `handgrad prepare --chat`, a conversation a line.
COUNT = 20_000
with Path("talks.jsonl").open("w", encoding="utf-8") as file:
    file.writelines(json.dumps({"messages": conversation(number)}) + "\n" for number in range(COUNT))

# %% A look at one.
print(f"{COUNT:,} conversations in talks.jsonl, for example")
for message in conversation(7):
    print(f"{message['role']:>9}: {message['content']}")
