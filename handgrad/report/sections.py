"""The parts of the report page as HTML. Everything that comes from a run goes through `text`."""

import html
import json
import math
import re
import shlex
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from handgrad.config import FIELDS, RunConfig, convert
from handgrad.errors import DataError, UsageError
from handgrad.report import results
from handgrad.report.curves import thin
from handgrad.report.runs import Run
from handgrad.report.style import RUN_COLORS
from handgrad.run_files import CONFIG_FILE

SAMPLES = 6  # per run, spread from the first to the last
SAMPLE_CHARACTERS = 4000
NUMBER = re.compile(r"[-+–∞]?[\d,.]*([kMGTPE]| [%a-zA-Z]+)?")
SATURATION = "clipped numbers in"  # of the events about fp8 tensors that saturate
ROWS = 100  # of the long tables: events, skipped updates, validations


def text(value: object) -> str:
    """`value` as HTML text. Control characters, which a model of bytes may well write, become visible signs."""
    visible = re.sub(r"[\x00-\x08\x0b-\x1f\x7f]", lambda found: chr(0x2400 + min(ord(found.group()), 0x21)), str(value))
    return html.escape(visible)


def table(head: Sequence[object], rows: Iterable[Sequence[object]], *, total: bool = False) -> str:
    """A table whose first column names the rows; columns of numbers are set right. `total` sets off the last row."""
    cells_of_rows = [[str(cell) for cell in row] for row in rows]
    numeric = [i > 0 and all(NUMBER.fullmatch(row[i]) for row in cells_of_rows) for i in range(len(head))]

    def cells(row: Sequence[object], names: int) -> str:
        """The cells of a row, of which the first `names` are headings."""
        tags = ["th" if i < names else "td" for i in range(len(row))]
        kinds = [' class="number"' if is_number else "" for is_number in numeric]
        return "".join(f"<{t}{kind}>{text(cell)}</{t}>" for t, kind, cell in zip(tags, kinds, row, strict=True))

    body = [f"<tr>{cells(row, 1)}</tr>" for row in cells_of_rows]
    if total and body:
        body[-1] = body[-1].replace("<tr>", '<tr class="total">', 1)
    header = f"<thead><tr>{cells(head, len(head))}</tr></thead>" if any(head) else ""
    return f'<div class="scroll"><table>{header}<tbody>{"".join(body)}</tbody></table></div>'


def section(title: str, *parts: str) -> str:
    content = "\n".join(part for part in parts if part)
    return f"<section>\n<h2>{text(title)}</h2>\n{content}\n</section>" if content else ""


def folded(summary: str, content: str) -> str:
    return f"<details><summary>{text(summary)}</summary>\n{content}\n</details>"


def per_run(runs: Sequence[Run], make: Callable[[Run], str]) -> str:
    """`make(run)` for each run, under its name where there are several; runs with nothing to show are left out."""
    made = [(index, run, make(run)) for index, run in enumerate(runs)]
    if len(runs) == 1:
        return made[0][2]
    return "\n".join(f"<h3>{swatch(index)}{text(run.name)}</h3>\n{part}" for index, run, part in made if part)


def swatch(index: int) -> str:
    return f'<span class="swatch" style="background:var(--run{index % RUN_COLORS})"></span>'


def description(run: Run) -> str:
    """One paragraph: the model, its data, where it ran and how far it came."""
    start, config = run.start, run.config
    shape = [f"{config[key]} {word}" for key, word in SHAPE_WORDS.items() if key in config]
    of_shape = f" of {', '.join(shape[:-1])} and {shape[-1]}" if len(shape) > 1 else ""
    epochs = results.epochs(run)
    passes = f", {epochs:.3g} times the training data" if math.isfinite(epochs) else ""
    done, planned = results.steps_done(run), start.planned_steps
    frozen = start.trained_parameters < start.parameters
    part = f" ({results.count_text(start.trained_parameters)} of them not frozen)" if frozen else ""
    return (
        f"<p>A GPT-2{text(of_shape)}: {results.count_text(start.parameters)} parameters{part}, trained with gradients"
        f" written by hand on {text(start.data_folder)} ({results.count_text(start.train_tokens)} tokens, tokenizer"
        f" {text(start.tokenizer)}, vocabulary {results.count_text(start.vocab_size)}), in {text(start.precision)} on"
        f" {text(start.device)}. It has done {done:,} of {planned:,} steps of {start.tokens_per_step:,} tokens:"
        f" {results.short_text(results.tokens_seen(run))} tokens{passes}, in"
        f" {results.duration_text(results.seconds_in_steps(run))} of steps.{text(fp8_sentence(run))}</p>"
    )


