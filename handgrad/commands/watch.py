"""handgrad watch: the report of runs, live in a browser."""

import functools
from argparse import Namespace
from pathlib import Path

from handgrad.commands.flags import WATCH_PORT
from handgrad.reports.serve import Handler, Watched
from handgrad.serving.local_server import listen


def run(parsed: Namespace) -> int:
    watched = Watched([Path(name) for name in parsed.runs])
    for line in watched.waiting():
        print(f"waiting    {line}")
    handler = functools.partial(Handler, watched)
    with listen(handler, parsed.host, parsed.port or WATCH_PORT, may_move=parsed.port is None) as server:
        host, port = server.server_address[:2]
        print(f"watching   http://{host}:{port}/   (Ctrl-C ends it)", flush=True)
        server.serve_forever()
    return 0
