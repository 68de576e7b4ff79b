"""The grammar of the built-in stories: words, phrases and who depends on whom. Read by `handgrad.data.stories`.

A slot is written `{slot}` inside a text. There are two sorts:

- A *word* has alternatives without slots. Its first occurrence in a story draws one, each with the same probability;
  later occurrences repeat it. `By` makes a word's alternatives depend on a word drawn before: {he} on {hero}.
- A *phrase* has alternatives with slots. It is expanded where it stands.

A new alternative must keep four promises, each with a test: the text still determines its derivation; rows of one `By`
table are equally long (the entropy stays an exact sum); nothing that follows " a " starts with a vowel; the
golden hashes in the tests change knowingly, for every corpus made before is then another corpus.

Why the numbers are what they are: a word that comes back later is worth ln(alternatives) nats to whoever reads on from
the middle, and a training window starts in the middle. So words that come back have at most 20 alternatives, and most
of the entropy sits in words that are said once.
"""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class By:
    """A word whose alternatives are `rows[value of the word named slot]`."""

    slot: str
    rows: Mapping[str, tuple[str, ...]]


Alternatives = tuple[str, ...] | By

GIRLS = ("Mia", "Lily", "Anna", "Rosa", "Emma", "Lucy", "Nora", "Ruby", "Clara", "Zoe")
BOYS = ("Tom", "Ben", "Max", "Sam", "Leo", "Jack", "Finn", "Noah", "Omar", "Hugo")


