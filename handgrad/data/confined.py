"""Runs untrusted programs (a Jinja chat template, the expressions of a tokenizer) in a separate process with limits.

Neither Jinja nor the tokenizers library can be interrupted in this process, and a file can make either take any amount of
time and memory. `Program` starts this file as a child that imports nothing of handgrad. The child limits its memory (on
macOS, which has no such limit, `Program` watches it) and the CPU time of each request; it exits with its parent.
"""

import array
import contextlib
import functools
import itertools
import json
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from datetime import datetime
from multiprocessing.connection import Connection
from typing import Any

MEMORY_BYTES = 4 << 30
SECONDS, SECONDS_PER_MIB = 10.0, 10.0  # CPU time per request, and per MiB of it, which takes at most one second
REPLY_BYTES, REPLY_PER_BYTE = 1 << 20, 64  # at most, per request and per byte of it
WATCH_SECONDS = 0.1
BEGIN, END = "\ufdd2", "\ufdd3"  # around what a template writes in `{% generation %}` ... `{% endgeneration %}`


class ProgramError(ValueError):
    """A program failed or exceeded its limits; the message is the reason."""


class Program:
    """An untrusted program of `kind` "template" or "tokenizer". `about`: its reply to loading. Raises ProgramError."""

    def __init__(self, kind: str, content: bytes):
        self.kind, self.content, self.lock, self.endless = kind, content, threading.Lock(), ""
        with self.lock:
            self.about = self.start()

    def run(self, request: bytes) -> bytes:
        """The reply to a request. Raises ProgramError; does not run a program again that once ran out of time."""
        with self.lock:
            if self.endless:
                raise ProgramError(self.endless)
            if self.process.poll() is not None or self.owner != os.getpid():  # a fork would share the pipes
                self.start()
            return self.ask(request)

    def start(self) -> bytes:
        self.owner, (self.pipe, theirs) = os.getpid(), multiprocessing.Pipe()
        command = [sys.executable, "-P", __file__, self.kind, str(MEMORY_BYTES), str(theirs.fileno())]
        environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false"}  # threads reserve memory, which the limit counts
        quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        with theirs:
            self.process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=environment, process_group=0, **quiet)
        weakref.finalize(self, end, self.process, self.pipe, self.owner)
        return self.ask(self.content)

    def ask(self, request: bytes) -> bytes:
        process, seconds = self.process, SECONDS + SECONDS_PER_MIB * len(request) / (1 << 20)
        try:
            self.pipe.send_bytes(json.dumps(seconds).encode())
            self.pipe.send_bytes(request)
            while sys.platform == "darwin" and not self.pipe.poll(WATCH_SECONDS):
                listing = subprocess.run(["ps", "-o", "rss=", "-p", str(process.pid)], capture_output=True, text=True)
                if 1024 * int(listing.stdout or 0) > MEMORY_BYTES:
                    process.kill()
            reply = self.pipe.recv_bytes()
        except (EOFError, ConnectionError):
            if process.wait() == -signal.SIGPROF:
                self.endless = f"no end within {seconds:.0f} s of CPU time"
            ended = f"its process ended ({process.returncode}), as by more than {MEMORY_BYTES >> 20} MiB of memory"
            raise ProgramError(self.endless or ended) from None
        except BaseException:  # Ctrl-C in the middle: the next request must not get this reply
            end(process, self.pipe, self.owner)
            raise
        if reply[:1] != b"=":
            raise ProgramError(reply[1:].decode())
        return reply[1:]


program = functools.lru_cache(maxsize=2)(Program)  # a command loads its tokenizer several times


def end(process: subprocess.Popen[bytes], pipe: Connection, owner: int) -> None:
    """Kills a child, unless this process is a fork of its parent."""
    pipe.close()
    if owner == os.getpid():
        process.kill()
        process.wait()


