"""The shipped tables of algorithms: rows that a product can name, with the eight words the library wants."""

import json
import re
from pathlib import Path

import pytest

import handgrad

TABLES = sorted((Path(handgrad.__file__).parent / "ops" / "kernels" / "tuned").glob("*.json"))
ROW = re.compile(r"\d+x\d+x\d+ [NT][NT] (bfloat16|float16|float32)-\w+(-tf32)? (plain|bias|gelu|dgelu)( add)?( align\d+)?")


@pytest.mark.parametrize("path", TABLES, ids=lambda path: path.stem)
def test_a_table_belongs_to_one_gpu_and_library(path: Path) -> None:
    table = json.loads(path.read_text())
    assert path.stem == f"{table['gpu'].lower().replace(' ', '-')}-cublaslt-{table['cublaslt']}"
    for name, words in table["algorithms"].items():
        assert ROW.fullmatch(name), name
        assert len(words) == 8 and all(0 <= int(word, 16) < 1 << 64 for word in words), name


def test_there_is_one_for_the_h200() -> None:
    """With the products of every GPT-2 size: fifteen each."""
    rows = json.loads(next(path for path in TABLES if "h200" in path.stem).read_text())["algorithms"]
    for channels in (768, 1024, 1280, 1600):
        assert (
            sum(str(channels) in re.split("[x ]", name) or str(4 * channels) in re.split("[x ]", name) for name in rows)
            >= 15
        )
