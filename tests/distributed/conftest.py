"""Starts the ranks."""

from collections.abc import Iterator

import pytest

from tests.distributed.runs import Launcher


@pytest.fixture(scope="session")
def launcher(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launcher]:
    started = Launcher(tmp_path_factory.mktemp("ranks"))
    yield started
    started.close()