def template(content: bytes) -> tuple[bytes, Callable[[bytes], bytes]]:
    """Renders conversations in the environment that transformers gives a template. Replies with (True, text) or
    (False, reason for the failure) for each."""
    import jinja2
    import jinja2.ext
    import jinja2.sandbox

    text, now, variables = json.loads(content)

    class Generation(jinja2.ext.Extension):
        """`{% generation %}` ... `{% endgeneration %}`: writes its content between two noncharacters."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return jinja2.nodes.CallBlock(self.call_method("_between"), [], [], body).set_lineno(line)

        def _between(self, caller: Callable[[], str]) -> str:
            return BEGIN + caller() + END

    def tojson(value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False):
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def strftime_now(form: str) -> str:
        return (datetime.fromisoformat(now) if now else datetime.now()).strftime(form)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = tojson
    compiled = environment.from_string(text, {"raise_exception": raise_exception, "strftime_now": strftime_now})

    def render(messages: list[Any], asks: bool) -> tuple[bool, str]:
        values = {"messages": messages, "tools": None, "documents": None, "add_generation_prompt": asks}
        try:
            return True, compiled.render(values | variables)
        except Exception as error:  # an untrusted program may raise anything
            return False, reason(error)

    return b"", lambda request: json.dumps(list(itertools.starmap(render, json.loads(request)))).encode()


def tokenizer(content: bytes) -> tuple[bytes, Callable[[bytes], bytes]]:
    """Encodes texts: replies with the token count of each, then all tokens, as uint32. Its `about` has the number of
    tokens, the tokens by id, the added ones, and the ones that it puts before a text."""
    import tokenizers

    library = tokenizers.Tokenizer.from_buffer(content)
    library.encode_special_tokens = True  # a special token spelled out in a text is text
    library.no_truncation()
    library.no_padding()
    added = {number: token.content for number, token in library.get_added_tokens_decoder().items()}
    tokens = {number: library.id_to_token(number) for number in library.get_vocab().values()}
    whole, text = (library.encode("a", add_special_tokens=special).ids for special in (True, False))
    begins = whole[: next((n for n in range(len(whole) - len(text) + 1) if whole[n : n + len(text)] == text), 0)]
    about = {"size": library.get_vocab_size(), "tokens": [*tokens.items()], "added": [*added.items()], "begins": begins}

    def encode(request: bytes) -> bytes:
        ids = [each.ids for each in library.encode_batch_fast(json.loads(request), add_special_tokens=False)]
        return array.array("I", itertools.chain(map(len, ids), *ids)).tobytes()

    return json.dumps(about).encode(), encode


def reason(error: BaseException) -> str:
    """An error in words; a template's refusal in the template's own words."""
    if isinstance(error, MemoryError):
        return f"more than {int(sys.argv[2]) >> 20} MiB of memory"
    return f"{error!s:.200}" if type(error).__module__.startswith("jinja2") else f"{type(error).__name__}: {error!s:.200}"


def main() -> None:
    """Loads the program in the first request and runs it on each later request."""
    load = {"template": template, "tokenizer": tokenizer}[sys.argv[1]]
    with contextlib.suppress(ValueError, OSError):  # macOS has no such limit
        resource.setrlimit(resource.RLIMIT_AS, (int(sys.argv[2]), int(sys.argv[2])))
    pipe, run = Connection(int(sys.argv[3])), None
    with contextlib.suppress(EOFError):  # the parent has exited
        while True:
            seconds, request = json.loads(pipe.recv_bytes()), pipe.recv_bytes()
            signal.setitimer(signal.ITIMER_PROF, seconds)  # SIGPROF ends this process
            try:
                if run is None:
                    reply, run = load(request)
                else:
                    reply = run(request)
                if len(reply) > (most := REPLY_BYTES + REPLY_PER_BYTE * len(request)):
                    raise ValueError(f"{len(reply)} bytes, expected at most {most}")
                reply = b"=" + reply
            except BaseException as error:  # an untrusted program; and the library's panics are not Exceptions
                reply = b"!" + reason(error).encode(errors="replace")
            signal.setitimer(signal.ITIMER_PROF, 0)
            pipe.send_bytes(reply)


if __name__ == "__main__":
    main()
