"""The page of cards, docs/cards.md: its table, drawn from the files that people sent in, benchmarks/cards/*.json.

    python -m benchmarks.cards      checks the files, draws the table into the page

`handgrad bench card` writes such a file.
"""

import json
import re
import sys
from pathlib import Path
from typing import Any

from handgrad.errors import DataError
from handgrad.joins.audit.chain import sha256
from handgrad.tools.card import FORMAT, REFUSED, SHAPES

ROOT = Path(__file__).parents[1]
FOLDER, PAGE = ROOT / "benchmarks" / "cards", ROOT / "docs" / "cards.md"
BEGIN, END = "<!-- python -m benchmarks.cards draws this -->\n", "<!-- drawn -->\n"
HEADING = ["card", "precision", *SHAPES, "GEMM, TFLOP/s"]
NONE = "No file has been sent in yet.\n"

Card = dict[str, Any]


def cards() -> dict[str, Card]:
    """File name: card, of all that were sent in, the fastest first. Raises `DataError`."""
    found = {path.name: read(path) for path in FOLDER.glob("*.json")}
    return dict(sorted(found.items(), key=lambda item: (-fastest(item[1]), item[0])))


def read(path: Path) -> Card:
    """A card whose hash is its content's. Raises `DataError`."""
    content = json.loads(path.read_text(encoding="utf-8"))
    card = {name: value for name, value in content.items() if name != "sha256"}
    if content.get("sha256") != sha256(card):
        raise DataError(f"{path} was edited: its sha256 is not that of its content; run `handgrad bench card` again")
    if card["format"] != FORMAT:
        raise DataError(f"{path} has format {card['format']}, expected {FORMAT}; run `handgrad bench card` of this version")
    if card["commit"].endswith("+"):
        raise DataError(f"{path} is of a checkout with changes, on {card['commit']}; commit them and run it again")
    return card


def fastest(card: Card) -> float:
    """Tokens per second of the first shape, in the precision in which it is fastest."""
    return max(cell.get("tokens_per_second", 0.0) for cell in card["steps"][next(iter(SHAPES))].values())


def lines() -> list[str]:
    """The table: a line for each precision of a card, but for those that its GPU lacks."""
    rows = [HEADING, ["---"] * len(HEADING)]
    for name, card in cards().items():
        title = title_of(name, card)
        for precision in next(iter(card["steps"].values())):
            cells = [card["steps"].get(shape, {}).get(precision, {"missing": ""}) for shape in SHAPES]
            if any(cell.get("missing") != REFUSED for cell in cells):
                flops = card["gemm_flops"].get(precision)
                rows.append([title, precision, *map(text, cells), f"{flops / 1e12:.3g}" if flops else ""])
                title = ""
    return [f"| {' | '.join(row)} |" for row in rows]


def title_of(name: str, card: Card) -> str:
    """The GPU with a link to its file, the power limit, the rate of a copy."""
    machine, copying = card["machine"], card["copy_bytes_per_second"]
    device = re.sub(r"\s+", " ", machine["device"]).replace("|", "/")
    limit = f", {machine['power_limit_watts']:.0f} W" if machine.get("power_limit_watts") else ""
    rate = f"{copying / 1e12:.2f} TB/s" if copying >= 1e12 else f"{copying / 1e9:.0f} GB/s"
    return f"[{device}](../benchmarks/cards/{name}){limit}, copies {rate}"


def text(cell: dict[str, Any]) -> str:
    if "missing" in cell:
        return cell["missing"]
    speed = cell["tokens_per_second"]
    return f"{speed / 1e3:.1f}k" if speed >= 1e4 else f"{speed:.0f}"


def drawn(page: str) -> str:
    """The page with the table of the files."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    table = "\n".join(lines()) + "\n" if cards() else NONE
    return f"{before}{BEGIN}\n{table}\n{END}{after}"


if __name__ == "__main__":
    try:
        PAGE.write_text(drawn(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    except DataError as error:
        sys.exit(f"error: {error}")
