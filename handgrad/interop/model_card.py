"""The README.md of an exported model: its sizes, its training, its results, and the code that loads it."""

import io
import json
from typing import Any

import torch
from matplotlib.figure import Figure

import handgrad
from handgrad.data.codes import PALETTE, PALETTE_FILE, Codes, codes_of
from handgrad.data.confined import program
from handgrad.data.model_tokenizer import vocabulary_files
from handgrad.data.tokenizer import TOKENIZER_FILE, Tokenizer
from handgrad.evaluation.load import LoadedModel
from handgrad.memory.rows import count_parameters
from handgrad.models import parameter_table
from handgrad.parsing import readable_records
from handgrad.settings.batch_schedule import parse_schedule
from handgrad.storage.checkpoint import Checkpoint
from handgrad.storage.run_files import METRICS_FILE

CARD_FILE, CURVE_FILE = "README.md", "curve.png"
LAST_LOSSES = 5
HUB_HEADER = "---\nlibrary_name: transformers\npipeline_tag: text-generation\ntags:\n- {tag}\n- handgrad\n---\n"
TOKENIZERS = {
    "gpt2": "GPT-2's, 50,257 tokens",
    "bytes": "the 256 bytes of UTF-8, each its own id, and end-of-text",
    "bpe": "a byte-level BPE with GPT-2's splitter, trained on the data",
    "model": "the tokenizer of the model it started from",
    PALETTE: f"the colours of pictures, with classes or the bytes of captions, in `{PALETTE_FILE}`",
}
SETTINGS = ("precision", "steps", "tokens_per_step", "learning_rate", "schedule", "warmup_steps", "weight_decay", "seed")


# Errors of a metrics file that is missing, or not ours: a card without its figures is still a card.
UNREADABLE = (ValueError, KeyError, TypeError, AttributeError)


def run_records(checkpoint: Checkpoint, kind: str) -> list[dict[str, Any]]:
    """The records of a kind up to the checkpoint's step, from the metrics of its run."""
    records = [record.fields for record in readable_records(checkpoint.folder.resolve().parent.parent / METRICS_FILE)]
    return [record for record in records if record.get("kind") == kind and record["step"] <= checkpoint.step]


def validation_losses(checkpoint: Checkpoint) -> list[tuple[int, float]]:
    """(step, nats per token) of the validations, in order; none if the metrics are not readable."""
    try:
        return sorted({int(r["step"]): float(r["loss"]) for r in run_records(checkpoint, "validation")}.items())
    except UNREADABLE:
        return []


def curve_png(checkpoint: Checkpoint) -> bytes | None:
    """The curve of the validation losses as a PNG image; None if there are fewer than two."""
    if len(losses := validation_losses(checkpoint)) < 2:
        return None
    figure = Figure(figsize=(6, 3), layout="constrained")
    axes = figure.add_subplot(xlabel="step", ylabel="validation loss, nats per token")
    axes.plot(*zip(*losses, strict=True), marker="o", markersize=3)
    axes.grid(alpha=0.3)
    content = io.BytesIO()
    figure.savefig(content, dpi=150, metadata={"Software": None})  # the same bytes for the same run
    return content.getvalue()


def evaluation_lines(checkpoint: Checkpoint) -> list[str]:
    """A table of the newest results on tasks; empty if there are none, or the metrics are not readable."""
    newest: dict[str, dict[str, Any]] = {}
    try:
        for record in run_records(checkpoint, "evaluation"):
            known = newest.get(record["task"])
            # An evaluation on a few examples does not replace a full one of the same step.
            if known is None or (known["step"], known["examples"]) <= (record["step"], record["examples"]):
                newest[record["task"]] = record
        rows = [
            row(task, metric, f"{value:.4f}", f"{stderr:.4f}", f"{record['examples']:,}", f"{record['step']:,}")
            for task, record in newest.items()
            for metric, (value, stderr) in record["metrics"].items()
        ]
    except UNREADABLE:
        return []
    head = ["", row("task", "metric", "value", "standard error", "examples", "step"), "|---|---|---|---|---|---|"]
    return [*head, *rows] if rows else []


def row(*cells: Any) -> str:
    texts = [str(cell).replace("|", "\\|").replace("\n", " ") for cell in cells]
    return f"| {' | '.join(texts)} |"


def training_lines(checkpoint: Checkpoint) -> list[str]:
    """The origin of the weights: an import, or a run."""
    manifest = checkpoint.manifest
    if origin := manifest.get("imported"):
        return [f"Imported from `{origin.get('source')}`, and not trained since."]
    config = manifest["config"]
    data = (manifest.get("identity") or {}).get("data")
    batch = parse_schedule(config["tokens_per_step"], config.get("batch_schedule", ""))
    tokens = batch.tokens_before(checkpoint.step)
    lines = ["| training | |", "|---|---|", row("data, its identity", f"`{data}`")]
    lines += [row("tokens seen", f"{tokens:,} in {checkpoint.step:,} steps")]
    if origin := manifest.get("init"):
        lines.append(row("started from the weights of", f"`{origin.get('source')}`"))
    lines += [row(name, config[name]) for name in SETTINGS if name in config]
    lines += [row("batch_schedule", config["batch_schedule"])] if len(batch.stages) > 1 else []
    lines += [row(name, value) for name, value in (manifest.get("versions") or {}).items()]
    if losses := validation_losses(checkpoint):
        lines += ["", "| step | validation loss, nats per token |", "|---|---|"]
        lines += [row(f"{step:,}", f"{loss:.4f}") for step, loss in losses[-LAST_LOSSES:]]
    if len(losses) > 1:
        lines += ["", f"![validation loss by step]({CURVE_FILE})"]
    return lines


