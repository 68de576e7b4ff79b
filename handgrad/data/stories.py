"""The built-in corpus: short stories from a grammar whose probabilities are known, so the least possible loss is known.

`story(seed, index)` draws one. Every choice is uniform, so a derivation made of choices among n_1, n_2, ... n_k
alternatives has probability 1 / (n_1 n_2 ... n_k). That product, the derivation's *span*, is an integer: probabilities
here are exact, and `nats` = log(span) rounds once. The text determines its derivation, so log(span) is also the text's
own -log p; a parser in the tests (tests/data/stories_parser.py) recovers it from the text alone. Nothing can follow a
story's last sentence, so the end of the text costs no nats. docs/stories.md compares a training run with the floor.

In the grammar a slot is written `{slot}` inside a text; `|` parts its alternatives. There are two sorts:

- A *word* has alternatives without slots. Its first occurrence in a story draws one, each with the same probability;
  later occurrences repeat it. `By` makes a word's alternatives depend on a word drawn before: {he} on {hero}.
- A *phrase* has alternatives with slots. It is expanded where it stands.

A new alternative must keep four promises, each with a test: the text still determines its derivation; rows of one `By`
table are equally long (the entropy stays an exact sum); nothing that follows " a " starts with a vowel; the golden hashes
in the tests change knowingly, for the same seed then yields another corpus.

The counts follow from one rule: a word that comes back later is worth ln(alternatives) nats to a reader who starts in the
middle, as a training window does. So words that come back have at most 20 alternatives, and most of the entropy is in words
that are said once.
"""

import hashlib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class By:
    """A word whose alternatives are `rows[value of the word named slot]`."""

    slot: str
    rows: Mapping[str, tuple[str, ...]]


Alternatives = tuple[str, ...] | By


def one_of(text: str) -> tuple[str, ...]:
    return tuple(text.split("|"))


def table(slot: str, words: str, rows: dict[str, str]) -> dict[str, By]:
    """Words that depend on `slot`: of each of its values, or of several, a column of alternatives per word."""
    columns = [
        {value: one_of(row.split("; ")[n]) for values, row in rows.items() for value in one_of(values)}
        for n in range(len(words.split()))
    ]
    return {word: By(slot, column) for word, column in zip(words.split(), columns, strict=True)}


GIRLS = one_of("Mia|Lily|Anna|Rosa|Emma|Lucy|Nora|Ruby|Clara|Zoe")
BOYS = one_of("Tom|Ben|Max|Sam|Leo|Jack|Finn|Noah|Omar|Hugo")

START = "story"

