"""Every block of the README runs, in its order, in one folder, as a reader would run them."""

import io
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from tests.conftest import write_text
from tests.data.test_download import Server

ROOT = Path(__file__).parents[1]
BLOCKS = re.findall(r"^```bash\n(.*?)^```$", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
HUB_NAME = "HuggingFaceFW/fineweb"


def fake_fineweb(server: Server) -> None:
    """A server of our own in the Hub's place, with a data set of the same name and layout."""
    file = "sample/10BT/000_00000.parquet"
    table = io.BytesIO()
    texts = [f"The river number {i} runs under the old stone bridge and sings. " * 12 for i in range(600)]
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), table)
    configs = [{"config_name": "sample-10BT", "data_files": [{"split": "train", "path": "sample/10BT/*"}]}]
    siblings = [{"rfilename": file}]
    info = {"id": HUB_NAME, "sha": "c0ffee", "siblings": siblings, "cardData": {"configs": configs}}
    server.files[f"/api/datasets/{HUB_NAME}"] = json.dumps(info).encode()
    server.files[f"/datasets/{HUB_NAME}/resolve/c0ffee/{file}"] = table.getvalue()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a reader has: a checkout to stand in, and a text."""
    folder = tmp_path_factory.mktemp("readme")
    shutil.copytree(ROOT / "recipes", folder / "recipes")
    shutil.copy(ROOT / "Makefile", folder / "Makefile")
    for name in ("pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, folder / name)
    write_text(folder / "my_text.txt", words=20_000)
    return folder


@pytest.fixture(scope="module")
def environment(folder: Path):
    server = Server()
    fake_fineweb(server)
    binaries = folder / "bin"
    binaries.mkdir()
    command = binaries / "handgrad"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m handgrad "$@"\n')
    command.chmod(0o755)
    yield {
        **{name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"},
        "PATH": f"{binaries}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "HF_ENDPOINT": server.url,
        "HANDGRAD_CACHE": str(folder / "cache"),
    }
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("number", range(len(BLOCKS)), ids=lambda n: BLOCKS[n].split("\n")[0][:60])
def test_block(number: int, folder: Path, environment: dict[str, str]) -> None:
    block = BLOCKS[number]
    if block.startswith("make "):
        # `make test` is what is running now, and CI runs `make train`: here their recipes must exist and expand.
        targets = re.findall(r"^make (\w+)", block, re.MULTILINE)
        assert targets == ["train", "test"]
        block = f"make --dry-run {' '.join(targets)}"
    command = ["bash", "-euo", "pipefail", "-c", block]
    run = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, f"{block}\n{run.stdout}\n{run.stderr}"


def test_what_the_blocks_left_behind(folder: Path) -> None:
    """The blocks did what the text around them says. (Runs after them.)"""
    assert "is finished" in (folder / "runs/mine/log.txt").read_text()
    assert "runs/faster" in (folder / "compared.html").read_text() or "faster" in (folder / "compared.html").read_text()
    overfit = [json.loads(line) for line in (folder / "runs/overfit/metrics.jsonl").read_text().splitlines()]
    losses = [record["loss"] for record in overfit if record["kind"] == "step"]
    assert losses[-1] < 0.25 * losses[0], "one batch is learnt by heart"
    manifest = json.loads((folder / "shards/fineweb/manifest.json").read_text())
    assert sum(split["documents"] for split in manifest["splits"].values()) == 500
    assert json.loads((folder / "shards/bpe/manifest.json").read_text())["tokenizer"]["kind"] == "bpe"


def test_the_table_quotes_the_results() -> None:
    """Every figure in the README's tables stands in benchmarks/results."""
    text = (ROOT / "README.md").read_text().split("## How fast")[1].split("## Ten things")[0]
    text += "".join(re.findall(r"^\| validation loss.*$", (ROOT / "docs" / "results.md").read_text(), re.MULTILINE))
    measured = "".join(path.read_text() for path in (ROOT / "benchmarks" / "results").glob("*.json"))
    for figure in re.findall(r"\d+\.\d+", text):
        assert re.search(rf"(?<![\d.]){re.escape(figure.rstrip('0'))}\d*", measured), f"{figure} stands in no results file"
