"""handgrad doctor: this machine's parts, or the network between ranks."""

import os
from argparse import Namespace

from handgrad.errors import ConfigError
from handgrad.joins.parallel.launchers import find_rank_info
from handgrad.joins.parallel.rendezvous import Timeouts
from handgrad.machine import devices
from handgrad.tools.doctor import examine
from handgrad.tools.network import examine_network


def run(parsed: Namespace) -> int:
    is_rank_0 = True
    if parsed.net:
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
