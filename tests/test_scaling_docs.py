"""The tables of docs/distributed.md about several GPUs are those of the results.

python -m tests.test_scaling_docs      prints them, to paste
"""

from pathlib import Path

import pytest

from benchmarks import efficiency

ROOT = Path(__file__).parents[1]
RUNS = {"124M": "h200-x4-scaling-124m", "1558M": "h200-x4-scaling-1558m"}


def mean(rows: list[dict], contender: str, key: str = "tokens_per_second") -> float:
    found = [row[key] for row in rows if row["contender"] == contender]
    return sum(found) / len(found)


def scaling_rows() -> list[str]:
    """Per model: handgrad on four GPUs, its share of four times one, and the twins."""
    lines = []
    for model, name in RUNS.items():
        record = efficiency.measured(name)
        rows = record["rows"]
        together, alone = mean(rows, "together"), mean(rows, "alone")
        slowest = [4 * min(row["tokens_per_second_by_gpu"]) for row in rows if row["contender"] == "alone"]
        share = together / (sum(slowest) / len(slowest))
        names = ("together", "ddp", "fsdp")
        memory = [mean(rows, name, "allocated_gib") * 1.073741824 for name in names]
        cells = [
            model,
            f"{record['settings']['micro_batch']}",
            f"**{together / 1e3:.0f}k**",
            f"{share:.1%}",
            f"{together / alone:.1%}",
            *(f"{speed / 1e3:.0f}k" for speed in (mean(rows, "ddp"), mean(rows, "fsdp"))),
            " / ".join(f"{size:.0f}" for size in memory),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


@pytest.mark.nightly(but=["scaling_rows"])
@pytest.mark.parametrize("made", [scaling_rows, efficiency.lines])
def test_the_tables_are_those_of_the_results(made) -> None:
    lines = (ROOT / "docs" / "distributed.md").read_text().split("\n")
    missing = [row for row in made() if row not in lines]
    assert not missing, "\n".join(["not in the page; `python -m tests.test_scaling_docs` prints all:", *missing])


def agreement() -> str:
    """The sentence that holds the arithmetic against the runs that it starts from, in points of their efficiency."""
    predicted, found = [], []
    for model in efficiency.models():
        rows = efficiency.measured(f"h200-x4-scaling-{model.name.lower()}")["rows"]
        micro_steps = 524288 // (model.micro_batch * 1024 * 4)
        predicted.append(100 * efficiency.efficiency(model, efficiency.networks()[0], 4, micro_steps))
        found.append(100 * mean(rows, "together") / (4 * model.tokens_per_second))
    high = [more - less for more, less in zip(predicted, found, strict=True)]
    expected, measured, off = (" and ".join(f"{value:.1f}" for value in values) for values in (predicted, found, high))
    predicts = f"For the four GPUs above it predicts {expected} %. The runs reached {measured} %."
    return f"{predicts} So it is {off} points too high."


def test_arithmetic_agrees_with_what_was_measured() -> None:
    """To the digit as the page says: `python -m tests.test_scaling_docs` prints the sentence. What the estimate leaves out
    only costs time."""
    assert agreement() in " ".join((ROOT / "docs" / "distributed.md").read_text().split())
    assert "-" not in agreement()


if __name__ == "__main__":
    print("\n".join([*scaling_rows(), "", *efficiency.lines(), "", agreement()]))