def fp8_sentence(run: Run) -> str:
    """Which products of an fp8 run are in fp8, as configured; the history has what left it on the way."""
    if run.start.precision != "fp8":
        return ""
    from handgrad.fp8.tables import fp8_products  # torch takes longer to load than most reports to write

    try:
        known = {name: convert(name, value) for name, value in run.config.items() if name in FIELDS}
        config = replace(RunConfig(**known), precision="fp8")
        products = fp8_products(config).describe(config.num_layers)
    except UsageError as error:
        raise DataError(f"{run.folder / 'config.toml'}: {error}; mend that line or restore the file") from None
    return (
        f" In fp8: the products {products}; gradients in {config.fp8_gradients}, {config.fp8_scaling} scaling; the rest in"
        " bf16."
    )


SHAPE_WORDS = {"num_layers": "layers", "num_heads": "heads", "channels": "channels", "sequence_length": "positions"}


def warnings(run: Run) -> str:
    """What a reader should know before trusting the numbers."""
    found = []
    broken = run.steps.step[~(abs(run.steps.loss) < math.inf)]
    if len(broken):
        found.append(f"The loss was not finite in {len(broken):,} steps, first in step {broken[0]:.0f}.")
    if run.skipped:
        found.append(f"{len(run.skipped):,} updates were skipped; they are listed below.")
    saturated = [step for step, event in run.events if SATURATION in event]
    if saturated:
        times = "once" if len(saturated) == 1 else f"{len(saturated):,} times, first"
        found.append(f"Tensors in fp8 saturated {times} in step {saturated[0]:,}; they are listed below.")
    if run.last_line_cut:
        found.append("The last line of metrics.jsonl was cut in half, as a kill does, and is left out.")
    return f'<p class="warning">{text(" ".join(found))}</p>' if found else ""


def tiles(run: Run) -> str:
    """The headline numbers of one run."""
    loss, best = results.final_validation(run), results.best_validation(run)
    speed, floor = results.median_tokens_per_second(run), run.start.floor_nats_per_token
    if run.validations:
        last_step = run.validations[-1][0]
        note = f"nats per token, step {last_step:,}"
        if best and best[0] != last_step:
            note += f"; best {results.loss_text(best[1])} in step {best[0]:,}"
        shown = [("Validation loss", results.validation_text(run), note)]
    else:
        loss = results.final_training_loss(run)
        shown = [("Training loss", results.loss_text(loss), "nats per token; no validation yet")]
    shown.append(("Perplexity", results.perplexity_text(results.perplexity(loss)), "per token"))
    if run.validations and not math.isnan(bits := results.bits_per_byte(run, loss)):
        shown.append(("Bits per byte", results.loss_text(bits), "of validation text"))
    if (above := results.floor_text(run, loss)) != results.DASH:
        shown.append(("Above the floor", above, f"source entropy {results.loss_text(floor)}"))
    per_step = f"median; {results.median(run.steps.step_ms):,.0f} ms per step"
    shown.append(("Tokens per second", results.count_text(speed), per_step))
    row = '<div class="tile"><dt>{}</dt><dd class="value">{}</dd><dd class="note">{}</dd></div>'
    return f'<dl class="tiles">{"".join(row.format(*map(text, tile)) for tile in shown)}</dl>'


