"""The sections of the report page as HTML. Everything from a run goes through `text`."""

import base64
import html
import json
import math
import re
import shlex
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from handgrad.errors import DataError, UsageError
from handgrad.networks import NETWORKS
from handgrad.networks.fp8 import gradient_format
from handgrad.reports import results
from handgrad.reports.plots import FEW_RUNS, RUN_COLORS, dash_of
from handgrad.reports.results import Run, loss_text, thin
from handgrad.settings.config import FIELDS, TUNED, RunConfig, convert
from handgrad.storage.run_files import CONFIG_FILE, SAMPLES as SAMPLES_FOLDER

SAMPLES = 6  # per run, spread from the first to the last
SAMPLE_CHARACTERS, MOST_PICTURE_BYTES = 4000, 1 << 20
NUMBER = re.compile(r"(± )?[-+–∞]?[\d,.]*([kMGTPE]| [%a-zA-Z]+)?")
SATURATION = "clipped numbers in"  # identifies events about saturated fp8 tensors
ROWS = 100  # of the long tables: events, skipped updates, validations
SHAPE_WORDS = {"num_layers": "layers", "num_heads": "heads", "channels": "channels", "sequence_length": "positions"}


def text(value: object) -> str:
    """`value` as HTML text. Control characters, which a byte-level model may write, become visible symbols."""
    visible = re.sub(r"[\x00-\x08\x0b-\x1f\x7f]", lambda match: chr(0x2400 + min(ord(match.group()), 0x21)), str(value))
    return html.escape(visible)


def faint(words: str) -> str:
    return f'<p class="faint">{text(words)}</p>'


def warning(words: str) -> str:
    return f'<p class="warning">{text(words)}</p>'


def table(head: Sequence[object], rows: Iterable[Sequence[object]], *, total: bool = False, kind: str = "") -> str:
    """A table whose first column names the rows; columns of numbers are right-aligned. `total` sets off the last row. With
    `kind` "cards", a phone shows each row as a card, its cells below each other with their headings."""
    cells_of_rows = [[str(cell) for cell in row] for row in rows]
    numeric = [i > 0 and all(NUMBER.fullmatch(row[i]) for row in cells_of_rows) for i in range(len(head))]

    def cells(row: Sequence[object], names: int) -> str:
        """The cells of a row; the first `names` of them are headings."""
        tags = ["th" if i < names else "td" for i in range(len(row))]
        marks = [' class="number"' if is_number else "" for is_number in numeric]
        if kind == "cards" and names == 1:
            marks = [f'{mark} data-label="{text(name)}"' for mark, name in zip(marks, head, strict=True)]
        return "".join(f"<{t}{mark}>{text(cell)}</{t}>" for t, mark, cell in zip(tags, marks, row, strict=True))

    body = [f"<tr>{cells(row, 1)}</tr>" for row in cells_of_rows]
    if total and body:
        body[-1] = body[-1].replace("<tr>", '<tr class="total">', 1)
    header = f"<thead><tr>{cells(head, len(head))}</tr></thead>" if any(head) else ""
    named = f' class="{kind}"' if kind else ""
    return f'<div class="scroll"><table{named}>{header}<tbody>{"".join(body)}</tbody></table></div>'


def section(title: str, *contents: str) -> str:
    content = "\n".join(content for content in contents if content)
    return f"<section>\n<h2>{text(title)}</h2>\n{content}\n</section>" if content else ""


def folded(summary: str, content: str) -> str:
    return f"<details><summary>{text(summary)}</summary>\n{content}\n</details>"


def swatch(index: int) -> str:
    """The line of the run at `index` in the plots: its colour and its dash."""
    stroke = f'stroke="var(--run{index % RUN_COLORS})" stroke-dasharray="{dash_array(index)}"'
    return f'<svg class="swatch" viewBox="0 0 24 8" aria-hidden="true"><path d="M0 4H24" {stroke}/></svg>'


def dash_array(index: int) -> str:
    """The dash of the run at `index`, for a line as wide as a swatch's."""
    return " ".join(f"{2 * length:g}" for length in dash_of(index)) or "none"


def per_run(runs: Sequence[Run], make: Callable[[Run], str], *, fold: bool = True) -> str:
    """`make(run)` for each run, under its name if there are several; leaves out runs with nothing to show. With `fold`, a
    click on the name shows it if there are many."""
    if len(runs) == 1:
        return make(runs[0])
    named = [(f"{swatch(index)}{text(run.name)}", make(run)) for index, run in enumerate(runs)]
    form = "<h3>{}</h3>\n{}" if len(runs) <= FEW_RUNS or not fold else "<details><summary>{}</summary>\n{}\n</details>"
    return "\n".join(form.format(*part) for part in named if part[1])


