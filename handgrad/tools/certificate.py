"""A certificate of a run: one small file that names model, data and versions, with the hashes to check them."""

import hashlib
import json
from pathlib import Path
from typing import Any

from handgrad.errors import DataError, UsageError, storage_errors
from handgrad.joins.audit.chain import BEGIN, CHECKPOINT, STEP, Line, canonical, checked_line, faults
from handgrad.parsing import as_record, parse_json, readable_records

KIND, FORMAT = "handgrad certificate", 1
REMEDY = "`pip install cryptography`, or leave --key out"


def make_certificate(lines: list[Line], evaluation: list[Line]) -> Line:
    """The content: every `begin`, the first and last link, each checkpoint with its link and its manifest's hash."""
    sealed = {line["link"] for line in lines if line["kind"] == CHECKPOINT}
    steps = [line for line in lines if line["kind"] == STEP]
    ends = {line["link"] for line in (*steps[:1], *steps[-1:])}
    links = [line for line in lines if line["kind"] in (BEGIN, CHECKPOINT) or line["link"] in sealed | ends]
    return {"kind": KIND, "format": FORMAT, "evaluation": evaluation, "links": links}


def signed(content: Line, key_file: Path) -> Line:
    """The content plus its Ed25519 signature. `key_file`: private key in PEM. Raises `DataError` for another key."""
    serialization, ed25519 = signing()
    with storage_errors(f"reading {key_file}"):
        pem = key_file.read_bytes()
    try:
        key = serialization.load_pem_private_key(pem, password=None)
    except (ValueError, TypeError) as error:
        raise DataError(f"{key_file} is not a private key in PEM without a password: {error}") from None
    if not isinstance(key, ed25519.Ed25519PrivateKey):
        raise DataError(f"{key_file} is no Ed25519 key; make one: openssl genpkey -algorithm ed25519 -out key.pem")
    public = key.public_key().public_bytes(serialization.Encoding.Raw, serialization.PublicFormat.Raw)
    return {**content, "signature": {"public_key": public.hex(), "ed25519": key.sign(canonical(content)).hex()}}


def signing() -> Any:
    """The modules of `cryptography` for keys and Ed25519. Raises `UsageError` without the package."""
    try:
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError:
        raise UsageError(f"signatures need the package cryptography, which is not installed: {REMEDY}") from None
    return serialization, ed25519


def open_certificate(path: Path) -> Line:
    """Opens a certificate; checks its signature, if it has one, and the hash of each link."""
    with storage_errors(f"reading {path}"):
        content = path.read_bytes()
    try:
        stored = parse_json(content, unique=True)
    except ValueError as error:
        raise DataError(f"{path} is neither a run folder nor a certificate: {error}") from None
    if not isinstance(stored, dict) or stored.get("kind") != KIND or not isinstance(stored.get("links"), list):
        raise DataError(f"{path} is neither a run folder nor a certificate; expected a file of `handgrad certificate`")
    if stored.get("format") != FORMAT:
        raise DataError(f"{path}: expected format {FORMAT}, found {stored.get('format')!r:.40}; a newer handgrad reads it")
    if further := sorted(stored.keys() - {"kind", "format", "evaluation", "links", "signature"}):
        raise DataError(f"{path}: expected no field {further[0]!r:.40}; it was edited")
    check_signature(stored, path)
    for number, line in enumerate(stored["links"], start=1):
        checked_line(as_record(line, f"link {number} of {path}"))
    for fault in faults(stored["links"], whole=False):
        raise DataError(f"{path}: {fault}")
    return stored


def check_signature(certificate: Line, path: Path) -> None:
    """Raises `DataError` unless the key in the certificate made its signature. Nothing here says whose key it is."""
    if (signature := certificate.get("signature")) is None:
        return
    _, ed25519 = signing()
    from cryptography.exceptions import InvalidSignature

    content = {key: value for key, value in certificate.items() if key != "signature"}
    try:
        key = ed25519.Ed25519PublicKey.from_public_bytes(bytes.fromhex(signature["public_key"]))
        key.verify(bytes.fromhex(signature["ed25519"]), canonical(content))
    except (InvalidSignature, ValueError, KeyError, TypeError):
        raise DataError(f"{path}: its signature does not match its content; it was edited") from None


def fingerprint(certificate: Line) -> str:
    """The SHA-256 of the public key that signed the certificate, or "" if there is no signature."""
    signature = certificate.get("signature")
    return hashlib.sha256(bytes.fromhex(signature["public_key"])).hexdigest() if signature else ""


def certificate_text(certificate: Line) -> str:
    return json.dumps(certificate, indent=1) + "\n"


def evaluations(metrics: Path) -> list[Line]:
    """The last validation, and the last result on each task, in a run's metrics.jsonl."""
    values: dict[str, Line] = {}
    for read in readable_records(metrics) if metrics.is_file() else ():
        if (entry := read.fields).get("kind") == "validation":
            step, _ = read.count("step"), read.number("loss")
            values["validation loss"] = {"step": step, "name": "validation loss", "value": entry["loss"]}
        elif entry.get("kind") == "evaluation" and isinstance(entry.get("metrics"), dict):
            for metric, pair in entry["metrics"].items():
                if not isinstance(pair, list) or not pair:
                    raise read.wrong(metric, "a value and its standard error", pair)
                name = f"{read.text('task')} {metric}"
                values[name] = {"step": entry.get("step", 0), "name": name, "value": pair[0]}
    return list(values.values())