def _agrees(girl: str, boy: str) -> By:
    """A word that agrees with the hero: one alternative in every row, so it costs no nats."""
    return By("hero", dict.fromkeys(GIRLS, (girl,)) | dict.fromkeys(BOYS, (boy,)))


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
    "child": _agrees("girl", "boy"),
    "he": _agrees("she", "he"),
    "He": _agrees("She", "He"),
    "his": _agrees("her", "his"),
    "His": _agrees("Her", "His"),
    "him": _agrees("her", "him"),
    "trait": (
        "brave",
        "kind",
        "clever",
        "shy",
        "busy",
        "gentle",
        "helpful",
        "cheerful",
        "curious",
        "playful",
        "lively",
        "dreamy",
    ),
    "home": (
        "near the river",
        "by the sea",
        "in a small town",
        "on a green hill",
        "in the forest",
        "in a tall house",
        "on a quiet farm",
        "beside a deep lake",
        "above a shop",
        "next to a windmill",
        "behind the school",
        "in an old tower",
    ),
    "delight": (
        "long walks",
        "old songs",
        "books",
        "warm bread",
        "rain",
        "funny hats",
        "sweet plums",
        "the stars",
        "jokes",
        "tall trees",
        "warm milk",
        "big dogs",
    ),
    "family": ("sister", "brother", "grandmother", "grandfather", "cousin", "parents", "twin", "dog"),
    "when": ("One {weather} {daytime}",),
    "weather": ("sunny", "windy", "cloudy", "foggy", "chilly", "warm", "bright", "quiet", "gray", "mild"),
    "daytime": ("morning", "afternoon", "evening"),
    "went": ("walked", "ran", "skipped", "hurried", "raced", "rode"),
    "place": (
        "park",
        "beach",
        "garden",
        "meadow",
        "market",
        "pond",
        "orchard",
        "playground",
        "castle",
        "bridge",
        "mill",
        "village",
    ),
    "color": ("red", "blue", "green", "yellow", "purple", "white", "pink", "golden", "black", "brown"),
    "thing": ("ball", "kite", "cap", "scarf", "ribbon", "balloon", "doll", "mitten", "flag", "feather"),
    # ------------------------------------------------------------------------------------------------ helpers and talk
    "meet": (
        "Then {he} met a {look} {animal}.",
        "A {look} {animal} {appeared}.",
    ),
    "look": (
        "friendly",
        "tiny",
        "sleepy",
        "fluffy",
        "wise",
        "funny",
        "spotted",
        "round",
        "shaggy",
        "merry",
        "polite",
        "plump",
    ),
    "animal": ("rabbit", "fox", "turtle", "mouse", "goat", "pony", "badger", "puppy", "bear", "pig"),
    "appeared": ("came by", "stopped to listen", "walked up", "looked out of a bush"),
    "manner": ("tall", "patient", "young", "strong", "jolly", "famous", "careful", "retired", "thin", "proud"),
    "worker": ("carpenter", "sailor", "farmer", "tailor", "blacksmith", "painter", "gardener", "baker"),
    "said": ("said", "cried", "whispered", "sighed", "wept"),
    "answer": (
        "Do not worry,",
        "I will help you,",
        "Let us try together,",
        "I have an idea,",
        "Leave it to me,",
        "That is easy,",
    ),
    "advised": ("said", "called", "laughed", "sang"),
    "answered": ("answered", "replied", "laughed", "sang"),
    # ----------------------------------------------------------------------------------------------- something is lost
    "lose": (
        "While {he} {pastime}, the {thing} disappeared.",
        "{He} {pastime} and forgot where the {thing} was.",
    ),
    "pastime": (
        "picked flowers",
        "climbed a tree",
        "watched the sky",
        "ate a sandwich",
        "fed the ducks",
        "chased a cat",
        "drew a map",
        "took a nap",
        "counted ducks",
        "chased a frog",
    ),
    "lost_plea": ("I lost my {thing},", "Have you seen my {thing}?", "My {thing} is missing,"),
    "find": (
        "They searched together and found it {hidden}.",
        "After {number} minutes they saw it {hidden}.",
    ),
    "hidden": (
        "under a bench",
        "behind a rock",
        "in the tall grass",
        "beside a log",
        "inside a hollow tree",
        "near the gate",
        "behind a bush",
        "under a bridge",
        "near the river",
        "by the fence",
        "among the daisies",
        "on a flat stone",
    ),
    "number": ("two", "three", "four", "five", "six", "seven", "eight", "nine"),
    # ---------------------------------------------------------------------------------------------- something is stuck
    "cause": (
        "The wind blew hard",
        "{He} tripped on a root",
        "{He} let go too soon",
        "{He} threw it too far",
        "A dog barked",
        "{He} fell down",
    ),
    "high": (
        "in a tall tree",
        "on a barn roof",
        "on a high wall",
        "on a lamp post",
        "on a cliff",
        "on a tower",
        "on a chimney",
        "on a bridge",
    ),
    "climber": ("owl", "robin", "crow", "parrot", "squirrel", "monkey", "cat", "giraffe"),
    "stuck_plea": ("I cannot reach my {thing},", "How do I get my {thing} back?", "My {thing} is too high for me,"),
    "climb": By(
        "climber",
        dict.fromkeys(("owl", "robin", "crow", "parrot"), ("flew up", "spread its wings"))
        | dict.fromkeys(("squirrel", "monkey", "cat"), ("climbed up", "sprang up"))
        | {"giraffe": ("reached up", "stretched its neck")},
    ),
    "fetch": ("brought it down", "pulled it free", "shook it loose", "pushed it off"),
    # --------------------------------------------------------------------------------------------- something is broken
    "toy": ("wagon", "truck", "boat", "ship", "puppet", "bear", "harp", "fiddle"),
    "fault": By(
        "toy",
        dict.fromkeys(("wagon", "truck"), ("a wheel fell off", "the handle broke"))
        | dict.fromkeys(("boat", "ship"), ("the sail tore", "the handle broke"))
        | dict.fromkeys(("puppet", "bear"), ("an arm came off", "the belly tore"))
        | dict.fromkeys(("harp", "fiddle"), ("a string broke", "the neck bent")),
    ),
    "broken_plea": ("Can you mend my {toy}?", "My {toy} is broken,", "Please save my {toy},"),
    "fix": By(
        "fault",
        {
            "a wheel fell off": ("hammered the wheel back on", "carved a new wheel"),
            "the handle broke": ("glued the handle", "carved a new handle"),
            "the sail tore": ("patched the sail", "cut a new sail"),
            "an arm came off": ("glued the arm back on", "knitted a new arm"),
            "the belly tore": ("patched the belly", "filled the belly with wool"),
            "a string broke": ("tied the string again", "found a new string"),
            "the neck bent": ("bent the neck back", "carved a new neck"),
        },
    ),
    # ---------------------------------------------------------------------------------------------- someone needs help
    "trouble": ("hungry", "thirsty", "cold", "lost", "lonely", "tired", "stuck in the mud", "afraid of the storm"),
    "groan": By(
        "trouble",
        {
            "hungry": ("I want to eat,", "My belly is empty,"),
            "thirsty": ("The river is dry,", "My throat is dry,"),
            "cold": ("I am made of ice,", "My feet are frozen,"),
            "lost": ("Where is my mother?", "Where is my home?"),
            "lonely": ("Who will play with me?", "I have no friends,"),
            "tired": ("I did not sleep,", "My legs are heavy,"),
            "stuck in the mud": ("I cannot move my legs,", "Please pull me out,"),
            "afraid of the storm": ("The sky is so loud,", "Where can I hide?"),
        },
    ),
    "aid": By(
        "trouble",
        {
            "hungry": ("shared a sandwich", "cooked some soup"),
            "thirsty": ("found some water", "poured some milk"),
            "cold": ("lit a small fire", "brought a blanket"),
            "lost": ("drew a map", "asked for the way"),
            "lonely": ("stayed for tea", "played a game"),
            "tired": ("made a bed of straw", "brought a pillow"),
            "stuck in the mud": ("pulled with a rope", "dug with a spade"),
            "afraid of the storm": ("shut the windows", "sang a calm song"),
        },
    ),
    "better": ("felt better", "began to smile", "danced for joy", "laughed out loud"),
    # ----------------------------------------------------------------------------------------------- something is hard
    "skill": ("swim", "skate", "sing", "paint", "bake", "read"),
    "failed": By(
        "skill",
        {
            "swim": ("went under", "was afraid of the water"),
            "skate": ("fell on the ice", "could not stop"),
            "sing": ("forgot the words", "was too quiet"),
            "paint": ("spilled the paint", "broke a brush"),
            "bake": ("burned the bread", "dropped the eggs"),
            "read": ("forgot the letters", "skipped a page"),
        },
    ),
    "teacher": By(
        "skill",
        {
            "swim": ("duck", "otter"),
            "skate": ("penguin", "walrus"),
            "sing": ("robin", "cricket"),
            "paint": ("peacock", "zebra"),
            "bake": ("hen", "hamster"),
            "read": ("raven", "owl"),
        },
    ),
    "advice": By(
        "skill",
        {
            "swim": ("Kick your legs,", "Move your arms,"),
            "skate": ("Bend your knees,", "Take small steps,"),
            "sing": ("Open your mouth,", "Listen to the wind,"),
            "paint": ("Use less water,", "Begin with the sky,"),
            "bake": ("Use less sugar,", "Watch the fire,"),
            "read": ("Look at each line,", "Begin with your name,"),
        },
    ),
    "practice": (
        "After {number} tries {he} could {skill}.",
        "{He} practiced for {number} days and learned to {skill}.",
    ),
    "cheered": ("cheered", "clapped", "was amazed", "could not believe it"),
    # --------------------------------------------------------------------------------------------- someone gets a gift
    "gift": ("cake", "pie", "coat", "blanket", "ring", "crown", "table", "chair"),
    "elder": ("mother", "father", "aunt", "uncle", "teacher", "neighbor"),
    "need": By(
        "gift",
        dict.fromkeys(("cake", "pie"), ("flour", "sugar"))
        | dict.fromkeys(("coat", "blanket"), ("wool", "yarn"))
        | dict.fromkeys(("ring", "crown"), ("silver", "gold"))
        | dict.fromkeys(("table", "chair"), ("wood", "nails")),
    ),
    "loved": ("loved", "liked", "treasured", "praised", "admired"),
    # --------------------------------------------------------------------------------------------------------- endings
    "closing": (
        "{He} went home {mood}.",
        "That night {he} dreamed of {dream}.",
        "To celebrate, {he} ate {treat}.",
        "{hero} learned that {moral}.",
    ),
    "mood": ("happy", "proud", "singing", "smiling", "full of joy", "with a light heart", "at noon", "by train"),
    "dream": (
        "dragons",
        "pirates",
        "the moon",
        "flying fish",
        "a rainbow",
        "snow",
        "a whale",
        "candy",
        "giants",
        "sailing",
        "a queen",
        "the king",
    ),
    "treat": (
        "cake",
        "ice cream",
        "a plum",
        "cookies",
        "bread",
        "a peach",
        "pie",
        "jam",
        "soup",
        "grapes",
        "a melon",
        "eggs",
    ),
    "moral": (
        "friends matter most",
        "kindness always pays",
        "asking is brave",
        "patience helps",
        "nobody is too small to help",
        "good things take time",
        "two heads beat one",
        "a smile costs nothing",
    ),
}