def description(run: Run) -> str:
    """One paragraph: the model, its data, where it ran and how far it got."""
    if run.is_log:
        words = f"The losses in {run.folder}, a log in llm.c's format: {results.steps_done(run):,} steps."
        return f"<p>{text(words)}</p>"
    start, data, count = run.start, run.start.data, results.count_text
    shape = [f"{run.config[key]} {word}" for key, word in SHAPE_WORDS.items() if key in run.config]
    of_shape = f" of {', '.join(shape[:-1])} and {shape[-1]}" if len(shape) > 1 else ""
    counts = data.train_tokens > 0 and not run.rewards  # not prompts, which answers follow
    epochs = results.tokens_seen(run) / data.train_tokens if counts else math.nan
    passes = f", {epochs:.3g} times the training data" if math.isfinite(epochs) else ""
    frozen = start.trained_parameters < start.parameters
    trained = f" ({count(start.trained_parameters)} of them not frozen)" if frozen else ""
    architecture = str(run.config.get("architecture", "gpt2"))
    network = f"{NETWORKS[architecture].title if architecture in NETWORKS else architecture}{of_shape}"
    sizes = ", then ".join(f"{stage.tokens_per_step:,}" for stage in start.batch.stages)
    words = (
        f"A {network}: {count(start.parameters)} parameters{trained}, trained with gradients written by hand on"
        f" {data.folder} ({count(data.train_tokens)} tokens, tokenizer {data.tokenizer}, vocabulary"
        f" {count(start.vocab_size)}), in {start.precision} on {start.device}. It has done {results.steps_done(run):,} of"
        f" {start.steps:,} steps of {sizes} tokens: {results.short_text(results.tokens_seen(run))}"
        f" tokens{passes}, in {results.duration_text(results.seconds_in_steps(run))} of steps.{fp8_sentence(run)}"
    )
    return f"<p>{text(words)}</p>"


def fp8_sentence(run: Run) -> str:
    """Names the GEMMs that an fp8 run was configured to run in fp8; the history lists GEMMs that left fp8 later."""
    if run.start.precision != "fp8":
        return ""
    from handgrad.joins.fp8.tables import fp8_gemms  # loading torch takes longer than writing most reports

    try:
        known = {name: convert(name, value) for name, value in run.config.items() if name in FIELDS}
        config = replace(RunConfig(**known), precision="fp8")
        layers, parts = config.num_layers, config.shape(1).fp8_parts
        in_bf16 = config.fp8_keep_bf16.replace(TUNED, "")
        products = fp8_gemms(in_bf16, config.fp8_head_gemms, layers, parts).describe(layers, parts)
    except UsageError as error:
        raise DataError(f"{run.folder / CONFIG_FILE}: {error}; repair that line or restore the file") from None
    gradients = f"gradients in {gradient_format(config)}, {config.fp8_scaling} scaling"
    return f" In fp8: the products {products}; {gradients}; the rest in bf16."


def warnings(run: Run) -> str:
    """Facts to know before trusting the numbers."""
    sentences = []
    if len(broken := run.steps.step[~(abs(run.steps.loss) < math.inf)]):
        sentences.append(f"The loss was not finite in {len(broken):,} steps, first in step {broken[0]:.0f}.")
    if run.skipped:
        sentences.append(f"{len(run.skipped):,} updates were skipped; they are listed below.")
    if saturated := [step for step, event in run.events if SATURATION in event]:
        times = "once" if len(saturated) == 1 else f"{len(saturated):,} times, first"
        sentences.append(f"Tensors in fp8 saturated {times} in step {saturated[0]:,}; they are listed below.")
    if run.last_line_cut:
        sentences.append("The last line of metrics.jsonl was cut in half, as a kill does, and is left out.")
    return warning(" ".join(sentences)) if sentences else ""


