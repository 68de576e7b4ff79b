"""Merges adapters with the weights that they adapt: a checkpoint's, whose base weights it finds again, and PEFT's, a folder
with adapter_config.json and adapter_model.safetensors. Writes the latter.

    ours                                    PEFT's (after "base_model.model.")                shape there
    blocks.l.qkv_A, the rows of q           model.layers.l.self_attn.q_proj.lora_A.weight     (r, I)
    blocks.l.qkv_B, the rows of q           model.layers.l.self_attn.q_proj.lora_B.weight     (outputs, r)

and likewise for every GEMM with an adapter, under its module's name. GPT-2 has q, k and v in one module, c_attn, so one
adapter for all three; its matrices are transposed (`fan_in_fan_out`), its adapters are not.

Source: peft, tuners/lora/config.py and utils/save_and_load.py; https://huggingface.co/docs/peft.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from handgrad.data.model_tokenizer import read_object
from handgrad.errors import DataError, StorageError, UsageError
from handgrad.evaluation.load import Weights, checkpoint_weights
from handgrad.files import check_free, file_sha256, whole
from handgrad.interop import huggingface
from handgrad.interop.huggingface import Config, Known
from handgrad.joins.lora.tables import Adapter, Part, adapters_of, merged
from handgrad.memory.rows import ParameterRow
from handgrad.models import parameter_table
from handgrad.networks.lora import MOST_SCALE, LoraShape, parse_lora
from handgrad.settings.config import ModelShape
from handgrad.storage.checkpoint import WEIGHTS_FILE, Checkpoint, peek
from handgrad.storage.tensor_files import Stored, safetensors_bytes, write_file

PLACE = "path"  # of the weights, in a manifest's entry on their origin


def located(weights: Weights) -> Weights:
    """The weights, with their path added to their origin: a run of adapters finds them there again."""
    folder = Path(weights.origin["source"]) if weights.checkpoint is None else weights.checkpoint.folder
    location = {PLACE: str(folder.absolute())} if folder.exists() else {}  # else a name on the Hub
    return replace(weights, origin=weights.origin | location)


def base_of(saved: Checkpoint, open_weights: Callable[[str], Weights], elsewhere: str = "") -> Weights:
    """Opens the base weights of a checkpoint's adapters with `open_weights`; `elsewhere`: their path now, if they moved.
    Raises `DataError` if they are gone or have changed."""
    origin = saved.manifest.get("init") or {}
    source, folder = str(origin.get("source", "")), str(origin.get(PLACE, ""))
    where = folder if folder and Path(folder).exists() else source
    where = elsewhere if elsewhere not in ("", source) else where
    try:
        base = open_weights(where)
    except (DataError, UsageError) as error:
        raise DataError(f"{saved.folder} holds adapters of {source}, and {error}; put those weights back") from None
    then, now = origin.get("sha256", {}), base.origin["sha256"]
    if then != now:
        name = next(name for name in (*then, *now) if then.get(name) != now.get(name))
        was, found_now = (str(digests.get(name, "none"))[:12] for digests in (then, now))
        raise DataError(
            f"{saved.folder} holds adapters of {where}, which has changed: expected {name} with SHA-256 {was}, found"
            f" {found_now}; put those weights back"
        )
    return replace(base, origin=origin)


def stored_adapters(saved: Checkpoint, weights: Weights) -> tuple[tuple[Adapter, ...], Callable[[str], Tensor]]:
    """(a checkpoint's adapters, the function that reads a row of them)."""
    adapters = tuple(adapters_of(weights.shape, parse_lora(weights.config.lora)))
    shapes = {row.name: row.stored_shape for adapter in adapters for row in adapter.rows()}
    return adapters, lambda name: saved.tensor(WEIGHTS_FILE, name, shapes[name])


def merged_checkpoint(weights: Weights, base: Weights) -> Weights:
    """A checkpoint's adapters merged with the weights that they adapt."""
    assert weights.checkpoint is not None
    adapters, tensor = stored_adapters(weights.checkpoint, weights)
    digests = {**weights.origin["sha256"], **{f"of the base, {name}": d for name, d in base.origin["sha256"].items()}}
    origin = weights.origin | {"sha256": digests}
    return replace(weights, weight=merging(base, {a.weight: a for a in adapters}, tensor), origin=origin)


def merging(
    base: Weights, adapters: Mapping[str, Adapter], tensor: Callable[[str], Tensor]
) -> Callable[[ParameterRow], Tensor]:
    """Reads a row of `base` with its adapter added in float32. A run may have only the first of the base's positions."""
    rows = {row.name: row for row in parameter_table(base.shape)}

    def weight(row: ParameterRow) -> Tensor:
        values = base.weight(rows[row.name])[: row.stored_rows]
        if (adapter := adapters.get(row.name)) is None:
            return values
        if not (values := merged(values, adapter, tensor)).isfinite().all():
            raise DataError(f"expected finite numbers in {row.name} with its adapter, found others; the adapters diverged")
        return values

    return weight


PEFT_CONFIG, PEFT_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."

# Keys of adapter_config.json that change the mathematics: PEFT's default, and the values that match our adapters.
KNOWN: tuple[Known, ...] = (
    ("peft_type", None, ("LORA",)),
    ("bias", "none", ("none",)),
    ("lora_bias", False, (False,)),
    ("use_dora", False, (False,)),
    ("use_rslora", False, (False,)),
    ("rank_pattern", {}, ({}, None)),
    ("alpha_pattern", {}, ({}, None)),
    ("modules_to_save", None, (None, [])),
    ("layer_replication", None, (None, [])),
    ("trainable_token_indices", None, (None, [])),
    ("target_parameters", None, (None, [])),
)
# The same, only when reading. Other values of the first subtract from the base at the start (PiSSA, OLoRA, CorDA).
OTHERS: tuple[Known, ...] = (
    ("init_lora_weights", True, (True, False, None, "gaussian", "eva", "orthogonal", "mica")),
    ("alora_invocation_tokens", None, (None, [])),
    ("arrow_config", None, (None,)),
)


def modules(shape: ModelShape, weight: str) -> dict[str, str]:
    """The products of a matrix (`weight`: a row's name) -> the names of their modules in PEFT."""
    row = next(row for row in parameter_table(shape) if row.name == weight)
    names = (shape.network.prefix + name for name in huggingface.their_tensors(shape, row))
    products = next(gemm.outputs for gemm in shape.gemms if gemm.weight == weight.rpartition(".")[2])
    return {product: name.removesuffix(".weight") for product, name in zip(products, names, strict=True)}


def their_tensors(
    shape: ModelShape, adapters: tuple[Adapter, ...], tensor: Callable[[str], Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """(PEFT's name, tensor) of every product's A and B; `tensor`: reads our rows by name."""
    for adapter in adapters:
        names, a, b = modules(shape, adapter.weight), tensor(adapter.a), tensor(adapter.b)
        for part, ranks, rows in adapter.places():
            yield f"{PREFIX}{names[part.name]}.lora_A.weight", a[ranks]
            yield f"{PREFIX}{names[part.name]}.lora_B.weight", b[rows]


def their_config(shape: ModelShape, lora: LoraShape, adapters: tuple[Adapter, ...], base: str) -> dict[str, Any]:
    """The content of adapter_config.json. `base`: the name or the path of the weights that are adapted."""
    names = (modules(shape, adapter.weight)[part.name] for adapter in adapters for part in adapter.parts)
    every = [name.rpartition(".")[2] for modules in shape.network.modules.values() for name in modules]
    words = 1 if len({*every}) == len(every) else 2  # GPT-2 has two modules named c_proj in a block
    targets = sorted({".".join(name.split(".")[-words:]) for name in names})
    alpha = lora.alpha or 2.0 * lora.rank
    return {
        **{key: default for key, default, _ in KNOWN},
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,
        "lora_dropout": 0.0,
        "target_modules": targets,
        "fan_in_fan_out": shape.network.transposed,
        "init_lora_weights": True,
        "inference_mode": True,
    }


def write_folder(checkpoint: Checkpoint, folder: Path, dtype: torch.dtype) -> int:
    """Writes a checkpoint's adapters as a PEFT folder, all or nothing, and reads them back; returns their size in bytes.
    Raises `UsageError` for a checkpoint without adapters, `DataError`, `StorageError`."""
    check_free(folder)
    if not (weights := checkpoint_weights(checkpoint)).config.lora:
        raise UsageError(f"{checkpoint.folder} has no adapters, they come from train --lora; --to hf writes its weights")
    lora, shape, base = parse_lora(weights.config.lora), weights.shape, base_name(checkpoint.manifest["init"])
    adapters, tensor = stored_adapters(checkpoint, weights)
    tensors = {name: values.to(dtype) for name, values in their_tensors(shape, adapters, tensor)}
    with whole(folder) as partial:
        partial.mkdir(parents=True)
        stored = [Stored.of(name, values.contiguous()) for name, values in tensors.items()]
        write_file(partial / PEFT_WEIGHTS, safetensors_bytes(stored, {"format": "pt"}))
        config = their_config(shape, lora, adapters, base)
        write_file(partial / PEFT_CONFIG, [(json.dumps(config, indent=2) + "\n").encode()])
        back = dict(their_tensors(shape, *read_adapters(partial, shape)))
        if back.keys() != tensors.keys() or any(not back[name].equal(tensors[name].float()) for name in tensors):
            raise StorageError(f"reading back {folder} gave other numbers than {checkpoint.folder}; check the disk, retry")
    return (folder / PEFT_WEIGHTS).stat().st_size


def base_name(origin: dict[str, Any]) -> str:
    """The name of the base weights: the user's, or the source if they are an imported run."""
    peeked = peek(Path(origin[PLACE])) if origin["from"] == "checkpoint" and PLACE in origin else None
    imported = peeked[1].get("imported", {}) if peeked else {}
    return str(imported["source"] if imported.get("from") == "hf" else origin["source"])


def is_peft(path: Path) -> bool:
    return (path / PEFT_CONFIG).is_file()


def read_config(folder: Path) -> tuple[LoraShape, str]:
    """(rank and alpha, the name of the base); `DataError` for adapters that handgrad does not support."""
    path = folder / PEFT_CONFIG
    config = Config(read_object(path), path, "handgrad has no such adapters")
    config.expect(KNOWN + OTHERS)
    rank, alpha = config.whole("r"), config.number("lora_alpha", None, config.content)
    base = config.content.get("base_model_name_or_path")
    if alpha / rank > MOST_SCALE:
        raise DataError(f"expected lora_alpha / r of at most {MOST_SCALE}, a float32, in {path}, found {alpha} / {rank}")
    if not isinstance(base, str) or not base:
        raise DataError(f"expected base_model_name_or_path in {path}, found {base!r:.80}; name the weights that it adapts")
    return LoraShape(rank, alpha), base


def base_source(folder: Path) -> str:
    """The base weights of a folder's adapters: a path relative to here or to the folder, or a name on the Hub."""
    _, base = read_config(folder)
    return str(folder / base) if not Path(base).exists() and (folder / base).exists() else base


def read_adapters(folder: Path, shape: ModelShape) -> tuple[tuple[Adapter, ...], Callable[[str], Tensor]]:
    """(the adapters of a folder for a model of this shape, the function that reads a row of them in float32). Raises
    `DataError` for an adapter that is foreign or of another size."""
    lora, _ = read_config(folder)
    path = folder / PEFT_WEIGHTS
    by_name: dict[str, tuple[Adapter, Part, str]] = {}  # PEFT's name -> adapter, product, A or B
    for adapter in adapters_of(shape, lora):
        for product, module in modules(shape, adapter.weight).items():
            part = next(part for part in adapter.parts if part.name == product)
            by_name |= {f"{PREFIX}{module}.lora_{kind}.weight": (adapter, part, kind) for kind in "AB"}
    tensors: dict[tuple[str, str, str], Tensor] = {}
    with huggingface.opened(path) as stored:
        for name in stored.keys():  # noqa: SIM118
            if name not in by_name:
                raise DataError(f"expected adapters of this model's blocks in {path}, found also {name!r:.120}")
            adapter, part, kind = by_name[name]
            outputs = part.outputs.stop - part.outputs.start
            wanted, values = ((lora.rank, adapter.inputs) if kind == "A" else (outputs, lora.rank)), stored.get_tensor(name)
            if tuple(values.shape) != wanted:
                raise DataError(f"expected {name} of shape {wanted} in {path}, found {tuple(values.shape)}")
            if not torch.isfinite(values).all():
                raise DataError(f"expected finite numbers in {name} of {path}, found others; the adapters diverged")
            tensors[adapter.weight, part.name, kind] = values.to(torch.float32)
    adapters, rows = list[Adapter](), dict[str, Tensor]()
    for adapter in adapters_of(shape, lora):
        kinds = {
            part.name: [kind for kind in "AB" if (adapter.weight, part.name, kind) in tensors] for part in adapter.parts
        }
        if half := next((name for name, both in kinds.items() if len(both) == 1), None):
            raise DataError(f"expected A and B of {half} of {adapter.weight} in {path}, found {kinds[half][0]} alone")
        if parts := tuple(part for part in adapter.parts if kinds[part.name]):
            adapters.append(replace(adapter, parts=parts))
            for name, kind in ((adapter.a, "A"), (adapter.b, "B")):
                rows[name] = torch.cat([tensors[adapter.weight, part.name, kind] for part in parts])
    if not adapters:
        raise DataError(f"expected adapters in {path}, found none")
    return tuple(adapters), rows.__getitem__


def adapted(folder: Path, base: Weights) -> Weights:
    """The weights `base` with the adapters of a folder merged in."""
    adapters, tensor = read_adapters(folder, base.shape)
    digests = {PEFT_WEIGHTS: file_sha256(folder / PEFT_WEIGHTS)}
    digests |= {f"of the base, {name}": digest for name, digest in base.origin["sha256"].items()}
    origin = {"from": "peft", "source": str(folder), "sha256": digests}
    weight = merging(base, {adapter.weight: adapter for adapter in adapters}, tensor)
    return replace(base, weight=weight, origin=origin, checkpoint=None)