def comparison(runs: Sequence[Run]) -> str:
    """Results and differing settings side by side, one column per run."""
    names = ["", *(run.name for run in runs)]
    measured = [[name, *(form(run) for run in runs)] for name, form in COMPARED.items()]
    # `out` is the folder, which the column's head says already.
    keys = sorted({key for run in runs for key in run.config} - {"out"})
    settings = [[key, *(setting(run, key) for run in runs)] for key in keys]
    differing = [row for row in settings if len(set(row[1:])) > 1]
    parts = [table(names, [row for row in measured if any(cell != results.DASH for cell in row[1:])])]
    if len({(run.start.data_identity, run.start.tokenizer, run.start.vocab_size) for run in runs}) > 1:
        parts.append(
            '<p class="warning">The runs were not trained on the same shards. Losses per token compare only under the'
            " same tokenizer and validation text; bits per byte, under the same validation text.</p>"
        )
    return section("Results", *parts) + section(
        "Settings that differ", table(names, differing) if differing else '<p class="faint">None but the folder.</p>'
    )


def setting(run: Run, key: str) -> str:
    return json.dumps(run.config[key], ensure_ascii=False, default=str) if key in run.config else results.DASH


COMPARED: dict[str, Callable[[Run], str]] = {
    "validation loss, nats per token": results.validation_text,
    "best validation loss": lambda run: results.loss_text((results.best_validation(run) or (0, math.nan))[1]),
    "perplexity": lambda run: results.perplexity_text(results.perplexity(results.final_validation(run))),
    "bits per byte": lambda run: results.loss_text(results.bits_per_byte(run, results.final_validation(run))),
    "above the floor": lambda run: results.floor_text(run, results.final_validation(run)),
    "training loss, last 2 % of steps": lambda run: results.loss_text(results.final_training_loss(run)),
    "steps": lambda run: f"{results.steps_done(run):,}",
    "tokens": lambda run: results.short_text(results.tokens_seen(run)),
    "tokens per second, median": lambda run: results.count_text(results.median_tokens_per_second(run)),
    "model FLOP/s, median": lambda run: results.short_text(results.flops_per_second(run)),
    "time in steps": lambda run: results.duration_text(results.seconds_in_steps(run)),
    "parameters": lambda run: results.count_text(run.start.parameters),
    "planned memory": lambda run: results.bytes_text(math.fsum(run.start.memory_bytes.values())),
    "precision": lambda run: run.start.precision,
    "device": lambda run: run.start.device,
    "data": lambda run: f"{run.start.data_folder} ({run.start.data_identity[:8]})",
}


def samples(run: Run) -> str:
    if not run.samples:
        return ""
    shown = []
    for place in thin(len(run.samples), SAMPLES):
        step, sample = run.samples[place]
        cut = sample if len(sample) <= SAMPLE_CHARACTERS else sample[:SAMPLE_CHARACTERS] + " …"
        shown.append(f'<div class="sample"><span class="faint">step {step:,}</span><pre>{text(cut)}</pre></div>')
    left_out = len(run.samples) - len(shown)
    if left_out:
        shown.append(f'<p class="faint">{left_out:,} more samples are in metrics.jsonl.</p>')
    return "\n".join(shown)


def history(run: Run) -> str:
    """Launches, events and skipped updates."""
    starts = [
        [n, "–" if s.first_step is None else f"{s.first_step:,}", s.handgrad, s.torch, s.precision, s.device]
        for n, s in enumerate(run.starts, start=1)
    ]
    parts = [table(["start", "first step", "handgrad", "torch", "precision", "device"], starts[-ROWS:])]
    if run.events:
        parts.append(table(["step", "event"], [[f"{step:,}", event] for step, event in run.events[-ROWS:]]))
    if run.skipped:
        rows = [[f"{step:,}", why] for step, why in run.skipped.items()]
        parts.append(table(["step", "update skipped because"], rows[-ROWS:]))
    if max(len(starts), len(run.events), len(run.skipped)) > ROWS:
        parts.append(f'<p class="faint">Tables end with the last {ROWS} rows; metrics.jsonl has all.</p>')
    return "\n".join(parts)


