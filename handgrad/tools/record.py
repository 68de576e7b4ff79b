"""A run's record, as a verifier opens it: chain, checkpoints, configuration. Replays nothing."""

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from handgrad.data.mixture import MIXTURE, as_begun
from handgrad.data.tokenizer_loading import read_tokenizer
from handgrad.errors import DataError, UsageError, storage_errors
from handgrad.evaluation.load import CONTEXT
from handgrad.evaluation.rewards import trusted
from handgrad.files import file_sha256
from handgrad.interop.sources import open_weights
from handgrad.joins.audit.chain import BEGIN, FORMAT, NUMBERS, STEP, Line, canonical, check_chain, links, read_chain
from handgrad.machine import devices
from handgrad.machine.backend import plain_backend
from handgrad.parsing import readable_records
from handgrad.run.audit import text_facts
from handgrad.run.checkpointing import SOURCES, versions_of
from handgrad.run.packing import DOCUMENTS, REWARD, data_of, identity_of
from handgrad.settings.config import FIELDS, RunConfig, convert, read_toml
from handgrad.storage import checkpoint
from handgrad.storage.manifest import MANIFEST, contradiction, read_manifest
from handgrad.storage.run_files import AUDIT_FILE, CHECKPOINTS, CONFIG_FILE, METRICS_FILE, named_run, place_of
from handgrad.tools.certificate import fingerprint, open_certificate


@dataclass(frozen=True)
class RunRecord:
    """The chain of a run: all of it, or the part in a certificate."""

    path: Path  # as the user named it
    lines: list[Line]
    folder: Path  # holds checkpoints/
    whole: bool = True
    signer: str | None = None  # of a certificate: the SHA-256 of the key that signed it, or ""

    @property
    def steps(self) -> dict[int, Line]:
        """The links of steps."""
        return {line["step"]: line for line in self.lines if line["kind"] == STEP}

    @property
    def begins(self) -> list[Line]:
        return [line for line in self.lines if line["kind"] == BEGIN]

    @property
    def last_step(self) -> int:
        """The last step that has a link or a checkpoint at hand; a checkpoint may have no link."""
        return max(*self.checkpoints, *(line["step"] for line in links(self.lines)), 0)

    def begun(self, step: int) -> Line:
        """The `begin` in force for the step after `step`. Raises `DataError` for a step before the chain."""
        begins = [line for line in self.begins if line["step"] <= step]
        if not begins:
            first = self.begins[0]["step"]
            raise DataError(f"{self.path}: the chain begins at step {first}; nothing before can be verified")
        return begins[-1]

    def state_at(self, step: int) -> Line | None:
        """The newest link with the digests of the state after `step`."""
        states = [line for line in links(self.lines) if line["step"] == step]
        return states[-1] if states else None

    @property
    def checkpoints(self) -> dict[int, Path]:
        """The checkpoints at hand, by step."""
        return {checkpoint.step_of(folder): folder for folder in reversed(checkpoint.folders(self.folder / CHECKPOINTS))}

    def compared(self, first: int, last: int) -> tuple[int, int]:
        """(links, checkpoints): how many a replay of the steps after `first`, up to `last`, compares."""
        links, checkpoints = (sum(first < step <= last for step in steps) for steps in (self.steps, self.checkpoints))
        return links, checkpoints

    def hold(self) -> None:
        """Compares every checkpoint at hand with its hashes, and its tokenizer with its manifest. Raises `DataError`."""
        for step, folder in self.checkpoints.items():
            if step >= self.begins[0]["step"]:
                read_tokenizer(folder, checkpoint.open_checkpoint(folder).manifest.get("tokenizer"))

    @property
    def starts(self) -> list[int]:
        """The steps from which a replay can begin."""
        at_start = [0] if self.begins and self.begins[0]["step"] == 0 else []
        first = self.begins[0]["step"]
        return sorted({*at_start, *(step for step in self.checkpoints if first <= step < self.last_step)})


