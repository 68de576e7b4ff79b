"""handgrad checkpoints: lists a run's checkpoints, verifies their hashes, prunes them."""

from argparse import Namespace
from pathlib import Path

from handgrad.errors import DataError
from handgrad.run.inventory import kept_checkpoints, listed, prune, verify
from handgrad.run_files import CHECKPOINTS


def run(parsed: Namespace) -> int:
    folder = Path(parsed.run)
    kept = kept_checkpoints(folder)
    if parsed.verify:
        errors, kept = [], [one for one in kept if one.folder.parent.name == CHECKPOINTS]
        for one in kept:
            error = verify(one.folder)
            errors += [error] if error else []
            print(f"{'damaged' if error else 'ok':<9} {one.folder}{f': {error}' if error else ''}", flush=True)
        if errors:
            raise DataError(f"{len(errors)} of {len(kept)} checkpoints are damaged: {errors[0]}")
    if parsed.prune is not None:
        for line in prune(folder, parsed.prune):
            print(line)
    if not parsed.verify and parsed.prune is None:
        print("\n".join(listed(kept)))
    return 0
