"""Numbers in a text with their units, and the values of expressions over the records (`tests/figures.py` says how)."""

import fnmatch
import json
import operator
import re
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RECORDS = {path.stem: json.loads(path.read_text()) for path in sorted((ROOT / "benchmarks" / "results").glob("*.json"))}

# Printed units: dimension and size. A ratio has no dimension.
UNITS = {
    "tok/s": ("token/s", 1.0),
    "tokens/s": ("token/s", 1.0),
    "tokens a second": ("token/s", 1.0),
    "PFLOP/s": ("FLOP/s", 1e15),
    "TFLOP/s": ("FLOP/s", 1e12),
    "GFLOP/s": ("FLOP/s", 1e9),
    "FLOP/s": ("FLOP/s", 1.0),
    "TB/s": ("B/s", 1e12),
    "GB/s": ("B/s", 1e9),
    "MB/s": ("B/s", 1e6),
    "B/s": ("B/s", 1.0),
    "TB": ("B", 1e12),
    "GiB": ("B", 2.0**30),
    "MiB": ("B", 2.0**20),
    "KiB": ("B", 2.0**10),
    "GB": ("B", 1e9),
    "MB": ("B", 1e6),
    "KB": ("B", 1e3),
    "kB": ("B", 1e3),
    "bytes": ("B", 1.0),
    "GHz": ("Hz", 1e9),
    "MHz": ("Hz", 1e6),
    "kHz": ("Hz", 1e3),
    "kJ": ("J", 1e3),
    "mJ": ("J", 1e-3),
    "µJ": ("J", 1e-6),
    "kW": ("W", 1e3),
    "mW": ("W", 1e-3),
    "J": ("J", 1.0),
    "W": ("W", 1.0),
    "ms": ("s", 1e-3),
    "µs": ("s", 1e-6),
    "us": ("s", 1e-6),
    "ns": ("s", 1e-9),
    "minutes": ("s", 60.0),
    "seconds": ("s", 1.0),
    "s": ("s", 1.0),
    "nats": ("nat", 1.0),
    "percent": ("", 0.01),
    "%": ("", 0.01),
    "times": ("", 1.0),
    "x": ("", 1.0),
    "×": ("", 1.0),
}
# Words in the names of fields that say their unit; the first that fits counts, from the last key to the first.
FIELDS = {
    "tokens_per_second": "tok/s",
    "tflop_per_second": "TFLOP/s",
    "gflop_per_second": "GFLOP/s",
    "flop_per_second": "FLOP/s",
    "terabytes_per_second": "TB/s",
    "gigabytes_per_second": "GB/s",
    "bytes_per_second": "B/s",
    "milliseconds": "ms",
    "microseconds": "µs",
    "(seconds|s)(?=$|_(in|of|per|to|until)_)": "s",
    "ms": "ms",
    "gib": "GiB",
    "gb": "GB",
    "bytes": "bytes",
    "watts": "W",
    "millijoules": "mJ",
    "joules": "J",
    "megahertz": "MHz",
    "nats": "nats",
    "percent": "%",
    "mfu|share|ratio|relative|fraction|of_limit|times": "x",
}
SUFFIXES = {"": 1.0, "k": 1e3, "M": 1e6, " million": 1e6, " billion": 1e9}
SIZES = ("bytes", "KB", "kB", "KiB", "MiB")  # of formats and tiles, counted and not measured
UNIT = "|".join(re.escape(unit) for unit in sorted(UNITS, key=len, reverse=True) if unit not in ("x", "×"))
DIGITS = r"\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+(?:\.\d+)?"
FIGURE = re.compile(
    rf"(?<![\w.,/^#−+-])(?P<sign>[+−-]?)(?P<digits>{DIGITS})(?P<suffix>[kM]| million| billion|e[+-]?\d+)?"
    rf"(?P<unit>[x×](?![\w-])|(?: |\n *)?(?:{UNIT})(?![\w/]))?(?![\w^]|[.,/]\d|-\w)"
)
# Words that state a quantity: "nine times", "half a percent", "two of five", "a third", "twice as", and a cell's yes or no.
ONES = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve", "thirteen")
ONES += ("fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen", "twenty")
TENS = {"thirty": 30, "forty": 40, "fifty": 50, "sixty": 60, "seventy": 70, "eighty": 80, "ninety": 90}
COUNTS = {word: value for value, word in enumerate(ONES, 1)} | TENS | {"hundred": 100, "thousand": 1000}
PARTS = {"third": 3, "quarter": 4, "fourth": 4, "fifth": 5, "sixth": 6, "seventh": 7, "eighth": 8, "ninth": 9, "tenth": 10}
PARTS |= {"twentieth": 20, "fiftieth": 50, "hundredth": 100, "thousandth": 1000}
ALONE = {"half": 0.5, "twice": 2.0, "yes": 1.0, "no": 0.0}
SPELLED = {"percent": "%", "minutes": "minutes", "milliseconds": "ms", "microseconds": "µs", "times": "times"}
COUNT = "|".join(COUNTS)
WORDED = re.compile(
    rf"(?<![\w-])(?:(?P<count>half a|{COUNT})\s+(?P<unit>{'|'.join(SPELLED)})"
    rf"|(?!one)(?P<some>{COUNT})\s+of\s+(?P<all>{COUNT})|(?P<parts>an?|{COUNT})\s+(?P<of>{'|'.join(PARTS)})s?"
    r"|(?P<alone>half|twice)|(?<=\| )(?P<cell>yes|no)(?= \|))(?![\w-])",
    re.IGNORECASE,
)
PARENTHESES = re.compile(r'\(((?:"[^"]*"|[^()"])*)\)')
PART = r'"[^"]*"|\[[^\]]*\]'  # of a path: a key in quotes, a choice of elements
WORDS = re.compile(rf' ([-+*/]) |((?:{PART}|[^" [])(?:{PART}|[^" []| (?![-+*/] ))*)')  # operators and operands


