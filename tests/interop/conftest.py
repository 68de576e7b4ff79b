"""Exported and imported folders, made once."""

from collections.abc import Callable
from pathlib import Path

import pytest

from handgrad.cli import main
from handgrad.settings.config import ModelShape
from tests.interop.models import make_checkpoint


@pytest.fixture(scope="package")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Path, ModelShape]]:
    """kind -> (run folder, exported folder, sizes), made once through the command line."""
    made: dict[str, tuple[Path, Path, ModelShape]] = {}

    def get(kind: str) -> tuple[Path, Path, ModelShape]:
        if kind not in made:
            root = tmp_path_factory.mktemp(kind)
            run, shape = make_checkpoint(root / "run", kind)
            assert main(["export", str(run), "--to", "hf", str(root / "hf")]) == 0
            made[kind] = run, root / "hf", shape
        return made[kind]

    return get


@pytest.fixture(scope="module")
def run(saved: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """kind -> the imported folder of the module's fixture `saved`, a folder of transformers."""
    made: dict[str, Path] = {}

    def get(kind: str) -> Path:
        if kind not in made:
            made[kind] = tmp_path_factory.mktemp(kind) / "run"
            assert main(["import", str(saved(kind)), "--out", str(made[kind])]) == 0
        return made[kind]

    return get
