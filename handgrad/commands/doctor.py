"""handgrad doctor: this machine's parts."""

import platform
from argparse import Namespace
from collections.abc import Iterator
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version

import handgrad
from handgrad.errors import PACKAGES, ConfigError, missing_package


def run(parsed: Namespace) -> int:
    healthy = True
    for ok, line in lines():
        healthy = healthy and ok
        print(f"{'ok  ' if ok else 'FAIL'}  {line}", flush=True)
    return 0 if healthy else ConfigError.exit_code


def lines() -> Iterator[tuple[bool, str]]:
    """Yields (ok, line) for each package and each part. Examines no part if its libraries do not load."""
    yield True, f"handgrad {handgrad.__version__}, Python {platform.python_version()}, {platform.platform()}"
    for package, source in PACKAGES.items():
        if source in (package, "pillow"):  # the others are for a GPU
            yield examine_import(package, source)
    try:
        from handgrad.tools.doctor import examine
    except ImportError as error:
        if (message := missing_package(error)) is None:
            raise
        yield False, f"nothing else can be examined: {message}"
        return
    yield from examine()


def examine_import(package: str, source: str) -> tuple[bool, str]:
    """`source`: the name of its distribution."""
    try:
        import_module(package)
        return True, f"{source} {version(source)}"
    except (ImportError, PackageNotFoundError) as error:
        return False, f"{package} does not load ({error}); try: pip install {source}"