GRAMMAR: dict[str, Alternatives] = {
    # ------------------------------------------------------------------------------------------------------- six plots
    "story": (
        "{opening} {when} {hero} {went} to the {place} with {his} {color} {thing}. {lose}\n"
        '{meet} "{lost_plea}" {he} {said}. "{answer}" {answered} the {animal}. {find} {closing}',
        "{opening} {when} {hero} took {his} {color} {thing} to the {place}. {cause} and the {thing} got stuck {high}.\n"
        'A {look} {climber} came by. "{stuck_plea}" {he} {said}. "{answer}" {answered} the {climber}. '
        "The {climber} {climb} and {fetch}. {closing}",
        "{opening} {when} {hero} was near the {place} with {his} {color} {toy} when {fault}.\n"
        '{He} took it to a {manner} {worker}. "{broken_plea}" {he} {said}. "{answer}" {answered} the {worker}. '
        "The {worker} {fix}. {closing}",
        "{opening} {when} {hero} {went} to the {place} and met a {look} {color} {animal}. The {animal} was {trouble}.\n"
        '"{groan}" the {animal} {said}. {hero} {aid}, and soon the {animal} {better}. {closing}',
        "{opening} {when} {hero} wanted to {skill}, but {he} {failed}.\n"
        'A {look} {color} {teacher} was watching. "{advice}" {advised} the {teacher}. {practice} '
        "{His} {manner} {elder} {cheered}. {closing}",
        "{opening} {when} {hero} wanted to make a {color} {gift} for {his} {elder}, but {he} had no {need}.\n"
        '{He} asked a {manner} {worker} for help. "{answer}" {answered} the {worker}, and gave {him} some {need}. '
        "Everyone {loved} the {gift}. {closing}",
    ),
    # ------------------------------------------------------------------------------------------------------ beginnings
    "opening": (
        "{hero} was a {trait} {child} who lived {home}.",
        "{hero} was a {trait} {child} who loved {delight}.",
        "Once upon a time {hero}, a {trait} {child}, lived {home}.",
        "{hero} and {his} {trait} {family} lived {home}.",
    ),
    "hero": GIRLS + BOYS,
    **table(
        "hero",
        "child he He his His him",
        {"|".join(GIRLS): "girl; she; She; her; Her; her", "|".join(BOYS): "boy; he; He; his; His; him"},
    ),
    "trait": one_of("brave|kind|clever|shy|busy|gentle|helpful|cheerful|curious|playful|lively|dreamy"),
    "home": one_of(
        "near the river|by the sea|in a small town|on a green hill|in the forest|in a tall house|on a quiet farm"
        "|beside a deep lake|above a shop|next to a windmill|behind the school|in an old tower"
    ),
    "delight": one_of(
        "long walks|old songs|books|warm bread|rain|funny hats|sweet plums|the stars|jokes|tall trees|warm milk|big dogs"
    ),
    "family": one_of("sister|brother|grandmother|grandfather|cousin|parents|twin|dog"),
    "when": one_of("One {weather} {daytime}"),
    "weather": one_of("sunny|windy|cloudy|foggy|chilly|warm|bright|quiet|gray|mild"),
    "daytime": one_of("morning|afternoon|evening"),
    "went": one_of("walked|ran|skipped|hurried|raced|rode"),
    "place": one_of("park|beach|garden|meadow|market|pond|orchard|playground|castle|bridge|mill|village"),
    "color": one_of("red|blue|green|yellow|purple|white|pink|golden|black|brown"),
    "thing": one_of("ball|kite|cap|scarf|ribbon|balloon|doll|mitten|flag|feather"),
    # ------------------------------------------------------------------------------------------------ helpers and talk
    "meet": one_of("Then {he} met a {look} {animal}.|A {look} {animal} {appeared}."),
    "look": one_of("friendly|tiny|sleepy|fluffy|wise|funny|spotted|round|shaggy|merry|polite|plump"),
    "animal": one_of("rabbit|fox|turtle|mouse|goat|pony|badger|puppy|bear|pig"),
    "appeared": one_of("came by|stopped to listen|walked up|looked out of a bush"),
    "manner": one_of("tall|patient|young|strong|jolly|famous|careful|retired|thin|proud"),
    "worker": one_of("carpenter|sailor|farmer|tailor|blacksmith|painter|gardener|baker"),
    "said": one_of("said|cried|whispered|sighed|wept"),
    "answer": one_of("Do not worry,|I will help you,|Let us try together,|I have an idea,|Leave it to me,|That is easy,"),
    "advised": one_of("said|called|laughed|sang"),
    "answered": one_of("answered|replied|laughed|sang"),
    # ----------------------------------------------------------------------------------------------- something is lost
    "lose": ("While {he} {pastime}, the {thing} disappeared.", "{He} {pastime} and forgot where the {thing} was."),
    "pastime": one_of(
        "picked flowers|climbed a tree|watched the sky|ate a sandwich|fed the ducks|chased a cat|drew a map|took a nap"
        "|counted ducks|chased a frog"
    ),
    "lost_plea": one_of("I lost my {thing},|Have you seen my {thing}?|My {thing} is missing,"),
    "find": one_of("They searched together and found it {hidden}.|After {number} minutes they saw it {hidden}."),
    "hidden": one_of(
        "under a bench|behind a rock|in the tall grass|beside a log|inside a hollow tree|near the gate|behind a bush"
        "|under a bridge|near the river|by the fence|among the daisies|on a flat stone"
    ),
    "number": one_of("two|three|four|five|six|seven|eight|nine"),
    # ---------------------------------------------------------------------------------------------- something is stuck
    "cause": one_of(
        "The wind blew hard|{He} tripped on a root|{He} let go too soon|{He} threw it too far|A dog barked|{He} fell down"
    ),
    "high": one_of(
        "in a tall tree|on a barn roof|on a high wall|on a lamp post|on a cliff|on a tower|on a chimney|on a bridge"
    ),
    "climber": one_of("owl|robin|crow|parrot|squirrel|monkey|cat|giraffe"),
    "stuck_plea": one_of("I cannot reach my {thing},|How do I get my {thing} back?|My {thing} is too high for me,"),
    **table(
        "climber",
        "climb",
        {
            "owl|robin|crow|parrot": "flew up|spread its wings",
            "squirrel|monkey|cat": "climbed up|sprang up",
            "giraffe": "reached up|stretched its neck",
        },
    ),
    "fetch": one_of("brought it down|pulled it free|shook it loose|pushed it off"),
    # --------------------------------------------------------------------------------------------- something is broken
    "toy": one_of("wagon|truck|boat|ship|puppet|bear|harp|fiddle"),
    **table(
        "toy",
        "fault",
        {
            "wagon|truck": "a wheel fell off|the handle broke",
            "boat|ship": "the sail tore|the handle broke",
            "puppet|bear": "an arm came off|the belly tore",
            "harp|fiddle": "a string broke|the neck bent",
        },
    ),
    "broken_plea": one_of("Can you mend my {toy}?|My {toy} is broken,|Please save my {toy},"),
    **table(
        "fault",
        "fix",
        {
            "a wheel fell off": "hammered the wheel back on|carved a new wheel",
            "the handle broke": "glued the handle|carved a new handle",
            "the sail tore": "patched the sail|cut a new sail",
            "an arm came off": "glued the arm back on|knitted a new arm",
            "the belly tore": "patched the belly|filled the belly with wool",
            "a string broke": "tied the string again|found a new string",
            "the neck bent": "bent the neck back|carved a new neck",
        },
    ),
    # ---------------------------------------------------------------------------------------------- someone needs help
    "trouble": one_of("hungry|thirsty|cold|lost|lonely|tired|stuck in the mud|afraid of the storm"),
    **table(
        "trouble",
        "groan aid",
        {
            "hungry": "I want to eat,|My belly is empty,; shared a sandwich|cooked some soup",
            "thirsty": "The river is dry,|My throat is dry,; found some water|poured some milk",
            "cold": "I am made of ice,|My feet are frozen,; lit a small fire|brought a blanket",
            "lost": "Where is my mother?|Where is my home?; drew a map|asked for the way",
            "lonely": "Who will play with me?|I have no friends,; stayed for tea|played a game",
            "tired": "I did not sleep,|My legs are heavy,; made a bed of straw|brought a pillow",
            "stuck in the mud": "I cannot move my legs,|Please pull me out,; pulled with a rope|dug with a spade",
            "afraid of the storm": "The sky is so loud,|Where can I hide?; shut the windows|sang a calm song",
        },
    ),
    "better": one_of("felt better|began to smile|danced for joy|laughed out loud"),
    # ----------------------------------------------------------------------------------------------- something is hard
    "skill": one_of("swim|skate|sing|paint|bake|read"),
    **table(
        "skill",
        "failed teacher advice",
        {
            "swim": "went under|was afraid of the water; duck|otter; Kick your legs,|Move your arms,",
            "skate": "fell on the ice|could not stop; penguin|walrus; Bend your knees,|Take small steps,",
            "sing": "forgot the words|was too quiet; robin|cricket; Open your mouth,|Listen to the wind,",
            "paint": "spilled the paint|broke a brush; peacock|zebra; Use less water,|Begin with the sky,",
            "bake": "burned the bread|dropped the eggs; hen|hamster; Use less sugar,|Watch the fire,",
            "read": "forgot the letters|skipped a page; raven|owl; Look at each line,|Begin with your name,",
        },
    ),
    "practice": one_of("After {number} tries {he} could {skill}.|{He} practiced for {number} days and learned to {skill}."),
    "cheered": one_of("cheered|clapped|was amazed|could not believe it"),
    # --------------------------------------------------------------------------------------------- someone gets a gift
    "gift": one_of("cake|pie|coat|blanket|ring|crown|table|chair"),
    "elder": one_of("mother|father|aunt|uncle|teacher|neighbor"),
    **table(
        "gift",
        "need",
        {"cake|pie": "flour|sugar", "coat|blanket": "wool|yarn", "ring|crown": "silver|gold", "table|chair": "wood|nails"},
    ),
    "loved": one_of("loved|liked|treasured|praised|admired"),
    # --------------------------------------------------------------------------------------------------------- endings
    "closing": (
        "{He} went home {mood}.",
        "That night {he} dreamed of {dream}.",
        "To celebrate, {he} ate {treat}.",
        "{hero} learned that {moral}.",
    ),
    "mood": one_of("happy|proud|singing|smiling|full of joy|with a light heart|at noon|by train"),
    "dream": one_of("dragons|pirates|the moon|flying fish|a rainbow|snow|a whale|candy|giants|sailing|a queen|the king"),
    "treat": one_of("cake|ice cream|a plum|cookies|bread|a peach|pie|jam|soup|grapes|a melon|eggs"),
    "moral": one_of(
        "friends matter most|kindness always pays|asking is brave|patience helps|nobody is too small to help"
        "|good things take time|two heads beat one|a smile costs nothing"
    ),
}