def open_record(path: Path, signed_by: str = "") -> RunRecord:
    """Opens the record of a run folder, or of a certificate and the checkpoints next to it. `signed_by`: SHA-256 of the key
    that must have signed the certificate. Raises `DataError` for an edited chain, for a checkpoint that the chain does not
    name, and for a certificate without that signature."""
    if path.is_file():
        return open_certified(path, signed_by)
    if signed_by:
        raise UsageError(f"expected a certificate beside --signed-by, found {path}; give RUN/certificate.json")
    if not any((path / name).exists() for name in (AUDIT_FILE, CONFIG_FILE)) and path.exists():
        raise DataError(f"expected a run folder, found {path}; {named_run(path)}")
    lines = read_chain(path / AUDIT_FILE)
    check_chain(lines, path / AUDIT_FILE)
    return checked(RunRecord(path, lines, path))


def open_certified(path: Path, signed_by: str) -> RunRecord:
    """Uses the whole chain if it lies next to the certificate, else the certificate's links."""
    certificate, beside = open_certificate(path), path.parent / AUDIT_FILE
    signer = fingerprint(certificate)
    if signed_by and signed_by.lower() != signer:
        raise DataError(f"{path} is signed by {f'the key {signer}' if signer else 'no key'}, expected the key {signed_by}")
    lines, whole = list[Line](certificate["links"]), beside.exists()
    if whole:
        chain = read_chain(beside)
        check_chain(chain, beside)
        known = {canonical(line) for line in chain}
        if missing := [line for line in lines if canonical(line) not in known]:
            where = f"{missing[0]['kind']} {missing[0]['step']}"
            raise DataError(f"{beside} is not the chain of {path}: it lacks the line of {where}")
        lines = chain
    return checked(RunRecord(path, lines, path.parent, whole, signer))


def checked(record: RunRecord) -> RunRecord:
    """Checks every checkpoint at hand and metrics.jsonl against the chain, and returns the record."""
    if not record.begins:
        raise DataError(f"{record.path} has no link; train with --audit-every 1 to have a chain")
    begin = record.begins[0]
    known = {begin["previous"], *(line["link"] for line in links(record.lines))}
    for step, folder in record.checkpoints.items():
        if step < begin["step"]:
            continue  # from before the chain
        manifest = read_manifest(folder)
        named = manifest.get("audit")
        if record.whole and isinstance(named, dict) and named.get("link") not in known:
            last = links(record.lines)[-1]["step"]
            raise DataError(
                f"{folder} names link {str(named.get('link'))[:12]} of step {named.get('step')}, which is not in the chain"
                f" of {record.path}, up to step {last}: it is another run's checkpoint, or links were removed"
            )
        with storage_errors(f"reading {folder}"):
            digest = file_sha256(folder / MANIFEST)
        if fault := contradiction(record.lines, manifest, digest, sealed=True):
            raise DataError(f"{folder}: {fault}; restore it, or move it away")
    check_metrics(record)
    return record


def check_metrics(record: RunRecord) -> None:
    """Raises `DataError` for a step of metrics.jsonl whose loss, norm or rate differs from its link's."""
    path, steps = record.folder / METRICS_FILE, record.steps
    for told in readable_records(path) if path.is_file() else ():
        step = told.fields.get("step") if told.fields.get("kind") == STEP else None
        link = steps.get(step, {}) if isinstance(step, int) else {}
        for name in NUMBERS if link else ():
            then, now = float.fromhex(link[name]), told.number(name)
            if then.hex() != now.hex():
                raise DataError(f"{path}: {name} of step {step} is {now:.9g}, the chain has {then:.9g}; one was edited")