def tiles(run: Run) -> str:
    """The headline numbers of one run."""
    if run.validations:
        loss, last_step = results.final_validation(run), run.validations[-1][0]
        note = f"{results.measure_of(run)[0]}, step {last_step:,}"
        best_step, best_loss = results.best_validation(run)
        if best_step not in (0, last_step):
            note += f"; best {loss_text(best_loss)} in step {best_step:,}"
        shown = [("Validation loss", results.validation_text(run), note)]
    else:
        loss = results.final_training_loss(run)
        unit = "nats per token from the teacher" if run.start.teacher else results.measure_of(run)[0]
        shown = [("Training loss", loss_text(loss), f"{unit}; no validation yet")]
    if run.rewards:
        step = max(run.rewards)
        reward, stderr, _ = run.rewards[step]
        shown = shown if run.validations else []  # the divergence from a teacher; else no loss has an aim
        shown.append(("Reward", f"{reward:.4f}", f"± {stderr:.4f} on held-out prompts, step {step:,}"))
    elif run.pairs:
        accuracy, margin = run.pairs[max(run.pairs)]
        shown.append(("Accuracy", f"{accuracy:.1%}", f"of pairs; mean margin {margin:+.3f}"))
    elif run.validations or not run.start.teacher:
        _, name, other_unit = results.measure_of(run)
        shown.append((name[:1].upper() + name[1:], other_unit(loss), "" if results.squares(run) else "per token"))
    if run.validations and not math.isnan(bits := results.bits_per_byte(run, loss)):
        shown.append(("Bits per byte", loss_text(bits), "of validation text"))
    if (above := results.floor_text(run, loss)) != results.DASH:
        shown.append(("Above the floor", above, f"source entropy {loss_text(run.start.floor_nats_per_token)}"))
    per_step = f"median; {results.median(run.steps.step_ms):,.0f} ms per step"
    shown.append(("Tokens per second", results.count_text(results.median(run.steps.tokens_per_second)), per_step))
    row = '<div class="tile"><dt>{}</dt><dd class="value">{}</dd><dd class="note">{}</dd></div>'
    return f'<dl class="tiles">{"".join(row.format(*map(text, tile)) for tile in shown)}</dl>'


def setting(run: Run, key: str) -> str:
    return json.dumps(run.config[key], ensure_ascii=False, default=str) if key in run.config else results.DASH


def picture(run: Run, step: int) -> str:
    """The picture of a sample, inline; "" for a sample of text."""
    path = run.folder / SAMPLES_FOLDER / f"step_{step:08d}.png"
    if run.is_log or not path.is_file() or path.stat().st_size > MOST_PICTURE_BYTES:
        return ""
    return f'<img class="picture" alt="picture" src="data:image/png;base64,{base64.b64encode(path.read_bytes()).decode()}">'


def samples(run: Run) -> str:
    shown = []
    for index in thin(len(run.samples), SAMPLES):
        step, sample = run.samples[index]
        cut = sample if len(sample) <= SAMPLE_CHARACTERS else sample[:SAMPLE_CHARACTERS] + " …"
        shown.append(
            f'<div class="sample"><span class="faint">step {step:,}</span>{picture(run, step)}<pre>{text(cut)}</pre></div>'
        )
    if left_out := len(run.samples) - len(shown):
        shown.append(faint(f"{left_out:,} more samples are in metrics.jsonl."))
    return "\n".join(shown)


def history(run: Run) -> str:
    """Launches, events and skipped updates."""
    if run.is_log:
        return ""
    head, starts = ["start", "date", "first step", "precision", "host", "device", "handgrad", "torch"], list[list[object]]()
    for number, (first, start) in enumerate(zip(run.first_steps, run.starts, strict=True), start=1):
        first_step = results.DASH if first is None else f"{first:,}"
        machine = start.precision, start.host or results.DASH, start.device
        commit = f"{start.handgrad} {start.commit}".strip()
        starts.append([number, results.date_text(start.time), first_step, *machine, commit, start.torch])
    tables = [table(head, starts[-ROWS:], kind="cards")]
    if commands := dict.fromkeys(start.command for start in run.starts if start.command):
        tables.append(preformatted(commands))
    noted = {"event": run.events, "update skipped because": [*run.skipped.items()]}
    for head, notes in noted.items():
        if notes:
            tables.append(table(["step", head], [[f"{step:,}", note] for step, note in notes[-ROWS:]], kind="notes"))
    if max(map(len, (starts, *noted.values()))) > ROWS:
        tables.append(faint(f"Tables end with the last {ROWS} rows; metrics.jsonl has all."))
    return "\n".join(tables)


def validations(run: Run) -> str:
    if run.rewards:
        taught = dict(run.validations)  # with a teacher: the divergence from it
        figures = {step: (*known, taught[step]) if step in taught else known for step, known in run.rewards.items()}
        names = ["step", "reward", "standard error", "KL from the start", *(["KL from the teacher"] if taught else [])]
        return table(names, [[f"{step:,}", *map(loss_text, known)] for step, known in figures.items()])
    unit, name, other_unit = results.measure_of(run)
    rows, sets = [], list(dict.fromkeys(name for losses in run.sets.values() for name in losses))
    for index in thin(len(run.validations), ROWS):
        step, loss = run.validations[index]
        tokens, bits = results.short_text(run.start.batch.tokens_before(step)), results.bits_per_byte(run, loss)
        if run.pairs:
            accuracy, margin = run.pairs.get(step, (math.nan, math.nan))
            rows.append([f"{step:,}", tokens, loss_text(loss), f"{accuracy:.1%}", f"{margin:+.4f}"])
            continue
        each = [loss_text(run.sets.get(step, {}).get(name, math.nan)) for name in sets]
        rows.append([f"{step:,}", tokens, loss_text(loss), other_unit(loss), loss_text(bits), *each])
    figures = [unit, "accuracy", "margin"] if run.pairs else [unit, name, "bits per byte"]
    return table(["step", "tokens", *figures, *sets], rows) if rows else ""


