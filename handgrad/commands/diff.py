"""handgrad diff: where two runs part."""

from argparse import Namespace
from pathlib import Path

from handgrad.tools.diff import checkpoint_lines, facts_lines, link_lines
from handgrad.tools.record import open_record


def run(parsed: Namespace) -> int:
    one, other = (open_record(Path(path)) for path in (parsed.run, parsed.other))
    found = [*facts_lines(one, other), *link_lines(one, other)]
    found += checkpoint_lines(one.folder, other.folder, parsed.tensors)
    print("\n".join(found) if found else equal_line(len(one.steps.keys() & other.steps.keys())))
    return 1 if found else 0


def equal_line(common: int) -> str:
    return f"nothing differs: configuration, versions, data and {common} links are equal"