def validations(run: Run) -> str:
    if not run.validations:
        return ""
    rows = []
    for place in thin(len(run.validations), ROWS):
        step, loss = run.validations[place]
        tokens = results.short_text(step * run.start.tokens_per_step)
        perplexity = results.perplexity_text(results.perplexity(loss))
        bits = results.loss_text(results.bits_per_byte(run, loss))
        rows.append([f"{step:,}", tokens, results.loss_text(loss), perplexity, bits])
    return table(["step", "tokens", "nats per token", "perplexity", "bits per byte"], rows)


def tasks(run: Run) -> str:
    """The newest figure of every task and metric."""
    if not run.tasks:
        return ""
    rows = []
    for (task, metric), figures in run.tasks.items():
        step, figure = figures[-1]
        stderr = results.shown(figure.stderr, "± {:.4f}".format)
        rows.append([task, metric, results.loss_text(figure.value), stderr, f"{figure.examples:,}", f"{step:,}"])
    return table(["task", "metric", "value", "standard error", "examples", "step"], rows)


def memory(run: Run) -> str:
    """Planned device memory per component."""
    sizes = run.start.memory_bytes
    if not sizes:
        return ""
    sizes = {**sizes, "total": math.fsum(sizes.values())}
    whole = sizes["total"] or 1
    rows = [[name.replace("_", " "), results.bytes_text(n), f"{100 * n / whole:.1f} %"] for name, n in sizes.items()]
    return table(["", "size", "share"], rows, total=True)


def fp8(run: Run) -> str:
    """What the last counts of an fp8 run say, by class of tensors."""
    step, classes = run.fp8[-1] if run.fp8 else (0, {})
    if not classes:
        return ""
    rows = []
    for name, found in classes.items():
        scales = results.scales_text(found.smallest_scale, found.largest_scale)
        largest = results.shown(found.largest, "{:.3g}".format)
        fractions = (results.fraction_text(fraction) for fraction in (found.clipped, found.vanished))
        where = found.most_vanished.removesuffix(f".{name}") if found.vanished > 0 else results.DASH
        rows.append([name, largest, scales, *fractions, where])
    head = ["", "largest magnitude", "scale", "clipped", "vanished", "most in"]
    note = f"In step {step:,}; of each class of tensors the worst layer."
    return table(head, rows) + f'<p class="faint">{text(note)}</p>'


def ranks(run: Run) -> str:
    """Which of several ranks the others waited for, and how long."""
    if not run.paces:
        return ""
    rows = []
    for rank in sorted({pace.slowest for pace in run.paces}):
        mine = [pace for pace in run.paces if pace.slowest == rank]
        ahead = [pace.slowest_ms / pace.median_ms - 1 for pace in mine if pace.median_ms]
        share = f"{100 * len(mine) / len(run.paces):.0f} %"
        longest = max(pace.slowest_ms for pace in mine)
        rows.append([f"rank {rank}", share, f"{100 * math.fsum(ahead) / max(1, len(ahead)):.1f} %", f"{longest:.1f} ms"])
    head = ["slowest", "of the reports", "behind the median, mean", "longest step of its own work"]
    note = "All ranks wait for the slowest. Its own work is its micro-batches, without waiting for others."
    return table(head, rows) + f'<p class="faint">{text(note)}</p>'


def settings(run: Run) -> str:
    lines = [f"{key} = {setting(run, key)}" for key in run.config]
    return f"<pre>{text(chr(10).join(lines))}</pre>"


def commands(run: Run) -> str:
    """What to type next. `steps` shapes the schedule, so a finished run is not resumed but starts another one."""
    folder, config = shlex.quote(str(run.folder)), shlex.quote(str(run.folder / CONFIG_FILE))
    if results.steps_done(run) < run.start.planned_steps:
        train = ["# go on from the last checkpoint", f"handgrad train --config {config} --out {folder}"]
    else:
        other = shlex.quote(f"{run.folder}-2")
        train = [
            "# the run is complete; start another one from its weights",
            f"handgrad train --config {config} --out {other} --init-from {folder}",
        ]
    lines = [
        *train,
        "# write text, measure the loss again",
        f'handgrad sample {folder} --prompt "Once upon a time"',
        f"handgrad evaluate {folder}",
    ]
    return f"<pre>{text(chr(10).join(lines))}</pre>"
