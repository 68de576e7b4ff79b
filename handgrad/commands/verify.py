"""handgrad verify: replays an audited run between its checkpoints, in a scratch folder, and compares every link."""

import os
import tempfile
import time
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from handgrad.errors import UsageError
from handgrad.files import check_free
from handgrad.joins.audit.chain import FORMAT
from handgrad.joins.parallel.launchers import find_rank_info
from handgrad.joins.parallel.local import command_line, end_with_launcher, is_launched, run_ranks
from handgrad.machine import threads
from handgrad.tools.record import open_record
from handgrad.tools.verify import Span, check_machine, holds, replay, spans_of

PATIENCE_SECONDS = 35.0  # the launcher gives ranks this long to say why they ended


def run(parsed: Namespace) -> int:
    begun, info = time.perf_counter(), find_rank_info(os.environ)
    launched = is_launched()
    tells = info.rank == 0 and not launched
    if info.size > 1 and not launched and not parsed.scratch:
        raise UsageError("expected --scratch DIR, an empty folder that all ranks see, where a launcher starts the ranks")
    if parsed.scratch and info.size == 1:
        check_free(Path(parsed.scratch))
    record = open_record(Path(parsed.run), parsed.signed_by)
    if record.signer is not None and tells:
        print(f"signed by  {f'the key {record.signer}' if record.signer else 'no key'}")
    spans = spans_of(record, vars(parsed)["from"], parsed.to, parsed.segments or 0, parsed.seed)
    if launched:
        end_with_launcher()
    elsewhere = {name: path for name in ("data", "init_from", "teacher", "reward") if (path := getattr(parsed, name))}
    if (parsed.ranks or 1) > 1 and not launched and "OMP_NUM_THREADS" not in threads.environment_before():
        torch.set_num_threads(1)  # as each of the ranks has
    changed = check_machine(record, spans, elsewhere, allow_changes=parsed.allow_changes)
    for line in changed if tells else ():
        print(f"other      {line}")
    if tells and any(begin["format"] < FORMAT for begin in record.begins):
        print("older      a chain of format 1, without a hash of the code, a chat flag, and a chain of checkpoints")
    if info.size > 1 and len(spans) > 1:
        raise UsageError(
            f"a launcher's ranks replay one span, found {len(spans)}; give --from {spans[0].first} --to {spans[0].last}"
        )
    if not launched:  # else the launching process has done it
        record.hold()
    links = checkpoints = 0
    for span in spans:
        with scratch_folder(parsed.scratch, inside=info.size > 1) as scratch:
            if (parsed.ranks or 1) > 1 and not launched:
                if code := launch(parsed, span, scratch):
                    return code
                counts = record.compared(span.first, span.last)
            else:
                counts = replay(record, span, elsewhere, scratch, writes=info.rank == 0)
            links, checkpoints = links + counts[0], checkpoints + counts[1]
    if tells:
        print(holds(record, spans, links, checkpoints, begun))
    return 0


def launch(parsed: Namespace, span: Span, scratch: Path) -> int:
    """Replays one span in several processes; returns their exit code."""
    words = ["verify", parsed.run, "--from", span.first, "--to", span.last, "--scratch", scratch, "--ranks", parsed.ranks]
    words += ["--data", parsed.data] if parsed.data else []
    words += ["--init-from", parsed.init_from] if parsed.init_from else []
    words += ["--teacher", parsed.teacher] if parsed.teacher else []
    words += ["--reward", parsed.reward] if parsed.reward else []
    words += ["--allow-changes"] if parsed.allow_changes else []
    return run_ranks(command_line(*words), parsed.ranks, threads.environment_before(), PATIENCE_SECONDS)


@contextmanager
def scratch_folder(parent: str, *, inside: bool) -> Iterator[Path]:
    """An empty folder for a replay, removed afterwards. `inside`: yields the folder `parent`, which all ranks share."""
    if inside:
        yield Path(parent)
        return
    if parent:
        check_free(Path(parent))
        Path(parent).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="verify-", dir=parent or None, ignore_cleanup_errors=True) as folder:
        yield Path(folder)
