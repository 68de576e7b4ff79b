"""Papers about audited runs: certificates, and the difference of two runs."""

import hashlib
import json
import shutil
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import two_torches
from handgrad.cli import main
from handgrad.errors import DataError
from handgrad.joins.audit.chain import content_of, linked, links
from handgrad.run.open import open_run, train
from handgrad.storage.run_files import AUDIT_FILE
from handgrad.tools.certificate import evaluations, signed
from handgrad.tools.diff import difference
from handgrad.tools.record import open_record
from tests.forging import lines_of, write_lines
from tests.test_audit import audited, caught, faulty_run, finished, run, swapped_sample, verify

__all__ = ["finished", "run"]  # fixtures


# Certificates.


def test_a_certificate_stands_for_the_run(run: Path, tmp_path: Path, capsys, shards: Path) -> None:
    assert main(["certificate", str(run), "--out", str(tmp_path / "given" / "run.json")]) == 74
    (tmp_path / "given").mkdir()
    certificate = tmp_path / "given" / "run.json"
    assert main(["certificate", str(run), "--out", str(certificate)]) == 0
    assert [entry["name"] for entry in json.loads(certificate.read_text())["evaluation"]] == ["validation loss"]
    shutil.copytree(run / "checkpoints", tmp_path / "given" / "checkpoints")
    assert verify(certificate, "--data", shards) == 0
    assert "4 links and 3 checkpoints equal" in capsys.readouterr().out  # steps 1, 4, 8 and 12
    content = json.loads(certificate.read_text())
    content["links"][1]["loss"] = (1.0).hex()
    certificate.write_text(json.dumps(content))
    assert "step 1, was edited" in caught(certificate, capsys, 65, "--data", shards)


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ({"kind": "validation"}, "expected a whole number from 0 to .* in 'step'"),
        ({"kind": "validation", "step": 3, "loss": "low"}, "expected a number in 'loss', found 'low'"),
        ({"kind": "evaluation", "metrics": {"acc": [0.5, 0.1]}}, "expected text in 'task'"),
        ({"kind": "evaluation", "task": "a", "metrics": {"acc": 0.5}}, "expected a value and its standard error in 'acc'"),
    ],
)
def test_a_certificate_names_a_line_that_it_cannot_read(line: dict, told: str, tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    with pytest.raises(DataError, match=told):
        evaluations(tmp_path / "metrics.jsonl")


def test_a_signature(run: Path, tmp_path: Path, capsys, shards: Path) -> None:
    serialization = pytest.importorskip("cryptography.hazmat.primitives.serialization")
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    pem = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    (tmp_path / "key.pem").write_bytes(Ed25519PrivateKey.generate().private_bytes(*pem))
    assert main(["certificate", str(run), "--key", str(tmp_path / "key.pem")]) == 0
    assert verify(run / "certificate.json", "--data", shards, "--to", 4) == 0
    content = json.loads((run / "certificate.json").read_text())
    content["evaluation"] = []
    (run / "certificate.json").write_text(json.dumps(content))
    assert "its signature does not match its content" in caught(run / "certificate.json", capsys, 65)


def test_the_key_that_signed(run: Path, tmp_path: Path, capsys, shards: Path) -> None:
    """An edited certificate can be signed anew, by another key, or by none: `verify` says by which."""
    pytest.importorskip("cryptography")
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    pem = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    keys = [Ed25519PrivateKey.generate() for _ in range(2)]
    names = [hashlib.sha256(key.public_key().public_bytes_raw()).hexdigest() for key in keys]
    for number, key in enumerate(keys):
        (tmp_path / f"{number}.pem").write_bytes(key.private_bytes(*pem))
    certificate = run / "certificate.json"
    replay = "--data", shards, "--to", 2
    assert main(["certificate", str(run), "--key", str(tmp_path / "0.pem")]) == 0
    capsys.readouterr()
    assert verify(certificate, *replay, "--signed-by", names[0].upper()) == 0
    assert f"signed by  the key {names[0]}" in capsys.readouterr().out
    content = {key: value for key, value in json.loads(certificate.read_text()).items() if key != "signature"}
    content["evaluation"] = []
    forged = signed(content, tmp_path / "1.pem"), content
    for written, signer in zip(forged, (f"the key {names[1]}", "no key"), strict=True):
        certificate.write_text(json.dumps(written))
        assert verify(certificate, *replay) == 0
        assert f"signed by  {signer}" in capsys.readouterr().out
        error = caught(certificate, capsys, 65, *replay, "--signed-by", names[0])
        assert f"is signed by {signer}, expected the key {names[0]}" in error
    assert "expected a certificate beside --signed-by" in caught(run, capsys, 64, "--signed-by", names[0])


def test_a_certificate_of_strange_facts(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Hashed anew by hand; the page says what is there, and never fails."""
    content = content_of(links(lines_of(run))[0])
    write_lines(run, [linked({**content, "config": {}, "versions": {}}, "")])
    shutil.rmtree(run / "checkpoints")
    assert main(["certificate", str(run)]) == 0
    write_lines(run, [linked({**content, "identity": {}}, "")])
    assert main(["certificate", str(run)]) == 65
    assert "expected text in 'data'" in capsys.readouterr().err


def test_a_signature_without_the_package(run: Path, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives", None)
    assert main(["certificate", str(run), "--key", "key.pem"]) == 64
    assert "signatures need the package cryptography" in capsys.readouterr().err


# Two runs.


def test_a_run_and_itself_do_not_differ(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diff", str(finished), str(finished)]) == 0
    assert "12 links are equal" in capsys.readouterr().out


def test_where_two_runs_part(finished: Path, shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(audited(shards, tmp_path / "run", clip_norm=2.0))
    assert main(["diff", str(finished), str(tmp_path / "run"), "--tensors", "2"]) == 1
    out = capsys.readouterr().out
    assert "configuration  clip_norm: 1.0 -> 2.0" in out
    assert "step 1 is the first that differs: gradients of an equal norm, or their update, left other bits" in out
    assert "checkpoints    of step 12:" in out and "ulp, mean" in out and "--tensors 0 lists all" in out
    found = two_torches.compare(finished, tmp_path / "run")
    assert (found["first_link"], found["steps"]) == (1, 12) and 1 <= found["equal_losses"] < 12
    assert two_torches.compare(finished, finished)["first_link"] is None
    assert {row["name"] for row in two_torches.tensors(finished, tmp_path / "run")} >= {"wte", "m.wte", "v.wte"}


def test_units_in_the_last_place() -> None:
    one = torch.tensor([1.0, -1.0, 0.0, 3.0])
    other = torch.tensor([1.0 + 2**-23, -1.0 - 2**-22, -0.0, 3.0])
    found = difference("w", one, other)
    assert (found.differing, found.elements, found.largest, found.mean) == (3, 4, 2.0, 1.0)


def test_chains_alone_can_be_compared(finished: Path, shards: Path, tmp_path: Path, capsys) -> None:
    """Those of two machines, brought together without their checkpoints."""
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
        shutil.copy(finished / AUDIT_FILE, tmp_path / name)
    assert main(["diff", str(tmp_path / "here"), str(tmp_path / "there")]) == 0
    train(audited(shards, tmp_path / "other", seed=3, steps=4))
    assert main(["diff", str(tmp_path / "here"), str(tmp_path / "other")]) == 1
    out = capsys.readouterr().out
    assert "seed: 1337 -> 3" in out and "the initial states differ" in out


def test_the_chains_of_an_h100_and_an_h200(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """docs/audit.md shows their difference. Each chain is whole, and up to its first loss they are equal."""
    root = Path(__file__).parents[1]
    folders = [Path("benchmarks/results/chains") / name for name in ("h100-124m", "h200-124m")]
    monkeypatch.chdir(root)
    assert main(["diff", *map(str, folders)]) == 1
    shown = f"$ handgrad diff {folders[0]} {folders[1]}\n{capsys.readouterr().out}```"
    assert shown in (root / "docs" / "audit.md").read_text(encoding="utf-8")
    chains = [open_record(folder) for folder in folders]
    (begun, begun_too), (first, first_too) = ([chain.begun(0) for chain in chains], [chain.steps[1] for chain in chains])
    assert begun["config"] == begun_too["config"] and begun["identity"] == begun_too["identity"]
    assert begun["state"] == begun_too["state"] and first["loss"] == first_too["loss"]


def test_runs_between_whose_links_a_sample_differs(finished: Path, shards: Path, tmp_path: Path, capsys) -> None:
    other = faulty_run(audited(shards, tmp_path / "other", audit_every=5), swapped_sample)
    assert main(["diff", str(finished), str(other)]) == 1
    assert "step 10 is the first that differs: one of the steps 6 to 10 is another" in capsys.readouterr().out


def test_runs_without_a_chain(finished: Path, shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Settings, versions, data, metrics and checkpoints say where they part; of a state they know nothing."""
    same, other = tmp_path / "same", faulty_run(audited(shards, tmp_path / "other", audit_every=0), swapped_sample)
    train(audited(shards, same, audit_every=0))
    said = f"no chain       of {same}: metrics and checkpoints are compared"
    for one in (finished, same):  # the control: one run has a chain, or none
        capsys.readouterr()
        assert main(["diff", str(one), str(same)]) == 0
        out = capsys.readouterr().out
        assert said in out and "loss, norm and rate of 12 steps are equal" in out
    assert main(["diff", str(same), str(other)]) == 1
    out = capsys.readouterr().out
    assert "metrics        step 6 is the first that differs (loss, norm; loss 4." in out
    assert "checkpoints    of step 12:" in out and "configuration" not in out
    shutil.rmtree(other / "checkpoints")  # versions and data then come from the last start
    (other / "config.toml").write_text((other / "config.toml").read_text().replace("clip_norm = 1.0", "clip_norm = 2.0"))
    assert main(["diff", str(same), str(other)]) == 1
    out = capsys.readouterr().out
    assert "configuration  clip_norm: 1.0 -> 2.0" in out and "versions" not in out and "data" not in out
    assert main(["diff", str(same), str(shards)]) == 65
    assert "expected a run folder with config.toml and metrics.jsonl" in capsys.readouterr().err
    assert main(["certificate", str(finished), "--out", str(tmp_path / "certificate.json")]) == 0
    assert main(["diff", str(tmp_path / "certificate.json"), str(same)]) == 64


def test_runs_of_other_networks(shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Checkpoints of other tensors are a difference like any other: the settings before it are still told."""
    train(audited(shards, tmp_path / "modern", architecture="modern", steps=4))
    train(audited(shards, tmp_path / "gpt2", steps=4))
    assert main(["diff", str(tmp_path / "gpt2"), str(tmp_path / "modern")]) == 1
    out = capsys.readouterr().out
    assert "configuration  architecture: 'gpt2' -> 'modern'" in out and "the initial states differ (weights)" in out
    assert "hold other tensors, the first is" in out


def test_a_run_that_began_twice(finished: Path, shards: Path, tmp_path: Path) -> None:
    """Ended before its first checkpoint and begun again with the other's seed: the last beginning counts."""
    for seed, steps in ((2, 2), (1337, 12)):
        with open_run(audited(shards, tmp_path / "run", seed=seed)) as run:
            run.begin()
            run.advance(steps)
    assert main(["diff", str(finished), str(tmp_path / "run")]) == 0
    assert verify(tmp_path / "run") == 0
