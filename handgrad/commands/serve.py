"""handgrad serve: a model over HTTP, for OpenAI's clients and for a browser."""

import functools
import threading
import time
from argparse import Namespace

from handgrad.commands.chat import context_of, open_talking_model, sampling_options
from handgrad.commands.flags import SERVE_PORT
from handgrad.evaluation.load import is_taught_to_talk
from handgrad.generation.generate import check_writing
from handgrad.serving.local_server import LocalHandler, listen
from handgrad.serving.requests import Request, Writer
from handgrad.serving.server import Handler, Served, write_all


def run(parsed: Namespace) -> int:
    check_writing(parsed.max_tokens, parsed.seed, parsed.stop)
    options = sampling_options(parsed)
    listening = functools.partial(listen, host=parsed.host, port=parsed.port or SERVE_PORT, may_move=parsed.port is None)
    listening(LocalHandler).server_close()  # refuses a port that is taken before it reads the model
    weights, talk, writing = open_talking_model(parsed)
    context, described = context_of(writing, parsed.context)
    talks = is_taught_to_talk(weights.tokenizer, weights.checkpoint)  # the page opens with a conversation
    about = {"id": parsed.checkpoint, "object": "model", "created": int(time.time()), "owned_by": "handgrad"}
    most = min(parsed.max_tokens, context)
    about |= {"context": context, "talks": talks, "temperature": options.temperature, "max_tokens": most}
    default = Request(max_tokens=most, options=options, stops=tuple(parsed.stop))
    served = Served(about | {"system": parsed.system}, default, parsed.system)
    with listening(functools.partial(Handler, served)) as server:
        host, port = server.server_address[:2]
        print(f"model      {parsed.checkpoint}, {described}")
        print(f"page       http://{host}:{port}/   (Ctrl-C ends it)")
        print(f"API        http://{host}:{port}/v1   (OpenAI's: chat/completions, completions, models)", flush=True)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        writer = Writer(writing, talk, context=context, seed=parsed.seed)
        write_all(served, writer, lambda line: print(f"{time.strftime('%H:%M:%S')}   {line}", flush=True))
    return 0
