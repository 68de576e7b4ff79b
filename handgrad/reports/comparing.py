"""Compares runs side by side: a row per run, columns that sort on a click, and equal facts stated once."""

import json
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from handgrad.reports import results
from handgrad.reports.results import Run, loss_text
from handgrad.reports.sections import NUMBER, faint, section, setting, swatch, text, warning


class Column(NamedTuple):
    """A fact about a run: the value that sorts it, and its text."""

    name: str
    value: Callable[[Run], float | str]
    text: Callable[[Run], str]


def measured(name: str, value: Callable[[Run], float], form: Callable[[float], str]) -> Column:
    """A column of numbers."""
    return Column(name, value, lambda run: form(value(run)))


def named(name: str, fact: Callable[[Run], str]) -> Column:
    """A column of words."""
    return Column(name, fact, lambda run: fact(run) or results.DASH)


def speed(run: Run) -> float:
    return results.median(run.steps.tokens_per_second)


def seconds(run: Run) -> float:
    return results.seconds_in_steps(run) or math.nan


def data(run: Run) -> str:
    return f"{run.start.data.folder} ({run.start.data.identity[:8]})" if run.start.data.folder else ""


COLUMNS = (
    Column("validation loss", results.final_validation, results.validation_text),
    measured("best", lambda run: results.best_validation(run)[1], loss_text),
    measured("training loss", results.final_training_loss, loss_text),
    measured(
        "perplexity",
        lambda run: math.nan if run.pairs or results.squares(run) else results.final_validation(run),
        results.perplexity_text,
    ),
    measured("bits per byte", lambda run: results.bits_per_byte(run, results.final_validation(run)), loss_text),
    Column("above the floor", results.final_validation, lambda run: results.floor_text(run, results.final_validation(run))),
    measured("steps", results.steps_done, "{:,}".format),
    measured("tokens", results.tokens_seen, results.short_text),
    measured("tokens per second", speed, results.count_text),
    measured("model FLOP/s", lambda run: run.start.flops_per_token * speed(run), results.short_text),
    measured("time in steps", seconds, lambda taken: results.shown(taken, results.duration_text)),
    measured("started", lambda run: run.starts[0].time, results.date_text),
    measured("parameters", lambda run: run.start.parameters, results.count_text),
    measured("planned memory", lambda run: math.fsum(run.start.memory_bytes.values()) or math.nan, results.bytes_text),
    named("precision", lambda run: run.start.precision),
    named("device", lambda run: run.start.device),
    named("host", lambda run: run.start.host),
    named("data", data),
)


def comparison(runs: Sequence[Run]) -> str:
    """Results and differing settings, a row per run. Columns that are equal in all runs become one sentence."""
    ours = [run for run in runs if not run.is_log]
    differing, equal = [], []
    for column in COLUMNS:
        texts = {text for run in runs if (text := column.text(run)) != results.DASH or not run.is_log}
        if len(texts) > 1 or column is COLUMNS[0]:
            differing.append(column)
        elif texts - {results.DASH}:
            equal.append(f"{column.name} {texts.pop()}")
    parts = [rows_of_runs(runs, differing)]
    same = "The same in all runs of ours" if len(ours) < len(runs) else "The same in all runs"
    note = "Losses in nats per token, the training loss a mean over the last 2 % of the steps; speeds are medians."
    parts.append(faint(f"{note} {same}: {'; '.join(equal)}." if equal else note))
    if len({(run.start.data.identity, run.start.data.tokenizer, run.start.vocab_size) for run in ours}) > 1:
        parts.append(
            warning(
                "The runs were not trained on the same shards. Losses per token compare only under the same tokenizer and"
                " validation text; bits per byte, under the same validation text."
            )
        )
    if logs := [run.name for run in runs if run.is_log]:
        them = "A log" if len(logs) == 1 else "Logs"
        parts.append(faint(f"{them} in llm.c's format, with steps of unknown size and data: {', '.join(logs)}."))
    settings = [setting_column(key, ours) for key in differing_settings(ours)]
    difference = rows_of_runs(runs, settings, with_logs=False) if settings else faint("None but the folder.")
    return section("Results", *parts) + section("Settings that differ", difference if len(ours) > 1 else "")


def differing_settings(runs: Sequence[Run]) -> list[str]:
    """Keys of config.toml that differ, except the folder, which names the run, and trackers, which change no result."""
    keys = sorted({key for run in runs for key in run.config} - {"out", "log_to"})
    return [key for key in keys if len({plain(run, key) for run in runs}) > 1]


def setting_column(key: str, runs: Sequence[Run]) -> Column:
    """A setting of the runs, its numbers with three digits, or as many as tell them apart."""
    numbers = {value for run in runs if isinstance(value := run.config.get(key), float)}
    digits = next((d for d in range(3, 17) if len({f"{n:.{d}g}" for n in numbers}) == len(numbers)), 17)
    return named(key, lambda run: plain(run, key, digits))


def plain(run: Run, key: str, digits: int = 17) -> str:
    """A setting as text without TOML's quotes; "" if it is empty or the run does not know it."""
    value = run.config.get(key, "")
    return value if isinstance(value, str) else f"{value:.{digits}g}" if isinstance(value, float) else setting(run, key)


def rows_of_runs(runs: Sequence[Run], columns: Sequence[Column], *, with_logs: bool = True) -> str:
    """A sortable table with a row for each of `runs`, in the colours of their curves."""
    head = "".join(f"<th{right(column, runs)}><button>{breakable(column.name)}</button></th>" for column in columns)
    rows = []
    for index, run in enumerate(runs):
        if run.is_log and not with_logs:
            continue
        cells = [
            f'<td{right(column, runs)} data-key="{text(json.dumps(sort_key(column, run)))}">{text(column.text(run))}</td>'
            for column in columns
        ]
        name = f'<th data-key="{text(json.dumps(run.name))}">{swatch(index)}{text(run.name)}</th>'
        rows.append(f"<tr>{name}{''.join(cells)}</tr>")
    body = f"<thead><tr><th><button>run</button></th>{head}</tr></thead><tbody>{''.join(rows)}</tbody>"
    return f'<div class="scroll{" broad" * (len(columns) > 6)}"><table class="sortable">{body}</table></div>'


def breakable(name: str) -> str:
    """The name of a column as HTML that may break after an underscore."""
    return text(name).replace("_", "_<wbr>")


def sort_key(column: Column, run: Run) -> float | str | None:
    """A number, a text, or None for an unknown number, which sorts last."""
    value = column.value(run)
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value
    return float(value) if math.isfinite(value) else None


def right(column: Column, runs: Sequence[Run]) -> str:
    """The HTML class that right-aligns a column of numbers; "" for other columns."""
    return ' class="number"' if all(NUMBER.fullmatch(column.text(run)) for run in runs) else ""
