"""The record of interpreted kernels: what decides a result changes the hash, and every test runs again within its days."""

import ast
import re
from pathlib import Path

import pytest

pytest.importorskip("triton")

from tests.kernels import interpreted

TREE = {
    "tests/__init__.py": "",
    "tests/quick.py": "def quickened():\n    return 1\n",
    "tests/test_kernel.py": "from tests import checks\n\ndef test():\n    checks.check(8)\n",
    "tests/checks.py": "from handgrad.ops import kernel\n\ndef check(n):\n    assert kernel.run(n) == n + kernel.ONE\n",
    "handgrad/__init__.py": "from typing import TYPE_CHECKING\n\nif TYPE_CHECKING:\n    from handgrad.other import f\n",
    "handgrad/other.py": "f = 1\n",
    "handgrad/ops/__init__.py": "SIZE = 4\n",
    "handgrad/ops/kernel.py": """ONE = 1

def run(n):
    "Adds one."
    from handgrad.ops import late

    return late.add(n)
""",
    "handgrad/ops/late.py": "def add(n):\n    return n + 1\n",
}
DECIDES = {
    "tests/quick.py": ("return 1", "return 2"),
    "tests/test_kernel.py": ("check(8)", "check(9)"),
    "tests/checks.py": ("assert kernel.run(n) ==", "assert kernel.run(n) >="),
    "handgrad/ops/__init__.py": ("4", "5"),
    "handgrad/ops/kernel.py": ("ONE = 1", "ONE = 2"),
    "handgrad/ops/late.py": ("n + 1", "n + 2"),
}
SAME = {
    "handgrad/other.py": ("f = 1", "f = 2"),  # for type checkers alone
    "handgrad/ops/kernel.py": ('"Adds one."', '"One more."\n    # a line more'),
}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name, text in TREE.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def hash_of(tree: Path) -> str:
    return interpreted.file_hash(tree / "tests/test_kernel.py", tree, tree / "tests/quick.py")


@pytest.mark.parametrize(("changes", "same"), [(DECIDES, False), (SAME, True)])
def test_the_hash_changes_with_what_decides(changes: dict[str, tuple[str, str]], same: bool, tree: Path) -> None:
    before = hash_of(tree)
    for name, (old, new) in changes.items():
        assert TREE[name].count(old) == 1
        (tree / name).write_text(TREE[name].replace(old, new))
        assert (hash_of(tree) == before) == same, name
        (tree / name).write_text(TREE[name])


def test_versions_and_instructions_belong_to_the_hash(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = hash_of(tree)
    with monkeypatch.context() as patch:
        patch.setattr(interpreted, "version", lambda library: "0.0")
        assert hash_of(tree) != before
    monkeypatch.setattr("torch.backends.cpu.get_cpu_capability", lambda: "OTHER")
    assert hash_of(tree) != before


@pytest.mark.nightly(but=["test_gelu_fp8.py", "test_reduction.py"])
@pytest.mark.parametrize("path", interpreted.FILES, ids=lambda path: path.name)
def test_no_source_hides_from_the_hash(path: Path) -> None:
    """Kernels and references are among the sources; and none imports by a text, runs a process or is the tests' conftest,
    which imports nearly everything."""
    names = {str(source.relative_to(interpreted.ROOT)) for source in interpreted.sources(path)}
    assert any(name.startswith("handgrad/ops/cuda/") for name in names)
    assert any(name.startswith("handgrad/ops/reference/") for name in names)
    assert "tests/conftest.py" not in names
    for name in names:
        tree = ast.parse((interpreted.ROOT / name).read_text())
        called = {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
        by_text = {"import_module", "importlib.import_module", "__import__", "exec", "eval"} & called
        assert not by_text or name == "handgrad/__init__.py", name  # of the public names, which none of them may import:
        for imported in {*interpreted.parsed(ast.unparse(tree))[0]} - {"handgrad.__version__"}:
            package, _, rest = imported.partition(".")
            assert package != "handgrad" or not rest or len({*interpreted.files_of(imported)}) > 1, (name, imported)


@pytest.mark.parametrize(("path", "table"), interpreted.COMPILED.items(), ids=interpreted.TABLES)
def test_the_hash_of_a_table_has_its_kernels(
    path: Path, table: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """And the record of their costs, and the tests."""
    names = {str(source.relative_to(interpreted.ROOT)) for source in interpreted.sources(table)}
    assert path.is_file() and any(re.match(r"handgrad/(ops|joins/\w+)/cuda\b", name) for name in names)
    assert "tests/kernels/compiling.py" in names and "import_module" not in table.read_text()
    before = interpreted.file_hash(path)
    (tmp_path / "costs.json").write_text("{}")
    monkeypatch.setattr(interpreted, "COSTS", tmp_path / "costs.json")
    assert interpreted.file_hash(path) != before
    monkeypatch.undo()
    assert interpreted.file_hash(path) == before


def test_a_recorded_test_runs_once_in_its_days() -> None:
    for name in ("a", "b", "tests/kernels/test_reduction.py::test_digest"):
        assert sum(interpreted.is_due(name, day * 86400.0) for day in range(7, 7 + interpreted.DAYS)) == 1
