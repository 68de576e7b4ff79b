"""The lines of the pages that are made from the records, word by word."""

import functools
import re

from benchmarks import cards, faults, own_chat, small_text
from benchmarks.first_minutes import transcript
from tests import test_planning, test_readme, test_scaling_docs
from tests.figure_values import RECORDS
from tests.figures import LOGGED

# Lines of arithmetic, which measures nothing; tests/test_scaling_docs.py makes them anew, word by word.
ARITHMETIC = re.compile(r"^\| \w+ \| (NVLink|InfiniBand|Ethernet)\b.*%.*\|$", re.MULTILINE)


@functools.cache
def made() -> dict[str, list[str]]:
    """By page."""
    pages = {"docs/distributed.md": test_scaling_docs.scaling_rows(), "docs/planning.md": test_planning.table()}
    # Its blocks are held by tests/test_first_minutes.py.
    held = transcript(RECORDS["cpu-first-minutes"])
    visible = [line for line in held if line.startswith(("Recorded", "## ")) or LOGGED.match(line)]
    pages["docs/first_ten_minutes.md"] = visible
    sizes = [line for size in own_chat.COMMANDS for line in own_chat.transcript(size) if line.startswith("Recorded")]
    pages["docs/own_chat_model.md"] = [*own_chat.planned(), *sizes]
    pages["docs/data.md"] = small_text.rows(RECORDS["cpu-small-text"])
    pages["docs/faults.md"] = [line for make in faults.BLOCKS.values() for line in make() if line]
    pages["docs/cards.md"] = cards.lines()
    return {**test_readme.quoted(), **pages}