def model_card(
    checkpoint: Checkpoint, model: LoadedModel, dtype: torch.dtype, config: dict[str, Any], *, talks: bool
) -> str:
    """The card in Markdown, below a YAML header. `config`: of config.json; `talks`: the folder has a chat template."""
    shape, kind = model.shape, str(dtype).removeprefix("torch.")
    network, article = shape.network, "An" if shape.network.title[0] in "AEIO" else "A"
    trust = ", trust_remote_code=True" if network.brings_code else ""  # to run the network's code, which is in the folder
    lines = [
        HUB_HEADER.format(tag="custom_code" if network.brings_code else config["model_type"]),
        f"# {article} {network.title} of {count_parameters(parameter_table(shape)):,} parameters",
        "",
        f"Exported by handgrad {handgrad.__version__} from a checkpoint of step {checkpoint.step}.",
        "",
        "| model | |",
        "|---|---|",
        row("layers, heads, channels", f"{shape.num_layers}, {shape.num_heads}, {shape.channels}"),
        row("context, tokens", shape.sequence_length),
        row("vocabulary, tokens", shape.vocab_size),
        row("tokenizer", f"{TOKENIZERS[model.tokenizer.kind]} (SHA-256 `{model.tokenizer.sha256}`)"),
        row("numbers", kind),
        *([row(network.setting, getattr(shape, network.setting).replace(",", ", "))] if network.setting else []),
        "",
        *training_lines(checkpoint),
        *evaluation_lines(checkpoint),
        "",
        "```python",
        *(drawing(codes, trust) if (codes := codes_of(model.tokenizer)) else writing(model, kind, trust, talks=talks)),
    ]
    return "\n".join(lines) + "\n"


def writing(model: LoadedModel, kind: str, trust: str, *, talks: bool) -> list[str]:
    """The lines of code that load the model and let it write."""
    context = model.shape.sequence_length
    return [
        "from transformers import AutoModelForCausalLM, AutoTokenizer",
        "",
        'folder = "."  # of this file',
        f"tokenizer = AutoTokenizer.from_pretrained(folder{trust})",
        f'model = AutoModelForCausalLM.from_pretrained(folder, dtype="{kind}"{trust})',
        *(talking(context) if talks else continuing(context, model.tokenizer)),
    ]


def drawing(codes: Codes, trust: str) -> list[str]:
    """The lines of code that let a model draw a picture."""
    first = len(codes.colours)
    start = f"[[model.config.bos_token_id, {first}]]" if codes.classes else "[[model.config.bos_token_id]]"
    note = f"  # {first} is the class {codes.classes[0]}" if codes.classes else ""
    about = ("# Draws the mean colour of each code: `handgrad sample` has the autoencoder that draws their pictures.",)
    return [
        "import json",
        "",
        "import numpy as np",
        "import torch",
        "from PIL import Image",
        "from transformers import AutoModelForCausalLM",
        "",
        *(about if codes.decoder else ()),
        'folder = "."  # of this file',
        f'palette = json.load(open(f"{{folder}}/{PALETTE_FILE}"))',
        f"model = AutoModelForCausalLM.from_pretrained(folder{trust})",
        f"start = torch.tensor({start}){note}",
        "room = model.config.max_position_embeddings + 1 - start.shape[1]  # no token follows the last",
        "tokens = model.generate(start, max_new_tokens=room, do_sample=True, top_k=0)[0]",
        f"codes = tokens[tokens < {first}][: {codes.count}].tolist()",
        f"codes += [0] * ({codes.count} - len(codes))  # of a picture that ends early",
        'pixels = np.array(palette["colours"], np.uint8)[codes]',
        f'Image.fromarray(pixels.reshape({codes.rows}, {codes.columns}, 3)).save("picture.png")',
        "```",
    ]


def talking(context: int) -> list[str]:
    """The lines of code that ask a model a question, in the chat template of its files."""
    return [
        'messages = [{"role": "user", "content": "Why is the sky blue?"}]',
        'ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)',
        'length = ids["input_ids"].shape[1]',
        f"answer = model.generate(**ids, max_new_tokens={max(1, min(200, context // 2))})[0][length:]",
        "print(tokenizer.decode(answer, skip_special_tokens=True))",
        "```",
    ]


def continuing(context: int, tokenizer: Tokenizer) -> list[str]:
    """The lines of code that let a model continue a text, and a note on the token that begins a text."""
    prompt = "Once upon a time"
    # transformers has no sliding window: prompt and text must fit the context, even if each byte of the prompt is a token.
    room = max(1, min(40, context - 1 - len(prompt)))
    first = tokenizer.decode(tokenizer.prompt_start)
    exported = program("tokenizer", vocabulary_files(tokenizer, context)[TOKENIZER_FILE])
    start = "" if json.loads(exported.about)["begins"] else first
    said = "as in handgrad; the model's own tokenizer puts none there" if start else "which the tokenizer puts there"
    return [
        f'ids = tokenizer("{start}{prompt}", return_tensors="pt")',
        f"print(tokenizer.decode(model.generate(**ids, max_new_tokens={room})[0]))",
        "```",
        "",
        f'A text begins with the token "{first}", {said}.',
    ]
