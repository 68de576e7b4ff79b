"""The flags of the commands about audited runs: verify, diff, certificate."""

from handgrad.commands.parser import Parser
from handgrad.config import AT_LEAST_1, NOT_NEGATIVE


def verify(parser: Parser) -> None:
    parser.add_argument("run", metavar="RUN", help="a run folder, or a certificate with checkpoints/ beside it")
    parser.text("--data", "DIR", "the run's shards (default: where the run had them)")
    parser.text("--init-from", "DIR", "the weights that it started from (default: where the run had them)")
    parser.number("--from", "step to begin after, 0 or one with a checkpoint (default: the first)", rule=NOT_NEGATIVE)
    parser.number("--to", "last step (default: that of the last link or checkpoint)", rule=AT_LEAST_1)
    parser.number("--segments", "instead: N of those between two checkpoints, drawn by --seed", rule=AT_LEAST_1)
    parser.number("--seed", "of the draw", rule=NOT_NEGATIVE, default=0)
    parser.text("--signed-by", "SHA256", "SHA-256 of the key that must have signed the certificate (default: any, or none)")
    parser.switch("--allow-changes", "replay although the device or versions are others (named)")
    parser.number("--ranks", "replay by N processes, a GPU each where there are any (default: 1)", rule=AT_LEAST_1)
    parser.text("--scratch", "DIR", "an empty folder for the replay (default: a temporary one)")


def diff(parser: Parser) -> None:
    parser.add_argument("run", metavar="RUN", help="a run folder")
    parser.add_argument("other", metavar="RUN", help="another; exit code 0 if nothing differs, 1 otherwise")
    parser.number("--tensors", "differing tensors to list (default: 12; 0: all)", rule=NOT_NEGATIVE, default=12)


def certificate(parser: Parser) -> None:
    parser.add_argument("run", metavar="RUN", help="a run folder with audit.jsonl")
    parser.text("--out", "FILE", "the certificate, a page beside it (default: RUN/certificate.json)")
    parser.text("--key", "FILE", "sign it by this Ed25519 key (PEM, without a password); needs the package cryptography")
