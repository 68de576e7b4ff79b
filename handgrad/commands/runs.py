"""handgrad runs: a table of the runs below a folder."""

import json
import shutil
from argparse import Namespace
from pathlib import Path

from handgrad.run.listing import list_runs, listed


def run(parsed: Namespace) -> int:
    runs = list_runs(Path(parsed.folder))
    if parsed.json:
        print(json.dumps([run.as_json() for run in runs], indent=1))
    elif not runs:
        print(f"no runs in {parsed.folder}")
    else:
        print("\n".join(listed(runs, shutil.get_terminal_size().columns)))
    return 0
