"""The flags of the commands that load a model and let it write: sample, chat, serve."""

from handgrad.commands.parser import Parser
from handgrad.settings.config import AT_LEAST_1, AUTO, BACKENDS, DEVICES, PRECISIONS, between

WATCH_PORT, SERVE_PORT = 8360, 8361
FP8_NOTE = "; fp8: as a run in fp8 validates"


def add_model_arguments(parser: Parser, *, with_fp8: bool = False) -> None:
    """The model and its computation; `with_fp8`: fp8 is a precision of it, for a run's checkpoint."""
    model = "run (its newest checkpoint), RUN/best, checkpoint, transformers folder, Hub name, .bin of llm.c"
    parser.add_argument("checkpoint", metavar="MODEL", help=model)
    add_strict(parser)
    parser.add_argument("--device", default="auto", choices=DEVICES, help="(default: auto)")
    precisions = [AUTO, *(precision for precision in PRECISIONS if with_fp8 or precision != "fp8")]
    chosen = "of weights and GEMMs (default: auto: bf16 on a GPU that has it, else fp16; fp32 on a CPU)"
    parser.add_argument("--precision", default=AUTO, choices=precisions, help=chosen + FP8_NOTE * with_fp8)
    parser.add_argument("--backend", default="auto", choices=BACKENDS, help="(default: auto: kernels on a CUDA GPU)")


def add_fp8_weights(parser: Parser) -> None:
    rounds = "round the weights of GEMMs to fp8 (e4m3, a scale per row); one text on a GPU reads 8 bits (default: no)"
    parser.switch("--fp8-weights", rounds)


def add_strict(parser: Parser) -> None:
    parser.switch("--strict", "refuse a run whose newest checkpoint is damaged, instead of taking the one before")


def add_sampling_arguments(parser: Parser, text: str) -> None:
    """The rules for choosing a token, and the end of a `text`, as the help calls it."""
    parser.number("--temperature", "divides the logits; 0 is greedy (default: 0.8)", kind=float, default=0.8)
    parser.number("--top-k", "only the N likeliest tokens (0: all)", default=0)
    parser.number("--top-p", "only the likeliest tokens of total probability X (1: all)", kind=float, default=1.0)
    parser.number("--min-p", "only tokens X times as likely as the likeliest (0: all)", kind=float, default=0.0)
    parser.number("--repetition-penalty", "divides logits of tokens in the text so far (1: none)", kind=float, default=1.0)
    ends = f"ends {text} before this text; may be repeated"
    parser.add_argument("--stop", action="append", default=[], metavar="TEXT", help=ends)


def sample(parser: Parser) -> None:
    add_model_arguments(parser)
    add_fp8_weights(parser)
    parser.takes_one = "give a text as --prompt TEXT"
    parser.elsewhere = dict.fromkeys(("system", "chat"), "`handgrad chat MODEL --system TEXT` talks")
    parser.text("--prompt", "TEXT", "the beginning (default: a new document)", default=None)
    parser.text("--prompt-file", "FILE", "a file with the beginning; - reads standard input", default=None)
    parser.number("--samples", "number of samples (default: 1)", rule=AT_LEAST_1)
    parser.number("--max-tokens", "longest sample (default: 200)", default=200)
    add_sampling_arguments(parser, "a sample")
    parser.number("--seed", "of the first sample or prompt; each further one counts up", default=0)
    prompts = 'prompts, one {"prompt": TEXT} a line; may have "max_tokens"'
    parser.add_argument("--in", dest="input", metavar="FILE", help=prompts)
    parser.text("--out", "FILE", "for --in: the same lines with text, tokens and the reason of the end", default=None)
    parser.number("--batch", "texts at once, of samples or prompts (default: 8)", rule=AT_LEAST_1, default=8)


def chat(parser: Parser) -> None:
    add_model_arguments(parser)
    add_fp8_weights(parser)
    takes_messages(parser, "type the message at the prompt, or pipe it: echo TEXT | handgrad chat MODEL")
    parser.text("--system", "TEXT", "the system message, before the conversation")
    parser.number("--max-tokens", "longest answer (default: 512)", default=512)
    add_sampling_arguments(parser, "an answer")
    parser.number("--seed", "of the first answer; each further one counts up", default=0)
    reads = "most tokens of the conversation that the model reads (default: its context, or what fits into memory)"
    parser.number("--context", reads, rule=between(2, 1 << 24))


def serve(parser: Parser) -> None:
    chat(parser)
    takes_messages(parser, "its page and its API take the messages; for one: echo TEXT | handgrad chat MODEL")
    add_address(parser, SERVE_PORT)


def takes_messages(parser: Parser, way: str) -> None:
    """A command that answers messages, and takes none in its arguments: `way` is theirs."""
    parser.takes_one = way
    parser.elsewhere = dict.fromkeys(
        ("prompt", "prompt_file", "in"), f"{way}; `handgrad sample MODEL --prompt TEXT` continues a text"
    )


def add_address(parser: Parser, port: int) -> None:
    """The place where a page is."""
    parser.number("--port", f"of the page (default: {port}, or a free one)", rule=between(1, 65535))
    parser.text("--host", "ADDRESS", "address to listen on; 0.0.0.0: all of the network", default="127.0.0.1")
