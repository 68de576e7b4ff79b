"""handgrad doctor: this machine's parts."""

from argparse import Namespace

from handgrad.errors import ConfigError
from handgrad.tools.doctor import examine


def run(parsed: Namespace) -> int:
    healthy = True
    for ok, line in examine():
        healthy = healthy and ok
        print(f"{'ok  ' if ok else 'FAIL'}  {line}", flush=True)
    return 0 if healthy else ConfigError.exit_code
