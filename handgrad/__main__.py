"""The program `handgrad`, and `python -m handgrad`. Installs signal handlers before it imports anything large."""

import _signal  # pyrefly: ignore[missing-import] - built in; importing `signal` takes some milliseconds
import atexit
import sys

INTERRUPTIBLE = _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler  # else ignored, as in a background job
if INTERRUPTIBLE:
    _signal.signal(_signal.SIGINT, _signal.SIG_DFL)


def main() -> int:
    """Runs the command in `sys.argv`; returns its exit code."""
    if sys.platform == "win32":  # lacks parts of `signal` and `fcntl` that the imports below use
        print("handgrad needs Linux or macOS, found Windows; run it in WSL 2", file=sys.stderr)
        return 64
    from handgrad.errors import end_at_once, stoppable

    if INTERRUPTIBLE:
        _signal.signal(_signal.SIGINT, end_at_once)
        # Runs last at exit. Python then removes its handlers and tears down its modules, which takes a second, and a signal
        # in that time would kill the process whatever its exit code is.
        atexit.register(_signal.signal, _signal.SIGINT, _signal.SIG_IGN)
    with stoppable(training=sys.argv[1:2] == ["train"]):
        loaded = "torch" in sys.modules  # by a program that calls this function
        from handgrad import cli

        assert loaded or "torch" not in sys.modules, "an import of `cli` loads torch before `threads.choose`"
        return cli.main()


if __name__ == "__main__":
    sys.exit(main())