UNCONDITIONAL = ""  # the key of the only row of a word that depends on no other word


class Story(NamedTuple):
    text: str
    nats: float  # -log p(text), in nats; the end of the text included


@dataclass(frozen=True, eq=False)
class Word:
    """A slot without slots inside: drawn at its first occurrence, repeated at the others."""

    name: str
    by: str  # the word that selects the row, or UNCONDITIONAL
    rows: Mapping[str, tuple[str, ...]]


@dataclass(frozen=True, eq=False)
class Phrase:
    """A slot with slots inside. Alternatives are stored last piece first, ready to be pushed on a stack."""

    name: str
    alternatives: tuple[tuple["Piece", ...], ...]


Piece = str | Word | Phrase  # a str is literal text


def compile_grammar(grammar: dict[str, Alternatives], start: str = START) -> Piece:
    """The slot `start` with every slot it mentions resolved to its Word or Phrase."""
    slots: dict[str, Piece] = {}

    def resolve(name: str) -> Piece:
        if name not in slots:
            source = grammar[name]
            if isinstance(source, By):
                slots[name] = Word(name, source.slot, source.rows)
            elif not any("{" in alternative for alternative in source):
                slots[name] = Word(name, UNCONDITIONAL, {UNCONDITIONAL: source})
            else:
                slots[name] = Phrase(name, tuple(pieces(alternative) for alternative in source))
        return slots[name]

    def pieces(alternative: str) -> tuple[Piece, ...]:
        split = re.split(r"\{(\w+)\}", alternative)  # literal, slot, literal, slot, ... literal
        resolved = [resolve(part) if position % 2 else part for position, part in enumerate(split)]
        return tuple(piece for piece in reversed(resolved) if piece != "")

    return resolve(start)


