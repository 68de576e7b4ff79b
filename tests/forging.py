"""Edits a record of an audited run as somebody would who wants it to say something else, and makes its hashes fit again."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from handgrad.joins.audit.chain import content_of, linked, read_chain
from handgrad.storage import checkpoint
from handgrad.storage.manifest import MANIFEST, OPTIMIZER_FILE, WEIGHTS_FILE, content_sha256
from handgrad.storage.run_files import AUDIT_FILE, METRICS_FILE
from handgrad.storage.tensor_files import Stored, open_tensors
from handgrad.tools.certificate import certificate_text

Line = dict[str, Any]


def lines_of(run: Path) -> list[Line]:
    return read_chain(run / AUDIT_FILE)


def write_lines(run: Path, lines: list[Line]) -> None:
    (run / AUDIT_FILE).write_text("".join(json.dumps(line) + "\n" for line in lines))


def folder_of(run: Path, step: int) -> Path:
    return checkpoint.folder_of(run / "checkpoints", step)


def edit_manifest(folder: Path, edit: Callable[[Line], object]) -> None:
    """With its own hash, and those of the files beside it, made right."""
    content = json.loads((folder / MANIFEST).read_text())
    del content["sha256"]
    edit(content)
    for name, entry in content["files"].items():
        found = (folder / name).read_bytes()
        entry |= {"bytes": len(found), "sha256": hashlib.sha256(found).hexdigest()}
    (folder / MANIFEST).write_text(json.dumps({"sha256": content_sha256(content), **content}, indent=1))


def redo(run: Path, lines: list[Line]) -> None:
    """Writes these lines as a chain whose hashes are all right, with them the links that the manifests name."""
    written, links, previous, seal = [], {}, lines[0]["previous"], ""
    for line in lines:
        if line["kind"] == "checkpoint":
            link, folder = links.get(line["link"], line["link"]), folder_of(run, line["step"])
            content = {name: value for name, value in line.items() if name not in ("previous", "seal")} | {"link": link}
            if folder.exists():
                edit_manifest(folder, lambda manifest, link=link: manifest.get("audit", {}).update(link=link))
                content["manifest"] = hashlib.sha256((folder / MANIFEST).read_bytes()).hexdigest()
            written.append(linked(content, seal, "seal") if "seal" in line else content)
            seal = written[-1].get("seal", "")
        else:
            written.append(linked(content_of(line), previous))
            links[line["link"]] = previous = written[-1]["link"]
    write_lines(run, written)


def make_older(run: Path) -> None:
    """The record as a version before the hash of the sources wrote it, in format 1."""
    lines = lines_of(run)
    for line in lines:
        for name in ("chat", "files", "seal"):
            line.pop(name, None)
        if line["kind"] == "begin":
            del line["versions"]["sources"]
            line["format"] = 1
        elif line["kind"] == "checkpoint":
            del line["previous"]
            edit_manifest(folder_of(run, line["step"]), lambda manifest: manifest["versions"].pop("sources"))
    redo(run, lines)


def edit_tensors(folder: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Writes a checkpoint's tensors anew, and every hash in its folder."""
    found = checkpoint.open_checkpoint(folder)
    tensors = {}
    for file in (WEIGHTS_FILE, OPTIMIZER_FILE):
        for path in found.parts(file):
            with open_tensors(path) as stored:
                tensors |= {name: stored.get_tensor(name).clone() for name in stored.keys()}  # noqa: SIM118
    edit(tensors)
    rest = {key: value for key, value in found.manifest.items() if key not in ("files", "schema", "step")}
    extra = {path.name: path.read_bytes() for path in folder.glob("token*")}
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()
    checkpoint.save(folder.parent, found.step, [Stored.of(*pair) for pair in tensors.items()], rest, extra)


def flip(name: str) -> Callable[[dict[str, torch.Tensor]], None]:
    """Flips a bit of a stored element."""

    def edit(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name].view(torch.int32).view(-1)[3] ^= 1

    return edit


# Edits of a record, as values for a table.

Edit = Callable[[Path], object]


def both(*edits: Edit) -> Edit:
    return lambda run: [edit(run) for edit in edits]