@dataclass(frozen=True)
class Figure:
    """A number in a text with its unit. `digits` may hold commas and decimals; `end` is its place's end."""

    text: str
    start: int
    end: int
    sign: str
    digits: str
    suffix: str
    unit: str
    said: float | None = None  # of words: their number

    @property
    def number(self) -> float:
        if self.said is not None:
            return self.said
        return (-1 if self.sign in ("-", "−") else 1) * float(self.digits.replace(",", "")) * scale(self.suffix)

    def prints(self, value: float) -> bool:
        """True if `value` rounds to the last printed digit of this, half a unit away from zero, or to these words."""
        half = 0.5 * 10.0**-self.decimals * scale(self.suffix)
        if self.said is not None:  # a count to the nearest, a part to a tenth of itself
            half = 0.5 if self.unit and self.said >= 1 else 0.1 * self.said or 0.5
        more = value - self.number if self.number >= 0 else self.number - value
        return -half * (1 + 1e-9) <= more < half * (1 - 1e-9)

    @property
    def decimals(self) -> int:
        return len(self.digits.partition(".")[2])

    @property
    def is_measured(self) -> bool:
        """It looks measured by itself: by its unit, by k, or by its decimals, as losses and errors have."""
        if self.said is not None:
            return self.text.lower() not in ("half", "twice")  # which say more of logic than of measurements
        by_decimals = self.decimals >= (1 if self.suffix in (" million", " billion") or self.suffix.startswith("e") else 3)
        return self.unit not in ("", *SIZES) or self.suffix == "k" or by_decimals


@dataclass(frozen=True)
class Value:
    """Values of an expression, in `unit`; "" is a ratio, None unknown."""

    values: list[float]
    unit: str | None


class Wrong(Exception):
    """A line says something that the records do not hold."""


def scale(suffix: str) -> float:
    """The factor that a suffix says: k, M, or an exponent like e-03."""
    return 10.0 ** int(suffix[1:]) if suffix.startswith("e") else SUFFIXES[suffix]


def figures_in(text: str) -> list[Figure]:
    """All numbers with their units, in order, in digits and in words."""
    digits = (
        Figure(
            " ".join(m[0].split()), m.start(), m.end(), m["sign"], m["digits"], m["suffix"] or "", (m["unit"] or "").strip()
        )
        for m in FIGURE.finditer(text)
    )
    words = (
        Figure(" ".join(m[0].split()), m.start(), m.end(), "", "", "", SPELLED.get(m["unit"] or "", ""), said_by(m))
        for m in WORDED.finditer(text)
    )
    return sorted((*digits, *words), key=lambda figure: figure.start)


def said_by(match: re.Match) -> float:
    """The number that words say."""
    group = {name: word.lower() for name, word in match.groupdict().items() if word}
    if word := group.get("alone") or group.get("cell"):
        return ALONE[word]
    if "count" in group:
        return 0.5 if group["count"].startswith("half") else float(COUNTS[group["count"]])
    return (
        COUNTS[group["some"]] / COUNTS[group["all"]]
        if "all" in group
        else COUNTS.get(group["parts"], 1) / PARTS[group["of"]]
    )


def keys_of(path: str) -> list[str]:
    return re.findall(r'"[^"]*"|\[[^\]]*\]|[^."\[\]]+', path)


def walk(node: Any, key: str, path: str) -> list[Any]:
    """The values under a key of a path, one unless the key asks for several."""
    if not key.startswith("["):
        name = key.strip('"')
        found = [name] if not key.startswith('"') else fnmatch.filter(node, name.replace("[", "[[]"))
        if len(found) != 1 or not isinstance(node, dict) or found[0] not in node:
            raise Wrong(f"{path}: no single key {name}")
        return [node[found[0]]]
    inside = key[1:-1]
    if inside == "*":
        return list(node.values() if isinstance(node, dict) else node)
    if "=" in inside:
        name, _, value = inside.partition("=")
        return [each for each in (node if isinstance(node, list) else [node]) if str(each.get(name)) == value]
    if ":" in inside:
        return node[slice(*(int(place) if place else None for place in inside.split(":")))]
    return [node[int(inside)]]


