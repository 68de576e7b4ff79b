"""handgrad diff: finds where two runs diverge."""

from argparse import Namespace
from pathlib import Path

from handgrad.tools.diff import checkpoint_lines, facts_lines, folder_records, link_lines, metrics_lines, unaudited
from handgrad.tools.record import open_record


def run(parsed: Namespace) -> int:
    paths = [Path(parsed.run), Path(parsed.other)]
    if without := unaudited(paths):
        one, other = folder_records(paths)
        names = " and ".join(dict.fromkeys(map(str, without)))
        print(f"no chain       of {names}: metrics and checkpoints are compared; train with --audit-every 1 for states")
        lines = [*facts_lines(one, other), *metrics_lines(one, other)]
        compared = "loss, norm and rate of {} steps"
    else:
        one, other = (open_record(path) for path in paths)
        lines = [*facts_lines(one, other), *link_lines(one, other)]
        compared = "{} links"
    lines += checkpoint_lines(one.folder, other.folder, parsed.tensors)
    steps = compared.format(len(one.steps.keys() & other.steps.keys()))
    print("\n".join(lines) if lines else f"nothing differs: configuration, versions, data and {steps} are equal")
    return 1 if lines else 0