STORY = compile_grammar(GRAMMAR)


def derive(start: Piece, number: int) -> tuple[str, int]:
    """Text and span of the derivation that `number` >= 0 selects: its digits, in mixed radix, are the choices.

    Derivations are chosen by the residue of `number` modulo their own span, so `number` uniform on [0, 2^256) gives
    each its probability up to a relative span / 2^256: below 2^-180 for a story, far less than float64 can see."""
    words = {UNCONDITIONAL: UNCONDITIONAL}
    stack, output, span = [start], [], 1
    while stack:
        piece = stack.pop()
        if type(piece) is Word:
            text = words.get(piece.name)
            if text is None:
                row = piece.rows[words[piece.by]]
                number, digit = divmod(number, len(row))
                span *= len(row)
                text = words[piece.name] = row[digit]
            output.append(text)
        elif type(piece) is Phrase:
            number, digit = divmod(number, len(piece.alternatives))
            span *= len(piece.alternatives)
            stack.extend(piece.alternatives[digit])
        else:
            output.append(piece)
    return "".join(output), span


def story(seed: int, index: int) -> Story:
    """Story `index` of the corpus `seed`: the same text on every platform, in any order, in any process."""
    # SHA-256 of the counter and not a generator's state: no story needs the ones before it, and no library version
    # or word size can change the text.
    text, span = derive(STORY, int.from_bytes(hashlib.sha256(f"{seed:d}/{index:d}".encode()).digest(), "little"))
    return Story(text, math.log(span))
