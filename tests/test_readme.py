"""Every block of the README and of docs/tour.md runs, in order, in one folder, as a reader would run it; and the
tables of docs/results.md and docs/sampling.md are made from benchmarks/results (`tests/test_figures.py` holds
the figures beside them).

    python -m tests.test_readme      prints the tables of these pages, to paste
"""

import io
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from PIL import Image

from benchmarks import speed
from tests import terminal_pictures
from tests.conftest import write_text
from tests.data.test_download import Server
from tests.distributed.runs import Launcher

ROOT = Path(__file__).parents[1]
PAGES = {page: (ROOT / page).read_text() for page in ("README.md", "docs/tour.md")}
BLOCKS = re.findall(r"^```(?:bash|python)\n(.*?)^```$", "\n".join(PAGES.values()), re.MULTILINE | re.DOTALL)
RESULTS = ROOT / "benchmarks" / "results"
HUB_NAME = "HuggingFaceFW/fineweb"


def fake_fineweb(server: Server) -> None:
    """A server of our own instead of the Hub, with a dataset of the same name and layout."""
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
    """A reader's folder: a checkout, and a text."""
    folder = tmp_path_factory.mktemp("readme")
    shutil.copy(ROOT / "Makefile", folder / "Makefile")
    for name in ("pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, folder / name)
    write_text(folder / "my_text.txt", words=20_000)
    return folder


@pytest.fixture(scope="module")
def environment(folder: Path, launcher: Launcher):
    server = Server()
    fake_fineweb(server)
    binaries = folder / "bin"
    binaries.mkdir()
    program = launcher.write_program(binaries / "handgrad")
    torchrun = binaries / "torchrun"
    torchrun.write_text(f'#!/bin/sh\nexec {sys.executable} -m torch.distributed.run "$@"\n')
    torchrun.chmod(0o755)
    yield {
        **{name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"},
        "PATH": f"{binaries}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "PYTHON_EXEC": str(program),  # for torchrun's ranks
        "HF_ENDPOINT": server.url,
        "HANDGRAD_CACHE": str(folder / "cache"),
    }
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("number", range(len(BLOCKS)), ids=lambda n: BLOCKS[n].split("\n")[0][:60])
def test_block(number: int, folder: Path, environment: dict[str, str], launcher: Launcher) -> None:
    block = BLOCKS[number]
    if block.startswith("make "):
        # `make test` runs this test, and CI runs `make train`: here their recipes must exist and expand.
        targets = re.findall(r"^make (\w+)", block, re.MULTILINE)
        assert targets == ["train", "test"]
        block = f"make --dry-run {' '.join(targets)}"
    if re.search("shards/(mine|sprites|questions)", block):  # a tenth of the steps shows that they run
        block = re.sub(r"(--steps |steps=|steps\()(\d+)0\b", r"\1\2", block)
    if block.startswith("import "):
        (folder / "block.py").write_text(block)
        launcher.run(1, ["block.py"], cwds=[folder])
        return
    command = ["bash", "-euo", "pipefail", "-c", block]
    run = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, f"{block}\n{run.stdout}\n{run.stderr}"


def test_results_of_the_blocks(folder: Path) -> None:
    """The blocks did what the text around them says. (Runs after them.)"""
    assert "is finished" in (folder / "runs/mine/log.txt").read_text()
    compared = (folder / "compared.html").read_text()
    assert all(re.search(rf"\b{name}\b", compared) for name in ("mine", "3e-3", "6e-3")), "all runs by name"
    overfit = [json.loads(line) for line in (folder / "runs/overfit/metrics.jsonl").read_text().splitlines()]
    losses = [record["loss"] for record in overfit if record["kind"] == "step"]
    assert losses[-1] < 0.25 * losses[0], "one batch is learnt by heart"
    manifest = json.loads((folder / "shards/fineweb/manifest.json").read_text())
    assert sum(split["documents"] for split in manifest["splits"].values()) == 500
    assert json.loads((folder / "shards/bpe/manifest.json").read_text())["tokenizer"]["kind"] == "bpe"


def result(name: str) -> dict[str, Any]:
    """A results file; empty if it is not there."""
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else {}


STEPS = ("124m", "350m", "774m", "774m-without-liger", "1558m")
FP8_STEPS = ("fp8-head-step-124m", "fp8-head-step-350m", "fp8-head-step-774m", "fp8-head-step-1558m")


def line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def gigabytes(gib: float) -> str:
    return f"{gib * 2**30 / 1e9:.1f}"


def fastest_fp8_twin(rows: dict[str, Any]) -> dict[str, Any] | None:
    twins = [r for n, r in rows.items() if "tokens_per_second" in r and n.startswith("twin") and r["precision"] == "fp8"]
    return max(twins, key=lambda row: row["tokens_per_second"]) if twins else None


def fp8_row(name: str) -> str:
    """An fp8 run beside torchao's and handgrad's bf16, as far as they alternated."""
    record = result(f"h200-{name}")
    rows, model = record["figures"], re.findall(r"\d+m", name)[0]
    ours = rows["handgrad-fp8"]
    others = fastest_fp8_twin(rows), rows.get("handgrad")
    return line(
        f"{model.upper()} fp8",
        str(record["settings"]["micro_batch"]),
        f"**{ours['tokens_per_second'] / 1e3:.1f}k**",
        f"{ours['mfu']:.1%}",
        f"{ours['mean_watts']:.0f}",
        f"{ours['millijoules_per_token']:.3g}",
        gigabytes(ours["allocated_gib"]),
        *(f"{other['tokens_per_second'] / 1e3:.1f}k" if other else "–" for other in others),
        *(f"{ours['tokens_per_second'] / other['tokens_per_second']:.2f}x" if other else "–" for other in others),
    )


SAMPLING = {model: result(f"h200-sampling-{model.lower()}") for model in ("124M", "1558M")}


def sampling_rows() -> list[str]:
    """Tokens per second of texts, beside transformers, and the share of the limit set by reading the weights."""
    lines = []
    for model, record in SAMPLING.items():
        rows = {(row["contender"], row["batch"]): row for row in record["rows"] if row["prompt_tokens"] == 32}
        for batch in sorted({batch for name, batch in rows if name == "transformers-compiled"}):
            ours, eager, compiled = (rows[name, batch] for name in ("handgrad", "transformers", "transformers-compiled"))
            speeds = [row["tokens_per_second"] for row in (ours, eager, compiled)]
            lines.append(
                line(
                    f"{model}, {batch} text{'s' * (batch > 1)}",
                    f"**{speeds[0]:.0f}**",
                    *(f"{speed:.0f}" for speed in speeds[1:]),
                    *(f"{speeds[0] / speed:.1f}x" for speed in speeds[1:]),
                    f"{ours['of_limit']:.1%}" if batch == 1 else "–",
                )
            )
    return lines


def step_rows(name: str) -> list[str]:
    """Every contender in bf16 of a run."""
    return [
        line(
            name.partition("-")[0].upper(),
            contender,
            f"{row['tokens_per_second'] / 1e3:.1f}k",
            f"{row['mfu']:.1%}",
            f"{row['milliseconds_per_step']:.1f}",
            f"{row['mean_watts']:.0f}",
            f"{row['mean_sm_megahertz']:.0f}",
            f"{row['millijoules_per_token']:.3g}",
            gigabytes(row["allocated_gib"]),
            gigabytes(row["reserved_gib"]),
            f"{row['times_best_twin']:.3f}",
        )
        for contender, row in result(f"h200-step-{name}")["figures"].items()
        if row.get("precision") == "bf16" and "tokens_per_second" in row
    ]


CHAPTERS = {  # others: the name's first word
    "bias_backward": "linear",
    "adamw_update": "adamw",
    "squared_norms": "norm",
    "tree_sum": "reduction",
    "checksum": "reduction",
}
CHANNELS = {"124M": 768, "1558M": 1600}


def kernel_rows() -> list[str]:
    """An operation's share of a copy's bandwidth at both sizes, and torch.compile's time over ours."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for row in result("h200-kernels")["figures"]:
        name, _, width = row["operation"].partition(" ")
        label = f"{name}, {int(width) // CHANNELS[row['size']]}C wide" if width else name
        known = row["size"] in CHANNELS
        found.setdefault(label if known else f"{name}, {row['size']}", {})[row["size"] if known else "124M"] = row
    lines = []
    for label, sizes in found.items():
        name, comma, rest = label.partition(",")
        rows = [sizes.get(size) for size in CHANNELS]
        lines.append(
            line(
                f"[`{name}`](operations/{CHAPTERS.get(name, name.split('_')[0])}.md#the-kernel){comma}{rest}",
                *(f"{row['share_of_copy']:.1%}" if row else "–" for row in rows),
                *(f"{row['compiled_milliseconds'] / row['milliseconds']:.2f}x" if row else "–" for row in rows),
            )
        )
    return lines


def loss_lines() -> list[str]:
    if not (record := result("h200-loss")):
        return []
    s = record["settings"]
    size = f"{s['micro_steps']} x {s['micro_batch']} x {s['sequence_length']}"
    return [
        f"{s['model']}, {s['steps']} steps of {size} tokens, learning rate {s['learning_rate']:g} at its peak"
        " ([figures](../benchmarks/results/h200-loss.json)):",
        "| from " + record["measure"] + ", nats per token | first | largest | mean | late mean |",
        *(
            line(name, f"{d['first']:.5f}", f"{d['largest']:.4f}", f"{d['mean']:.4f}", f"{d['late_mean']:+.4f}")
            for name, d in record["differences"].items()
        ),
    ]


def ladder_lines() -> list[str]:
    if not (record := result("h200-ladder")):
        return []
    s = record["settings"]
    size = f"{s['micro_steps']} x {s['micro_batch']} x {s['sequence_length']}"
    return [
        f"{s['model']}, steps of {size} tokens, {s['seconds']:g} s a row"
        " ([figures](../benchmarks/results/h200-ladder.json)):",
        *(
            line(
                row["title"],
                f"{row['milliseconds_per_micro_batch']:.1f}",
                f"{row['tokens_per_second'] / 1e3:.1f}k",
                f"{row['gain']:.2f}x" if "gain" in row else "",
                f"{row['gain_from_the_bottom']:.2f}x" if "gain_from_the_bottom" in row else "",
                f"{row['reserved_bytes'] / 1e9:.1f}",
                f"{row['first_step_seconds']:.1f}",
            )
            if "tokens_per_second" in row
            else line(row["title"], "failed", *[""] * 5)
            for row in record["figures"]
        ),
    ]


def quoted() -> dict[str, list[str]]:
    """The table lines of each page, made from the results."""
    return {
        "docs/sampling.md": sampling_rows(),
        "docs/results.md": [
            *(row for name in STEPS for row in step_rows(name)),
            *(fp8_row(name) for name in FP8_STEPS),
            *kernel_rows(),
            *loss_lines(),
            *ladder_lines(),
        ],
    }


SECTIONS = {"docs/sampling.md": "On a GPU", "docs/results.md": "On one H200"}


def section(page: str, heading: str = "") -> str:
    text = (ROOT / page).read_text()
    return text.split(f"\n## {heading or SECTIONS[page]}\n")[1].split("\n## ")[0]


@pytest.mark.parametrize("page", SECTIONS)
def test_the_tables_are_those_of_the_results(page: str) -> None:
    """Tables made on a GPU, line by line: none missing, none changed, none left over from an earlier run."""
    lines = section(page).split("\n")
    expected = quoted()[page]
    missing = [row for row in expected if row not in lines]
    assert not missing, "\n".join(["not in the page; `python -m tests.test_readme` prints all:", *missing])
    rows = [row for row in lines if row.startswith(tuple(f"| {model} |" for model in speed.MODELS))]
    assert sorted(rows) == sorted(row for row in expected if row in rows), "a row is left over"


def test_the_picture_shows_the_results() -> None:
    """It carries a digest of the figures that it was drawn from; `python -m benchmarks.speed` draws it anew."""
    with Image.open(speed.PICTURE) as picture:
        assert picture.info["Figures"] == speed.digest()


def test_the_readmes_run_is_the_recorded_one() -> None:
    """`make pictures` draws the lines of the record: the numbers, the speed and the story of one run."""
    with Image.open(ROOT / "docs" / "terminal.png") as picture:
        assert picture.info["Lines"] == terminal_pictures.digest(terminal_pictures.demo_lines())
    seconds = next(c["seconds"] for c in result("cpu-first-minutes")["commands"] if c["command"] == "make train")
    assert "ends like this after two to three minutes on two CPU cores" in PAGES["README.md"] and 120 <= seconds <= 180


def test_the_readme_is_short_and_links_to_what_runs() -> None:
    lines = PAGES["README.md"].splitlines()
    assert len(lines) <= 120
    headings = re.findall(r"^## (.*)$", PAGES["docs/tour.md"], re.MULTILINE)
    anchors = [re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings]
    assert re.findall(r"docs/tour\.md#([^)]*)", PAGES["README.md"]) == anchors


def test_the_text_says_how_it_was_measured() -> None:
    text = " ".join(section("docs/results.md").split())
    records = [result(f"h200-step-{name}") for name in STEPS]
    for record in records:
        assert f"{record['peak_flop_per_second'] / 1e12:.1f} TFLOP/s" in text
        assert f"torch {record['versions']['torch']}, Triton {record['libraries']['triton']}," in text
        assert record["settings"]["micro_steps"] == 8
    turns, wholes = ([record["settings"][name] for record in records] for name in ("turn_seconds", "seconds"))
    ranges = f"slices of {min(turns):g} to {max(turns):g} s, {min(wholes):g} to {max(wholes):g} s each"
    assert f"alternate in {ranges}" in text


if __name__ == "__main__":
    for _page, _rows in quoted().items():
        print("\n".join([f"\n{_page}\n", *_rows]))
