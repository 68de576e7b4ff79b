"""The flags of the commands about audited runs: verify, diff, certificate."""

from handgrad.commands.parser import Parser
from handgrad.config import AT_LEAST_1, NOT_NEGATIVE


def verify(parser: Parser) -> None:
    parser.add_argument("run", metavar="RUN", help="a run folder, or a certificate with checkpoints/ beside it")
    parser.add_argument("--data", default="", metavar="DIR", help="the run's shards (default: where the run had them)")
    weights = "the weights that it started from (default: where the run had them)"
    parser.add_argument("--init-from", default="", metavar="DIR", help=weights)
    parser.number("--from", "step to begin after, 0 or one with a checkpoint (default: the first)", rule=NOT_NEGATIVE)
    parser.number("--to", "last step (default: that of the last link or checkpoint)", rule=AT_LEAST_1)
    parser.number("--segments", "instead: N of those between two checkpoints, drawn by --seed", rule=AT_LEAST_1)
    parser.number("--seed", "of the draw", rule=NOT_NEGATIVE, default=0)
    key = "SHA-256 of the key that must have signed the certificate (default: any, or none)"
    parser.add_argument("--signed-by", default="", metavar="SHA256", help=key)
    changes = "replay although the device or versions are others (named)"
    parser.add_argument("--allow-changes", action="store_true", help=changes)
    parser.number("--ranks", "replay by N processes, a GPU each where there are any (default: 1)", rule=AT_LEAST_1)
    parser.add_argument(
        "--scratch", default="", metavar="DIR", help="an empty folder for the replay (default: a temporary one)"
    )


def diff(parser: Parser) -> None:
    parser.add_argument("run", metavar="RUN", help="a run folder")
    parser.add_argument("other", metavar="RUN", help="another; exit code 0 if nothing differs, 1 otherwise")
    parser.number("--tensors", "differing tensors to list (default: 12; 0: all)", rule=NOT_NEGATIVE, default=12)


def certificate(parser: Parser) -> None:
    parser.add_argument("run", metavar="RUN", help="a run folder with audit.jsonl")
    parser.add_argument(
        "--out", default="", metavar="FILE", help="the certificate, a page beside it (default: RUN/certificate.json)"
    )
    key = "sign it by this Ed25519 key (PEM, without a password); needs the package cryptography"
    parser.add_argument("--key", default="", metavar="FILE", help=key)
