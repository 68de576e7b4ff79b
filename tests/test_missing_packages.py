"""A missing package is one line that names what installs it, also where only `doctor` looks."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from handgrad.errors import PACKAGES, ConfigError
from tests.conftest import write_text

NEEDS = {  # package: a command that needs it
    "torch": "plan d12",
    "numpy": "prepare text.txt --out out --tokenizer bytes",
    "tiktoken": "prepare text.txt --out out",
    "tokenizers": "prepare text.txt --out out --tokenizer bpe:300",
    "safetensors": "sample runs/none",
    "rich": "demo --steps 1",
}


def run_without(package: str, command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Runs a command in a Python whose import of `package` fails as that of an absent one does."""
    (folder / "sitecustomize.py").write_text(
        "import sys\n"
        "class Absent:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name.partition('.')[0] == {package!r}:\n"
        "            raise ModuleNotFoundError(f'No module named {name!r}', name=name.partition('.')[0])\n"
        "sys.meta_path.insert(0, Absent())\n"
    )
    paths = os.pathsep.join([str(folder), str(Path(__file__).parents[1])])
    return subprocess.run(
        [sys.executable, "-m", "handgrad", *command.split()],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": paths, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.nightly(but=["torch", "safetensors", "rich"])
@pytest.mark.parametrize("package", NEEDS)
def test_a_command_names_its_missing_package(package: str, tmp_path: Path) -> None:
    write_text(tmp_path / "text.txt")
    ended = run_without(package, NEEDS[package], tmp_path)
    assert ended.returncode == ConfigError.exit_code, ended.stderr
    assert ended.stderr == f"handgrad: handgrad needs {package}, which is not installed: `pip install {package}`\n"


@pytest.mark.nightly(but=["torch", "matplotlib"])
@pytest.mark.parametrize("package", ["torch", "numpy", "rich", "matplotlib"])
def test_doctor_names_each_missing_package(package: str, tmp_path: Path) -> None:
    ended = run_without(package, "doctor", tmp_path)
    lines = ended.stdout.splitlines()
    assert ended.returncode == ConfigError.exit_code and "Traceback" not in ended.stderr, ended.stderr
    assert any(line.startswith(f"FAIL  {package} does not load") and f"pip install {package}" in line for line in lines)
    others = [name for name, source in PACKAGES.items() if name == source and name != package]
    assert all(any(f"  {name} " in line for line in lines) for name in others)
