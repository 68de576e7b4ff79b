"""handgrad doctor: what this machine has, what will be used, what is missing; and what the network between ranks gives."""

import os
from collections.abc import Sequence

from handgrad import world
from handgrad.commands.arguments import Parser
from handgrad.distributed.launchers import find_place
from handgrad.distributed.network import examine_network
from handgrad.doctor import examine
from handgrad.errors import ConfigError


def run(arguments: Sequence[str]) -> int:
    parser = Parser("handgrad doctor", description="Looks at this machine and runs each part once.")
    parser.add_argument(
        "--net", action="store_true", help="measure between the processes of a launch instead (torchrun, srun)"
    )
    if parser.parse(arguments).net:
        place = find_place(os.environ)
        lines = examine_network(world.resolve_device("auto", place.local_rank))
        speaks = place.rank == 0
    else:
        lines, speaks = examine(), True
    well = True
    for fine, line in lines:
        well = well and fine
        if speaks:
            print(f"{'ok  ' if fine else 'FAIL'}  {line}", flush=True)
    return 0 if well else ConfigError.exit_code
