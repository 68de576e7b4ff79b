"""Forgeries of one small audited run, each a row: its edits, the hashes that were redone, and the words that name it."""

import dataclasses
import hashlib
import json
import re
import shutil
from pathlib import Path

import pytest

from handgrad.cli import main
from handgrad.data.prepare import PrepareOptions, prepare
from handgrad.errors import DataError
from handgrad.run.open import train
from handgrad.storage import checkpoint
from handgrad.storage.manifest import MANIFEST
from handgrad.storage.run_files import AUDIT_FILE, METRICS_FILE
from handgrad.tools.certificate import certificate_text, signed
from tests.conftest import write_text
from tests.forging import (
    Edit,
    agreeing,
    bit,
    both,
    certificate,
    chain,
    field,
    folder_of,
    lines_of,
    make_older,
    noise,
    other_file,
    other_tokenizer,
    record,
    redo,
    saved,
    second_line,
    text,
    without,
)
from tests.test_audit import audited, verify

SAVES = 2, 4, 6  # the steps with a checkpoint
CERTIFICATE, SIGNED = "certificate.json", "signed.json"


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a tokenizer of its own, a certificate, the same one signed, and two keys."""
    serialization = pytest.importorskip("cryptography.hazmat.primitives.serialization")
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    folder = tmp_path_factory.mktemp("sound")
    run, pem = folder / "run", (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8)
    prepare(PrepareOptions(str(write_text(folder / "text.txt")), folder / "shards", tokenizer="bpe:300", workers=1))
    train(audited(folder / "shards", run, steps=6, save_every=2, async_save=False))
    for name in ("key", "other"):
        key = Ed25519PrivateKey.generate()
        (run / f"{name}.pem").write_bytes(key.private_bytes(*pem, serialization.NoEncryption()))
        (run / f"{name}.sha256").write_text(hashlib.sha256(key.public_key().public_bytes_raw()).hexdigest())
    assert main(["certificate", str(run)]) == 0
    assert main(["certificate", str(run), "--key", str(run / "key.pem"), "--out", str(run / SIGNED)]) == 0
    return run


@pytest.fixture
def run(sound: Path, tmp_path: Path) -> Path:
    return shutil.copytree(sound, tmp_path / "run")


@dataclasses.dataclass(frozen=True)
class Forgery:
    name: str
    named: str
    edit: Edit
    code: int
    flags: tuple[str, ...]
    of: str  # a certificate in the run's folder; "": the run itself is verified


def row(name: str, named: str, *edits: Edit, code: int = 65, flags: str = "", of: str = "") -> Forgery:
    return Forgery(name, named, both(*edits), code, tuple(flags.split()), of)


def replayed(name: str, named: str, *edits: Edit, flags: str = "--to 4") -> Forgery:
    """A forgery that nothing but the replay names."""
    return row(name, named, *edits, code=77, flags=flags)


def certified(name: str, named: str, *edits: Edit, flags: str = "", of: str = CERTIFICATE) -> Forgery:
    return row(name, named, *edits, flags=flags, of=of)


def last(name: str, named: str, *edits: Edit) -> Forgery:
    """The last checkpoint is another, and every hash is redone."""
    return replayed(name, named, *edits, REDONE, flags="--from 4")


def remove(name: str) -> Edit:
    return lambda run: (run / name).unlink()


def sign_anew(key: str) -> Edit:
    """Another certificate, signed by another key, or by none."""

    def forge(run: Path) -> None:
        content = json.loads((run / SIGNED).read_text())
        del content["signature"]
        content["evaluation"] = []
        (run / SIGNED).write_text(certificate_text(signed(content, run / key) if key else content))

    return forge


def other_tokenizer_everywhere(run: Path) -> None:
    other_tokenizer(*SAVES)(run)
    digest = json.loads((folder_of(run, 6) / MANIFEST).read_text())["tokenizer"]["sha256"]
    agreeing(SAVES, "identity", "tokenizer", to=digest)(run)
    field("begin", 0, "files", "tokenizer.json", to=digest)(run)


REDONE = chain(lambda lines: None, again=True)  # of a chain as it stands: checkpoints get lines that fit them
UNSEALED = without("checkpoint", 6)
REPLAYS = "--to 2"  # before the first step of which the weights' origin is compared
ZEROS = "0" * 64

SAVED = {  # in the last checkpoint: facts that decide what the model says
    "heads": ("config.num_heads 4, the chain 2", saved(6, "config", "num_heads", to=4)),
    "tokenizer": ("files.tokenizer.json", other_tokenizer(6)),
    "tokenizer record": ("tokenizer.sha256", saved(6, "tokenizer", "sha256", to=ZEROS)),
    "data": (f"identity.data '{ZEROS}'", saved(6, "identity", "data", to=ZEROS)),
    "identity": ("identity.data None", saved(6, "identity", to={})),
    "versions": ("versions.torch '9.9'", saved(6, "versions", "torch", to="9.9")),
    "sources": (f"versions.sources '{ZEROS}'", saved(6, "versions", "sources", to=ZEROS)),
    "chat": ("chat True, the chain False", saved(6, "chat", to=True)),
    "origin": ("init.from 'gpt2'", saved(6, "imported", to={"from": "gpt2"})),
}
SKIPS = saved(6, "skips_in_a_row", to=3)

CHECKPOINTS = [
    *(row(f"{name}, its line kept", named, edit) for name, (named, edit) in SAVED.items()),
    *(row(f"{name}, its line dropped", named, edit, UNSEALED) for name, (named, edit) in SAVED.items()),
    *(row(f"{name}, all hashes redone", named, edit, REDONE) for name, (named, edit) in SAVED.items()),
    row("skips, its line kept", "it is not the checkpoint that was saved at step 6", SKIPS),
    row("link, its line dropped", "the chain has no line for it", saved(6, "audit", to=None), UNSEALED),
    row("skips, its line dropped", "the chain has no line for it", SKIPS, UNSEALED),
    last("skips, all hashes redone", "skips_in_a_row in the manifest", SKIPS),
]
WEIGHTS = [
    certified("file", "the file is damaged", other_file(6), flags="--segments 1"),
    certified("file, signed", "the file is damaged", other_file(6), flags="--segments 1", of=SIGNED),
    certified("no chain", "it is not the checkpoint", noise(6), remove(AUDIT_FILE), flags="--segments 1"),
    certified("a chain", "it is not the checkpoint", noise(6), flags="--segments 1"),
    certified("a chain without its line", "it lacks the line of checkpoint 6", noise(6), UNSEALED),
    certified("a chain redone", "it lacks the line of checkpoint 6", noise(6), REDONE),
    certified("a chain redone, signed", "it lacks the line of checkpoint 6", noise(6), REDONE, of=SIGNED),
    certified(
        *("no line", "the chain has no line for it", noise(6), remove(AUDIT_FILE)),
        certificate(CERTIFICATE, lambda content: content["links"].pop()),
    ),
]
LINKS = [
    row("a loss", "step 3, was edited", field("step", 3, "loss", to="0x1p+1", again=False)),
    row("a setting", "begin 0, was edited", field("begin", 0, "config", "num_heads", to=4, again=False)),
    row("a line less", "step 4, does not follow step 2", without("step", 3)),
    row("the last lines less", "which is not in the chain", without("step", 5, 6), UNSEALED),
    row("the first line less", "has no begin before it", without("begin", 0)),
    row("another order", "step 2, does not follow begin 0", chain(lambda lines: lines.insert(1, lines.pop(2)))),
    row("a line twice", "step 1, does not follow step 1", chain(lambda lines: lines.insert(2, lines[1]))),
    row("a key twice", "has the key 'loss' twice", text(AUDIT_FILE, '"loss": ', '"loss": "0x1p+1", "loss": ')),
    row("a setting twice", "'num_heads' twice", text(AUDIT_FILE, '"num_heads": ', '"num_heads": 4, "num_heads": ')),
    row("a checkpoint's line less", "does not follow the line of a checkpoint", without("checkpoint", 2)),
    row("no checkpoint's line", "the chain has no line for it", without("checkpoint", *SAVES)),
    row("a checkpoint's line", "its seal says", field("checkpoint", 6, "manifest", to=ZEROS, again=False)),
    row("a checkpoint's link", "belongs to link 0000", field("checkpoint", 6, "link", to=ZEROS, again=False)),
    row("a checkpoint's second line", "it is not the checkpoint that was saved at step 6", second_line),
    row("no seals", "its seal says None", chain(lambda lines: [one.pop("seal", "") for one in lines])),
]
METRICS = [row(name, f"{name} of step 3 is 2, the", record(3, name, 2.0)) for name in ("loss", "norm", "learning_rate")]
RELINKED = [
    row("a loss", "metrics.jsonl: loss of step 3 is", field("step", 3, "loss", to="0x1p+1")),
    replayed("a loss of both", "gave another loss", field("step", 3, "loss", to="0x1p+1"), record(3, "loss", 2.0)),
    replayed("a norm", "gradients of equal", field("step", 3, "norm", to="0x1p+1"), remove(METRICS_FILE)),
    replayed("a rate", "learning rate is", field("step", 3, "learning_rate", to="0x1p+1"), remove(METRICS_FILE)),
    replayed("a verdict", "the verdict on equal gradients", field("step", 3, "skipped", to=True)),
    replayed("samples", "the samples of the step are others", field("step", 3, "samples", to=[0, 8])),
    replayed("a digest", "left other bits in weights", field("step", 3, "state", "weights", to="0" * 32)),
    replayed("a moment's digest", "left other bits in m", field("step", 3, "state", "m", to="0" * 32)),
    replayed("the first digest", "the link; weights differ", field("begin", 0, "state", "weights", to="0" * 32)),
    replayed("a buffer more", "the link; k differ", field("begin", 0, "state", "k", to="0" * 32)),
    row("a begin's field", "expected no field 'note' in a begin", field("begin", 0, "note", to="x")),
    row("a step's field", "expected no field 'note' in a step", field("step", 3, "note", to="x")),
    row("a checkpoint's field", "expected no field 'note' in a checkpoint", field("checkpoint", 4, "note", to="x")),
    row("a later format", "expected format 1 or 2, found 3", field("begin", 0, "format", to=3)),
    row("an unknown setting", "has 'luck' among the settings", agreeing(SAVES, "config", "luck", to=7)),
    row("a free setting", "has 'data' among the settings", agreeing(SAVES, "config", "data", to="elsewhere")),
    replayed("the seed", "the initial state is not the state", agreeing(SAVES, "config", "seed", to=7)),
    replayed("the heads", "step 1: the forward pass", agreeing(SAVES, "config", "num_heads", to=4)),
    row("the data", "was trained on data 0000", agreeing(SAVES, "identity", "data", to=ZEROS)),
    row("a licence", "was trained on licence free", agreeing(SAVES, "identity", "licence", to="free")),
    row("the tokenizer", "was trained on tokenizer", other_tokenizer_everywhere),
    row("a version", "torch: 9.9 -> ", agreeing(SAVES, "versions", "torch", to="9.9"), code=78),
    row("the sources", f"sources: {ZEROS} -> ", agreeing(SAVES, "versions", "sources", to=ZEROS), code=78),
    row("a version more", "care: great -> None", agreeing(SAVES, "versions", "care", to="great"), code=78),
    row("the chat flag", "was trained on chat True", agreeing(SAVES, "chat", to=True)),
    row(
        "an origin",
        "whose from is gpt2, the seed has none",
        agreeing(SAVES, "init", to={"from": "gpt2", "sha256": {}}),
        flags=REPLAYS,
    ),
    row(
        "an origin's hash",
        "whose w is 0, the seed has none",
        agreeing(SAVES, "init", to={"sha256": {"w": "0"}}),
        flags=REPLAYS,
    ),
    last("format 1", "chat in the manifest", make_older, saved(6, "chat", to=True)),
]
FILES = [
    last("vocabulary", "vocab_size in the manifest", saved(6, "vocab_size", to=7)),
    row("end of texts", "with end_of_text 7", saved(6, "tokenizer", "end_of_text", to=7), REDONE),
    last("window", "loss_window in the manifest", saved(6, "loss_window", to=[])),
    last("loss scale", "loss_scale in the manifest", saved(6, "loss_scale", to=[2.0, 0.0])),
    last("field", "note in the manifest", saved(6, "note", to="x")),
    row("field twice", "'step' twice", text(f"checkpoints/step_00000006/{MANIFEST}", '"step": 6', '"step": 2, "step": 6')),
    row("name", "give the folder its name back", lambda run: folder_of(run, 4).rename(folder_of(run, 5))),
    last("bit", "1 of 1024 elements of wpe differ", bit(6, "wpe")),
    last("moment's bit", "1 of 1024 elements of v.wpe differ", bit(6, "v.wpe")),
    last("weights", "elements of wte differ", noise(6)),
]
CERTIFICATES = [
    certified("link", "step 1, was edited", certificate(CERTIFICATE, lambda one: one["links"][1].update(loss="0x1p+1"))),
    certified("line", "its seal says", certificate(CERTIFICATE, lambda one: one["links"][-1].update(manifest="0"))),
    certified("key twice", "'format' twice", text(CERTIFICATE, '"format": 1', '"format": 1, "format": 1')),
    certified("field", "expected no field 'author'", certificate(CERTIFICATE, lambda one: one.update(author="x"))),
    certified("format", "expected format 1, found 9", certificate(CERTIFICATE, lambda one: one.update(format=9))),
    certified("another chain", "it lacks the line of step 4", field("step", 3, "skipped", to=True)),
    certified("loss", "does not match its content", certificate(SIGNED, lambda one: one.update(evaluation=[])), of=SIGNED),
    certified("line less", "does not match its content", certificate(SIGNED, lambda one: one["links"].pop()), of=SIGNED),
    certified("another key", "expected the key", sign_anew("other.pem"), flags="--signed-by KEY", of=SIGNED),
    certified("no key", "is signed by no key", sign_anew(""), flags="--signed-by KEY", of=SIGNED),
]
TABLE = [
    *(pytest.param(one, id=f"chain: {one.name}") for one in LINKS),
    *(pytest.param(one, id=f"chain redone: {one.name}") for one in RELINKED),
    *(pytest.param(one, id=f"metrics: {one.name}") for one in METRICS),
    *(pytest.param(one, id=f"checkpoint: {one.name}", marks=pytest.mark.fault(48)) for one in CHECKPOINTS),
    *(pytest.param(one, id=f"checkpoint redone: {one.name}") for one in FILES),
    *(pytest.param(one, id=f"certificate: {one.name}") for one in CERTIFICATES),
    *(pytest.param(one, id=f"certificate's weights: {one.name}", marks=pytest.mark.fault(49)) for one in WEIGHTS),
]


def with_key(run: Path, flags: tuple[str, ...]) -> list[str]:
    return [(run / "key.sha256").read_text() if flag == "KEY" else flag for flag in flags]


@pytest.mark.parametrize("forgery", TABLE)
def test_a_forgery_is_named(forgery: Forgery, run: Path, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    """With exit code 65 or 78 before any replay; `test_the_untouched_record_holds` is the control."""
    forgery.edit(run)
    if forgery.code != 77 and forgery.flags != tuple(REPLAYS.split()):
        monkeypatch.setattr("handgrad.commands.verify.replay", lambda *given, **named: (0, 0))
    capsys.readouterr()
    assert verify(run / forgery.of, *with_key(run, forgery.flags)) == forgery.code
    assert forgery.named in capsys.readouterr().err


@pytest.mark.parametrize("of", ["", CERTIFICATE, SIGNED])
def test_the_untouched_record_holds(of: str, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = with_key(run, ("--signed-by", "KEY") if of == SIGNED else ())
    assert verify(run / of, *flags) == 0
    assert "6 links and 3 checkpoints equal, bit by bit, of steps 0 to 6 (" in capsys.readouterr().out
    assert verify(run / of, *flags, "--segments", 1) == 0
    out = capsys.readouterr().out
    assert "2 links and 1 checkpoint equal" in out and "by hash alone (" in out
    before = lines_of(run)
    redo(run, before)
    assert lines_of(run) == before  # the forger's tools do no harm themselves
    if of:
        (run / AUDIT_FILE).unlink()
        assert verify(run / of, *flags, "--to", 4) == 0


@pytest.mark.fault(48)
@pytest.mark.parametrize("line", ["kept", "dropped"])
@pytest.mark.parametrize("name", SAVED)
def test_every_reader_names_a_forged_checkpoint(name: str, line: str, run: Path, capsys) -> None:
    named, edit = SAVED[name]
    both(edit, *([UNSEALED] if line == "dropped" else []))(run)
    with pytest.raises(DataError, match=re.escape(named)):
        checkpoint.open_checkpoint(folder_of(run, 6))
    sample = ["sample", str(run), "--max-tokens", "1", "--device", "cpu"]
    assert main([*sample, "--strict"]) == 65 and named in capsys.readouterr().err
    assert main(sample) == 0
    assert f"passed over step_00000006: {folder_of(run, 6)}: its manifest has {named}" in capsys.readouterr().err