def config_of(record: RunRecord, step: int, elsewhere: dict[str, str]) -> RunConfig:
    """The configuration in force after `step`. Settings that do not change the numbers come from the run's folder, if it
    has them. `elsewhere`: paths of data and initial weights on this machine, if the run had others."""
    stored = record.folder / CONFIG_FILE
    told = read_toml(str(stored)) if stored.is_file() else {}
    free = {name: value for name, value in told.items() if name in FIELDS and FIELDS[name].metadata["free"]}
    begun = record.begun(step)["config"]
    if further := [name for name in begun if name not in FIELDS or FIELDS[name].metadata["free"]]:
        raise DataError(f"{record.path} has {further[0]!r:.40} among the settings that change the numbers; it was edited")
    settings: dict[str, Any] = {**free, **begun}
    _, manifest = checkpoint.peek(record.folder) or ("", {})
    for name in ("data", "init_from", "teacher"):
        if settings.get(name) and name not in elsewhere:
            needed = name == "data" and not settings.get("reward")  # prompts may be built in
            elsewhere = {**elsewhere, name: place_of(name, record.folder, settings, manifest, needed=needed)}
    if settings.get("reward") and "reward" not in elsewhere:
        trusted(settings["reward"])
    settings |= elsewhere
    config = RunConfig(**{name: convert(name, value) for name, value in settings.items()})
    return replace(config, data=as_begun(config.data, record.begun(step)["identity"]))


def machine_differences(begins: Iterable[Line], config: RunConfig) -> list[str]:
    """Lists how the device and the versions of this machine differ from the run's."""
    device = devices.resolve_device(config.device)
    now = versions_of(device, plain_backend(config.backend, device, config.precision))
    lines = list[str]()
    for begin in begins:
        then: dict[str, Any] = begin["versions"]
        for key in {**then, **now}:
            if key == SOURCES and key not in then:
                continue  # a chain of format 1
            line = f"{key}: {then.get(key)} -> {now.get(key)}"
            if then.get(key) != now.get(key) and line not in lines:
                lines.append(line)
    return lines


def check_data(record: RunRecord, begins: Iterable[Line], config: RunConfig) -> None:
    """Raises `DataError` unless the data at hand have the hashes that the run recorded."""
    dataset = data_of(config, config.init_from)
    identity = identity_of(config, dataset, open_weights(config.teacher) if config.teacher else None)
    for begin in begins:
        texts = text_facts(dataset) if begin["format"] == FORMAT else {}
        # Older chains lack documents; `config_of` takes the weights from the chain.
        stored = {DOCUMENTS: identity.get(DOCUMENTS), **begin["identity"], MIXTURE: identity.get(MIXTURE)}
        now, then = {**identity, **texts}, {**stored, **{name: begin.get(name) for name in texts}}
        for key in {**now, **then}:
            if then.get(key) != now.get(key):
                holder, remedy = config.data, "--data with the run's shards"
                if key == REWARD:
                    holder, remedy = config.reward, "--reward with the run's function"
                was, held = (re.sub(r"([0-9a-f]{40})[0-9a-f]{24}", r"\1", str(of.get(key))) for of in (then, now))
                raise DataError(f"{record.path} was trained on {key} {was}, {holder} holds {held}; give {remedy}")


def check_initial(record: RunRecord, origin: dict[str, Any] | None, init_from: str) -> None:
    """Raises `DataError` unless `origin`, of the initial weights at hand, has the hashes that the run recorded."""
    begin = record.begun(0)
    local = ("path", "source", "sha256", *((CONTEXT,) if begin["format"] != FORMAT else ()))
    then, now = (
        {**{name: value for name, value in init.items() if name not in local}, **init.get("sha256", {})}
        for init in (begin.get("init") or {}, origin or {})
    )
    if then != now:
        name = next(name for name in (*then, *now) if then.get(name) != now.get(name))
        was, actual = (str(facts.get(name, "none"))[:12] for facts in (then, now))
        raise DataError(
            f"{record.path} started from weights whose {name} is {was}, {init_from or 'the seed'} has {actual}; give"
            " --init-from with the run's"
        )