def tasks(runs: Sequence[Run]) -> str:
    """The newest figure of every task and metric, of all runs in one table."""
    head, rows = ["task", "metric", "run", "value", "standard error", "examples", "step"], []
    for task, metric in dict.fromkeys(key for run in runs for key in run.tasks):
        for run in runs:
            if figures := run.tasks.get((task, metric)):
                step, figure = figures[-1]
                stderr = results.shown(figure.stderr, "± {:.4f}".format)
                rows.append([task, metric, run.name, loss_text(figure.value), stderr, f"{figure.examples:,}", f"{step:,}"])
    if len(runs) == 1:
        head, rows = head[:2] + head[3:], [row[:2] + row[3:] for row in rows]
    return table(head, rows, kind="tasks") if rows else ""


def memory(run: Run) -> str:
    """Planned device memory per component."""
    if not run.start.memory_bytes:
        return ""
    total = math.fsum(run.start.memory_bytes.values())
    sizes = {**run.start.memory_bytes, "total": total}
    rows = [[k.replace("_", " "), results.bytes_text(n), f"{100 * n / (total or 1):.1f} %"] for k, n in sizes.items()]
    return table(["", "size", "share"], rows, total=True)


def fp8(run: Run) -> str:
    """The last statistics of an fp8 run, by class of tensors."""
    step, classes = run.fp8[-1] if run.fp8 else (0, {})
    rows: list[list[Any]] = []
    for name, statistics in classes.items():
        scales = results.scales_text(statistics.smallest_scale, statistics.largest_scale)
        largest = results.shown(statistics.largest_amax, "{:.3g}".format)
        fractions = map(results.fraction_text, (statistics.clipped_fraction, statistics.vanished_fraction))
        where = statistics.most_vanished.removesuffix(f".{name}") if statistics.vanished_fraction > 0 else results.DASH
        rows.append([name, largest, scales, *fractions, where])
    head = ["", "largest magnitude", "scale", "clipped", "vanished", "most in"]
    return table(head, rows) + faint(f"In step {step:,}; of each class of tensors the worst layer.") if rows else ""


def ranks(run: Run) -> str:
    """Each rank that the others waited for, and for how long."""
    rows = []
    for rank in sorted({pace.slowest for pace in run.paces}):
        slowest = [pace for pace in run.paces if pace.slowest == rank]
        ahead = [pace.slowest_ms / pace.median_ms - 1 for pace in slowest if pace.median_ms]
        share = f"{100 * len(slowest) / len(run.paces):.0f} %"
        longest = max(pace.slowest_ms for pace in slowest)
        rows.append([f"rank {rank}", share, f"{100 * math.fsum(ahead) / max(1, len(ahead)):.1f} %", f"{longest:.1f} ms"])
    head = ["slowest", "of the reports", "behind the median, mean", "longest step of its own work"]
    note = "All ranks wait for the slowest. Its own work is its micro-batches, without waiting for others."
    return table(head, rows) + faint(note) if rows else ""


def preformatted(lines: Iterable[str]) -> str:
    return f"<pre>{text(chr(10).join(lines))}</pre>"


def settings(run: Run) -> str:
    return preformatted(f"{key} = {setting(run, key)}" for key in run.config) if run.config else ""


def commands(run: Run) -> str:
    """Commands to type next. `steps` shapes the schedule, so a finished run cannot go on; they start another one."""
    if run.is_log:
        return ""
    folder, config = shlex.quote(str(run.folder)), shlex.quote(str(run.folder / CONFIG_FILE))
    train = ["# continue from the last checkpoint", f"handgrad train --config {config} --out {folder}"]
    if results.steps_done(run) >= run.start.steps:
        other = shlex.quote(f"{run.folder}-2")
        train = [
            "# the run is complete; start another one from its weights",
            f"handgrad train --config {config} --out {other} --init-from {folder}",
        ]
    sample = f'handgrad sample {folder} --prompt "Once upon a time"'
    return preformatted([*train, "# write text, measure the loss again", sample, f"handgrad evaluate {folder}"])