def put(content: Line, names: tuple[str, ...], to: Any) -> None:
    for name in names[:-1]:
        content = content.setdefault(name, {})
    content[names[-1]] = to


def chain(edit: Callable[[list[Line]], object], *, again: bool = False) -> Edit:
    """`again` redoes every hash of the chain, and of the manifests."""

    def forge(run: Path) -> None:
        lines = lines_of(run)
        edit(lines)
        (redo if again else write_lines)(run, lines)

    return forge


def field(kind: str, step: int, *names: str, to: Any, again: bool = True) -> Edit:
    """Sets a field of a line of the chain, or one inside an object of it."""
    return chain(
        lambda lines: put(next(one for one in lines if (one["kind"], one["step"]) == (kind, step)), names, to), again=again
    )


def without(kind: str, *steps: int) -> Edit:
    """Removes the chain's lines of a kind, of some steps."""
    return lambda run: write_lines(run, [one for one in lines_of(run) if one["kind"] != kind or one["step"] not in steps])


def saved(step: int, *names: str, to: Any) -> Edit:
    """Sets a field of a checkpoint's manifest, whose own hash is redone."""
    return lambda run: edit_manifest(folder_of(run, step), lambda content: put(content, names, to))


def agreeing(steps: tuple[int, ...], *names: str, to: Any) -> Edit:
    """Sets a fact in the chain's `begin` and in every manifest, and redoes every hash."""
    return both(*(saved(step, *names, to=to) for step in steps), field("begin", 0, *names, to=to))


def text(name: str, old: str, new: str) -> Edit:
    """Replaces a text where it first stands in a file."""

    def forge(run: Path) -> None:
        content = (run / name).read_text()
        assert old in content
        (run / name).write_text(content.replace(old, new, 1))

    return forge


def record(step: int, name: str, to: Any) -> Edit:
    """Sets a field of a step's line in metrics.jsonl."""

    def forge(run: Path) -> None:
        lines = [json.loads(line) for line in (run / METRICS_FILE).read_text().splitlines()]
        next(line for line in lines if (line["kind"], line.get("step")) == ("step", step))[name] = to
        (run / METRICS_FILE).write_text("".join(json.dumps(line) + "\n" for line in lines))

    return forge


def certificate(name: str, edit: Callable[[Line], object]) -> Edit:
    def forge(run: Path) -> None:
        content = json.loads((run / name).read_text())
        edit(content)
        (run / name).write_text(certificate_text(content))

    return forge


def bit(step: int, name: str) -> Edit:
    return lambda run: edit_tensors(folder_of(run, step), flip(name))


def noise(step: int) -> Edit:
    """Other weights, with a manifest that fits them."""
    return lambda run: edit_tensors(folder_of(run, step), lambda tensors: tensors["wte"].normal_())


def other_file(step: int) -> Edit:
    """Other weights under the manifest as it was."""

    def forge(run: Path) -> None:
        path = folder_of(run, step) / WEIGHTS_FILE
        path.write_bytes(path.read_bytes()[:-4096] + bytes(4096))

    return forge


def other_tokenizer(*steps: int) -> Edit:
    """Two letters change places, so the same ids spell another text; each manifest has its hash."""

    def forge(run: Path) -> None:
        for path in (folder_of(run, step) / "tokenizer.json" for step in steps):
            tables = json.loads(path.read_text())
            vocab = tables["model"]["vocab"]
            vocab["a"], vocab["e"] = vocab["e"], vocab["a"]
            path.write_text(json.dumps(tables))
            digest = hashlib.sha256(path.read_bytes()).hexdigest()
            edit_manifest(path.parent, lambda content, digest=digest: content["tokenizer"].update(sha256=digest))

    return forge


def second_line(run: Path) -> None:
    """Noise as the last weights: the line of their checkpoint stays, and another one follows it."""
    lines = lines_of(run)
    noise(lines[-1]["step"])(run)
    digest = hashlib.sha256((folder_of(run, lines[-1]["step"]) / MANIFEST).read_bytes()).hexdigest()
    content = {**{name: lines[-1][name] for name in ("kind", "step", "link")}, "manifest": digest}
    write_lines(run, [*lines, linked(content, lines[-1]["seal"], "seal")])
