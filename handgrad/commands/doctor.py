"""handgrad doctor: what this machine has, what will be used, what is missing."""

from collections.abc import Sequence

from handgrad.commands.arguments import Parser
from handgrad.doctor import examine
from handgrad.errors import ConfigError


def run(arguments: Sequence[str]) -> int:
    Parser("handgrad doctor", description="Looks at this machine and runs each part once.").parse(arguments)
    well = True
    for fine, line in examine():
        well = well and fine
        print(f"{'ok  ' if fine else 'FAIL'}  {line}", flush=True)
    return 0 if well else ConfigError.exit_code
