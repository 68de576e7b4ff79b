"""The release: every file is in wheel and sdist, the wheel works outside a checkout, and what ships beside it agrees."""

import email
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest
import yaml

import handgrad
from handgrad.__main__ import main
from handgrad.settings.config import ARCHITECTURES, FIELDS
from tests.conftest import write_text

ROOT = Path(__file__).parents[1]
LISTED = subprocess.run(
    ["git", "ls-files", "handgrad", "climb"], cwd=ROOT, capture_output=True, text=True, check=True
).stdout.split()
TRACKED = [f"handgrad/{path}" if path.startswith("climb/") else path for path in LISTED]  # as they stand in a wheel


def test_what_it_does_not_do_is_still_so() -> None:
    """The page on its limits names the networks, ZeRO stages, GPUs and the changelog as they are."""
    page = (ROOT / "docs" / "compatibility.md").read_text()
    names = re.search(r"networks besides (.*): no experts", page)
    assert names and tuple(re.findall(r"`(\w+)`", names[1])) == ARCHITECTURES
    assert "ZeRO 0 to 2" in page and [rule.text for rule in FIELDS["zero"].metadata["rules"]] == ["0, 1 or 2"]
    records = (ROOT / "benchmarks" / "results").glob("*.json")
    assert not [path.name for path in records if (gpus := re.search(r"-x(\d+)-", path.name)) and int(gpus[1]) > 4]
    assert "### Changed behaviour" in (ROOT / "CHANGELOG.md").read_text().split("## 0.2.0")[1][:200]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("built")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    subprocess.run(command, check=True, capture_output=True)
    return folder


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    (wheel,) = built.glob("*.whl")
    return wheel


def test_every_file_is_in_wheel_and_sdist(built: Path, wheel: Path) -> None:
    assert len(TRACKED) > 200
    assert set(zipfile.ZipFile(wheel).namelist()) >= set(TRACKED)
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert names >= {*LISTED, "README.md", "LICENSE", "NOTICE", "pyproject.toml"}
    assert not any(re.search(r"__pycache__|(^|/)(runs|shards|tests|site)/", name) for name in names)


def test_the_readmes_links_work_on_a_package_index(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = (name for name in archive.namelist() if name.endswith("METADATA"))
        page = email.message_from_bytes(archive.read(metadata)).get_payload()
    links = re.findall(r"\]\(([^)]+)\)", str(page))
    assert len(links) > 10 and all(link.startswith(("https://", "#")) for link in links), links
    assert any("/raw/main/docs/speed.png" in link for link in links)


def test_a_release_is_checked_before_it_is_uploaded() -> None:
    """By a job that may write nothing; the job that uploads has no password and runs for a tag alone."""
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text())["jobs"]
    commands = " ".join(step.get("run", "") for step in jobs["build"]["steps"])
    order = [commands.index(word) for word in ("python -m build", "twine check --strict", "dist/*.whl", "handgrad demo")]
    assert order == sorted(order) and "permissions" not in jobs["build"]
    publish = jobs["publish"]
    assert publish["needs"] == "build" and publish["permissions"] == {"id-token": "write"}
    assert publish["if"] == "github.event_name == 'push'" and "secrets" not in str(publish)
    tag = next(step["run"] for step in jobs["build"]["steps"] if "GITHUB_REF_NAME" in step.get("run", ""))
    for name, code in ((f"v{handgrad.__version__}", 0), ("v9.9.9", 1)):
        done = subprocess.run(["bash", "-e", "-c", tag], cwd=ROOT, env={**os.environ, "GITHUB_REF_NAME": name})
        assert done.returncode == code


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment that has the wheel, and of this one the libraries alone, since a `.pth` file reads no other."""
    folder = tmp_path_factory.mktemp("fresh")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    site = folder / Path(sysconfig.get_path("purelib")).relative_to(sys.prefix)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(site), str(wheel)]
    subprocess.run(pip, check=True, capture_output=True)
    (site / "libraries.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    return folder / "bin" / "python"


@pytest.mark.nightly  # a release begins with `make nightly`
def test_the_wheel_works_outside_a_checkout(installed: Path, tmp_path: Path) -> None:
    write_text(tmp_path / "mine.txt", words=5_000)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def run(*words: str) -> str:
        command = [str(installed), *words]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    where = run("-c", "import handgrad; print(handgrad.__file__)")
    assert Path(where.strip()).is_relative_to(installed.parents[1])
    handgrad = "-m", "handgrad"
    assert "gpt2-124m" in run(*handgrad, "recipes")
    assert run(*handgrad, "recipes", "slurm").startswith("#!/usr/bin/env bash")
    assert "124.4M parameters" in run(
        *handgrad, "plan", "--config", "gpt2-124m", "--vocab-size", "50257", "--device", "cpu"
    )
    run(*handgrad, "prepare", "mine.txt", "--tokenizer", "gpt2", "--out", "shards")
    small = "--sequence-length 16 --tokens-per-step 32 --micro-batch 2 --warmup-steps 1 --sample-tokens 4 --eval-tokens 64"
    run(*handgrad, "train", "tiny", "--data", "shards", "--out", "run", "--steps", "2", *small.split())
    assert run(*handgrad, "sample", "run", "--max-tokens", "4")
    assert (tmp_path / "run" / "report.html").exists()
    assert "18 steps lie in mine" in run(*handgrad, "climb", "start", "mine")


def test_windows_is_told_where_to_go(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    """Before anything is imported that Windows lacks."""
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setitem(sys.modules, "fcntl", None)
    assert main() == 64
    assert capsys.readouterr().err == "handgrad needs Linux or macOS, found Windows; run it in WSL 2\n"


def test_the_image_has_all_that_it_installs(tmp_path: Path) -> None:
    """The files that the Dockerfile copies are not ignored, and a wheel builds from them alone."""
    copies = [line.split()[1:-1] for line in (ROOT / "Dockerfile").read_text().splitlines() if line.startswith("COPY ")]
    names = [name for copied in copies for name in copied]
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert kept == set(names) and "handgrad" in names
    for name in names:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, tmp_path / name)
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path / "out"), str(tmp_path)]
    subprocess.run(build, check=True, capture_output=True)
    (wheel,) = (tmp_path / "out").glob("*.whl")
    assert set(zipfile.ZipFile(wheel).namelist()) >= set(TRACKED)


def test_pre_commit_has_cis_ruff() -> None:
    (pinned,) = re.findall(r"^ruff==(.*)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    assert {hook["id"] for hook in hooks} == {"ruff", "ruff-format"}
    assert all(hook["additional_dependencies"] == [f"ruff=={pinned}"] for hook in hooks)


def test_the_version_is_one() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    (latest, *_) = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert citation["version"] == latest == handgrad.__version__


@pytest.mark.parametrize(
    "form", sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("[!c]*.yml")), ids=lambda path: path.stem
)
def test_issue_forms_are_whole(form: Path) -> None:
    content = yaml.safe_load(form.read_text())
    assert content.keys() == {"name", "description", "body"}
    assert all({"type", "id", "attributes"} <= field.keys() and field["attributes"]["label"] for field in content["body"])


def test_a_clone_does_not_hide_the_package(tmp_path: Path) -> None:
    """Beside a clone, which has the package's name, Python finds the editable install and not the folder."""
    (tmp_path / "handgrad").mkdir()
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-c", "import handgrad; print(handgrad.__file__)"]
    found = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True).stdout
    assert found.strip().endswith("__init__.py")
