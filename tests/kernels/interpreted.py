"""Tests of interpreted and of compiled kernels that passed before: for each of these files, a hash of everything that
decides its results.

    python -m tests.kernels.interpreted      runs the files whose hash is not recorded, and records those that pass

The hash is of the code, without comments and docstrings, of the file and of every module of this repository that it
imports, directly or not: kernels, references, comparisons, cases. Versions, the CPU's instructions and the interpreter's
patches are in it; for a table of compiled kernels, the record of `compiled_record` as well. `make test` skips the tests of
a file whose hash is recorded, but each day another fiftieth of them; `make nightly` skips none.
"""

import ast
import functools
import hashlib
import json
import platform
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
RECORD = Path(__file__).with_name("interpreted.json")  # the CPU's instructions: file: hash
DAYS = 50  # after which each recorded test has run once more
# The others import modules by a text, or a Launcher and with it nearly everything.
NAMES = ("reduction", "llama_fp8", "long_attention", "modern_fp8", "document_kernels", "fp8_attention", "memory_kernels")
NAMES += ("fp8_kernels", "gelu_fp8", "llama_kernels", "attention_kernels", "decode_kernels", "distill_kernels")
NAMES += ("invariant_kernels", "modern_kernels", "picture_kernels")
FILES = [Path(__file__).with_name(f"test_{name}.py") for name in NAMES]
# Tests of what a process with a Launcher compiles: theirs are the sources of the table.
TABLES = {"attention_kernels": "attention", "decode_kernels": "decode", "fp8_kernels": "fp8", "gelu_fp8": "gelu_fp8"}
TABLES |= {"llama_fp8": "llama_fp8", "memory_kernels": "memory", "modern_fp8": "modern_fp8", "modern_kernels": "modern"}
COMPILED = {
    Path(__file__).with_name(f"test_{name}_compile.py"): Path(__file__).with_name(f"{table}_kernel_table.py")
    for name, table in TABLES.items()
}
COSTS = ROOT / "benchmarks" / "results" / "kernel-costs.json"
ALWAYS = ROOT / "tests" / "quick_interpreter.py"


def skip_passed(items: list[pytest.Item]) -> None:
    """Marks the tests that passed with the same sources and whose day is not today."""
    recorded = read_record().get(torch.backends.cpu.get_cpu_capability(), {})
    passed = {
        path for path in {item.path for item in items} & {*FILES, *COMPILED} if recorded.get(path.name) == file_hash(path)
    }
    reason = f"passed with the same sources ({RECORD.name}); --nightly runs it"
    for item in items:
        if item.path in passed and not is_due(item.nodeid):
            item.add_marker(pytest.mark.skip(reason=reason))


def is_due(name: str, seconds: float | None = None) -> bool:
    """True if a recorded test runs again on the day of `seconds`; None: today."""
    day = int(time.time() if seconds is None else seconds) // 86400
    return int(hashlib.sha256(name.encode()).hexdigest(), 16) % DAYS == day % DAYS


def read_record() -> dict[str, dict[str, str]]:
    return json.loads(RECORD.read_text()) if RECORD.is_file() else {}


def file_hash(path: Path, root: Path = ROOT, always: Path = ALWAYS) -> str:
    """The hash of everything that the results of a file of tests depend on."""
    versions = [platform.python_version(), torch.__version__, *map(version, ("triton", "numpy", "pytest"))]
    whole = [*versions, torch.backends.cpu.get_cpu_capability()]
    if path in COMPILED:
        whole += [COSTS.read_text(), parsed(path.read_text())[1]]
    for source in sorted({*sources(COMPILED.get(path, path), root), *sources(always, root)}):
        whole += [str(source.relative_to(root)), parsed(source.read_text())[1]]
    return hashlib.sha256("\n".join(whole).encode()).hexdigest()[:16]


def sources(path: Path, root: Path = ROOT) -> set[Path]:
    """The file and the modules below `root` that it imports, directly or not, with their packages."""
    seen, waiting = set[Path](), [path]
    while waiting:
        if (source := waiting.pop()) not in seen:
            seen.add(source)
            waiting += [file for name in parsed(source.read_text())[0] for file in files_of(name, root)]
    return seen


def files_of(name: str, root: Path = ROOT) -> Iterator[Path]:
    place = root
    for part in name.split("."):
        place /= part
        yield from (file for file in (place / "__init__.py", place.with_suffix(".py")) if file.is_file())


@functools.cache
def parsed(text: str) -> tuple[list[str], str]:
    """The names that a module may import when it runs, and its syntax: no comments, no docstrings, no line numbers."""
    tree, names = ast.parse(text), list[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            del node.body[0]
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            node.body = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return names, ast.dump(tree)


def main() -> None:
    recorded = read_record()
    passed = recorded.setdefault(torch.backends.cpu.get_cpu_capability(), {})
    for path in (*FILES, *COMPILED):
        before = file_hash(path)
        if passed.get(path.name) != before:
            command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "--nightly", str(path)]
            subprocess.run(command, cwd=ROOT, check=True)
            assert file_hash(path) == before, f"the sources of {path.name} changed while its tests ran"
            passed[path.name] = before
            RECORD.write_text(json.dumps(recorded, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
