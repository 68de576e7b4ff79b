"""handgrad doctor: this machine's parts, the network between ranks, or a comparison with llm.c's gradients."""

import os
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

from handgrad import devices
from handgrad.backend import choose_backend
from handgrad.errors import ConfigError, UsageError
from handgrad.interop.llmc_debug import compare, read_debug_state
from handgrad.interop.llmc_model import read_model
from handgrad.parallel.launchers import find_rank_info
from handgrad.parallel.rendezvous import Timeouts
from handgrad.tools.doctor import examine
from handgrad.tools.network import examine_network


def run(parsed: Namespace) -> int:
    if bool(parsed.debug_state) != bool(parsed.model):
        raise UsageError("--debug-state and --model go together: a debug state and the model file that it was made with")
    is_rank_0 = True
    if parsed.debug_state:
        lines = examine_gradients(Path(parsed.debug_state), Path(parsed.model))
    elif parsed.net:
        info = find_rank_info(os.environ)
        timeouts = Timeouts(parsed.join_seconds, parsed.silence_seconds, parsed.stall_seconds)
        lines = examine_network(info, devices.resolve_device("auto", info.local_rank), timeouts)
        is_rank_0 = info.rank == 0
    else:
        lines = examine()
    healthy = True
    for ok, line in lines:
        healthy = healthy and ok
        if is_rank_0:
            print(f"{'ok  ' if ok else 'FAIL'}  {line}", flush=True)
    return 0 if healthy else ConfigError.exit_code


def examine_gradients(state_file: Path, model_file: Path) -> Iterator[tuple[bool, str]]:
    """(ok, line) for the logits, the loss and each gradient, by the operations that training uses here."""
    device = devices.resolve_device("auto")
    devices.use_precision(device, "fp32")
    ops = choose_backend("auto", device)
    state = read_debug_state(state_file, read_model(model_file))
    batch, length = state.tokens.shape
    yield True, f"{batch} texts of {length} tokens on {devices.describe(device)}, by the {ops.__name__.rpartition('.')[2]}"
    for found in compare(state, device, ops):
        name = found.name if found.name in ("logits", "loss") else f"gradient of {found.name}"
        yield found.fine, f"{name}: relative error {found.error:.2g}, at most {found.tolerance:.2g}"