def unit_of(keys: list[str]) -> str | None:
    """The unit that the names of a path's keys say, the last first."""
    for key in reversed(keys):
        name = re.sub(r"\W+", "_", key.strip('"'))
        for words, unit in FIELDS.items():
            if re.search(rf"(?<![a-z])({words})(?![a-z])", name):
                return "" if unit == "x" else unit
    return None


def term(text: str, record: str, records: dict[str, Any]) -> Value:
    """A number, or the values at a path: 'mean rows[contender=ddp].tokens_per_second'."""
    if re.fullmatch(r"-?\d[\d.]*(e-?\d+)?", text):
        return Value([float(text)], None)
    fold, path = text.split(" ", 1) if re.match(r"(mean|median|min|max|sum) ", text) else ("", text)
    if match := re.match(r"([\w-]+):", path):
        record, path = match[1], path[match.end() :]
    if record not in records:
        raise Wrong(f"no record {record}")
    nodes, keys = [records[record]], keys_of(path)
    for key in keys:
        try:
            nodes = [found for node in nodes for found in walk(node, key, f"{record}: {path}")]
        except (TypeError, LookupError, AttributeError, ValueError) as error:
            raise Wrong(f"{record}: {path}: nothing at {key}") from error
    values = [float(node) for node in nodes if isinstance(node, int | float)]
    if not values or len(values) != len(nodes):
        raise Wrong(f"{record}: {path}: no number there")
    folds = {"mean": statistics.mean, "median": statistics.median, "min": min, "max": max, "sum": sum}
    return Value([folds[fold](values)] if fold else values, unit_of(keys))


def size(unit: str | None) -> float:
    return UNITS[unit][1] if unit else 1.0


def joined(left: Value, sign: str, right: Value) -> Value:
    """left + right and so on, element by element; a single value goes with all."""
    count = max(len(left.values), len(right.values))
    if {len(left.values), len(right.values)} - {1, count}:
        raise Wrong(f"{len(left.values)} values {sign} {len(right.values)}")
    pairs = zip(left.values * (count // len(left.values)), right.values * (count // len(right.values)), strict=True)
    compute = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}[sign]
    unit, factor = left.unit, 1.0
    if sign == "/" and left.unit and right.unit and UNITS[left.unit][0] == UNITS[right.unit][0]:
        unit, factor = "", size(left.unit) / size(right.unit)
    elif sign in "+-*" and left.unit is None:
        unit = right.unit
    elif sign in "*/" and right.unit:
        unit = None
    elif sign in "+-" and right.unit is not None and left.unit != right.unit:
        raise Wrong(f"{left.unit} {sign} {right.unit}")
    return Value([compute(a, b) * factor for a, b in pairs], unit)


def evaluate(expression: str, record: str, records: dict[str, Any]) -> Value:
    """The values of an expression, from left to right, parentheses first."""
    inner: dict[str, Value] = {}
    while match := PARENTHESES.search(expression):
        inner[f"@{len(inner)}"] = evaluate_flat(match[1], record, records, inner)
        expression = f"{expression[: match.start()]}@{len(inner) - 1}{expression[match.end() :]}"
    return evaluate_flat(expression, record, records, inner)


def evaluate_flat(expression: str, record: str, records: dict[str, Any], inner: dict[str, Value]) -> Value:
    """An expression without parentheses; `inner` are the values of those that it had."""
    match = re.fullmatch(r'(?P<body>(?:"[^"]*"|[^"])+?)(?: in (?P<unit>[^ "]+))?', expression)
    if not match:
        raise Wrong(f"no expression: {expression}")
    asked = match["unit"]
    words = [sign or text.strip() for sign, text in WORDS.findall(match["body"])]
    values = [inner[word] if word in inner else term(word, record, records) for word in words[::2]]
    found = values[0]
    for sign, value in zip(words[1::2], values[1:], strict=True):
        found = joined(found, sign, value)
    if not asked:
        return found
    if asked not in UNITS:
        raise Wrong(f"no unit {asked}")
    if found.unit and UNITS[found.unit][0] != UNITS[asked][0]:
        raise Wrong(f"{found.unit} in {asked}")
    factor = size(found.unit) / size(asked) if found.unit is not None else 1.0
    return Value([value * factor for value in found.values], asked)


def expanded(expression: str) -> list[str]:
    """One expression for each key of `{a, b}`."""
    match = re.search(r"\{([^}]*)\}", expression)
    if not match:
        return [expression]
    return [expression[: match.start()] + key.strip() + expression[match.end() :] for key in match[1].split(",")]
