"""The lines of the pages that are made from the records, word by word."""

import functools
import re

from tests import test_planning, test_readme, test_scaling_docs

# Lines of arithmetic, which measures nothing; tests/test_scaling_docs.py makes them anew, word by word.
ARITHMETIC = re.compile(r"^\| \w+ \| (NVLink|InfiniBand|Ethernet)\b.*tokens a step \|$", re.MULTILINE)


@functools.cache
def made() -> dict[str, list[str]]:
    """By page."""
    pages = {"docs/distributed.md": test_scaling_docs.scaling_rows(), "docs/planning.md": test_planning.table()}
    return {**test_readme.quoted(), **pages}
