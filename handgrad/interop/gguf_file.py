"""Exports a checkpoint as one GGUF file, for llama.cpp and programs built on it (`pip install gguf`).

    ours                        there, after blk.l.                  shape
    wte, wpe, head              token_embd, position_embd, output    (V, C), (maxT, C), (V, C)
    lnf                         output_norm                          (C)
    qkv                         attn_qkv (GPT-2), attn_q, _k, _v     (3C, C), (H D, C), (K D, C) twice
    proj                        attn_output                          (C, H D)
    fc, gate_up                 ffn_up, ffn_gate and ffn_up          (F, C)
    fcproj, down                ffn_down                             (C, F)
    ln1 and ln2, norm1, norm2   attn_norm, ffn_norm                  (C)
    q_gain, k_gain              attn_q_norm, attn_k_norm             (D)
    after1, after2              post_attention_norm, post_ffw_norm   (C)

The package maps transformers' names to the names there. Vectors and positions are float32.

llama.cpp rotates the pairs (0, 1), (2, 3), ... of a head's channels in `llama` and `smollm3`, and (0, D/2), (1, D/2 + 1),
... in `qwen2` and `qwen3`, as transformers and we do in all of them. So `interleaved` puts the rows of q and k in the first
order for the first two; the products of q and k in attention do not depend on the order.

Source: ggml's docs/gguf.md, llama.cpp's src/llama-model.cpp, the package's constants.py and tensor_mapping.py.
"""

import json
import math
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from handgrad.data.chat_template import CHAT_TEMPLATE_FILE
from handgrad.data.codes import PALETTE
from handgrad.data.model_tokenizer import BLANK, BYTE, characters, has_pieces, vocabulary_files
from handgrad.data.tokenizer import TOKENIZER_FILE, Tokenizer
from handgrad.errors import StorageError, UsageError
from handgrad.files import check_free, whole
from handgrad.interop import huggingface
from handgrad.interop.export import Exported, added_template, load_to_check, logits
from handgrad.interop.sources import weights_of
from handgrad.models import parameter_table
from handgrad.parsing import parse_json
from handgrad.settings.config import ModelShape
from handgrad.storage.checkpoint import Checkpoint

GGUF_TYPES = ("f16", "bf16", "q8_0")
FLOAT32 = ("position_embd.weight", "rope_freqs.weight")  # in addition to vectors
INSTALL = "--to gguf needs the package gguf; install it with `pip install gguf`"


@dataclass(frozen=True)
class Part:
    """A tensor of the file, and the part of our weights that it holds."""

    name: str
    values: Tensor  # (rows, ...) float32, a view of the model's weights, or numbers only in the file
    heads: int = 0  # whose rows are interleaved; 0: as they are
    offset: float = 0.0  # of the file's numbers from ours

    def theirs(self) -> np.ndarray:
        """The values in float32, in the file's order."""
        values = interleaved(self.values, self.heads) if self.heads else self.values
        return (values + self.offset if self.offset else values).contiguous().numpy()

    def read(self, content: np.ndarray) -> None:
        """Sets our part to `content`, numbers of the file."""
        values = torch.from_numpy(np.array(content)).view(self.values.shape) - self.offset
        self.values.copy_(in_halves(values, self.heads) if self.heads else values)


def interleaved(values: Tensor, heads: int) -> Tensor:
    """(H D, ...): the rows 0, D/2, 1, D/2 + 1, ... of every head."""
    return values.view(heads, 2, -1, *values.shape[1:]).transpose(1, 2).reshape(values.shape)


def in_halves(values: Tensor, heads: int) -> Tensor:
    """The inverse of `interleaved`."""
    return values.view(heads, -1, 2, *values.shape[1:]).transpose(1, 2).reshape(values.shape)


def export_gguf(checkpoint: Checkpoint, file: Path, kind: str = "f16") -> Exported:
    """`handgrad export --to gguf`: one file with weights of a `kind` in `GGUF_TYPES`, read back and compared. Raises
    `UsageError`: `file` exists, the package is missing, or llama.cpp has no such network or tokenizer; `DataError`: the
    checkpoint is damaged; `StorageError`: the disk refuses, or returns other numbers than were written."""
    try:
        import gguf
    except ImportError:
        raise UsageError(INSTALL) from None
    check_free(file)
    if file.is_dir():
        raise UsageError(f"--to gguf writes one file, found the folder {file}; name a file, like {file / 'model.gguf'}")
    source = weights_of(checkpoint)
    name = huggingface.format_of(source.shape.architecture).gguf_name(source.shape)
    model = load_to_check(source)
    shape, before = model.shape, logits(model)
    parts = list(tensors(shape, model.views["parameters"], name))
    writer = gguf.GGUFWriter(None, name)
    writer.add_name(checkpoint.folder.resolve().parent.parent.name)
    writer.add_file_type(gguf.LlamaFileType[f"MOSTLY_{kind.upper()}"])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    add_shape(writer, shape)
    add_tokenizer(writer, model.tokenizer, added_template(checkpoint, model.tokenizer))
    with whole(file) as partial:
        write(writer, partial, parts, kind)
        read_back(partial, parts, kind, file)
    return Exported(file, file.stat().st_size, len(before), float((before - logits(model)).abs().max()))


def tensors(shape: ModelShape, flat: Tensor, network: str) -> Iterator[Part]:
    """The tensors of the file, as views of the model's weights."""
    import gguf

    architecture = next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == network)
    names = gguf.get_tensor_name_map(architecture, shape.num_layers)
    for row in parameter_table(shape):
        for name, part in huggingface.parts(shape, row, row.stored(flat)):
            title = names.get_name(shape.network.prefix + name, try_suffixes=(".weight", ".bias"))
            assert title, name
            turned = network in ("llama", "smollm3") and ("q_proj" in name or "k_proj" in name)
            offset = float(network == "gemma3" and part.dim() == 1)  # a gain is w here, 1 + w there
            yield Part(title, part, len(part) // shape.head_width if turned else 0, offset)
    if network == "llama" and shape.family.rope == "llama3":
        family = shape.family
        plain = (family.rotary_base ** (-2 * pair / family.head_width) for pair in family.pairs)
        factors = [frequency / ours for frequency, ours in zip(plain, family.frequencies, strict=True)]
        yield Part("rope_freqs.weight", torch.tensor(factors, dtype=torch.float32))  # divisors of the frequencies


def add_shape(writer: Any, shape: ModelShape) -> None:
    """Adds the sizes, and the numbers that change the mathematics."""
    writer.add_block_count(shape.num_layers)
    writer.add_context_length(shape.sequence_length)
    writer.add_embedding_length(shape.channels)
    writer.add_feed_forward_length(shape.feed_forward)
    writer.add_head_count(shape.num_heads)
    writer.add_vocab_size(shape.vocab_size)
    huggingface.format_of(shape.architecture).gguf_numbers(writer, shape)


def type_of(part: Part, kind: str) -> Any:
    """The `gguf.GGMLQuantizationType` of a tensor."""
    import gguf

    if part.values.dim() == 1 or part.name in FLOAT32:
        return gguf.GGMLQuantizationType.F32
    dtype = gguf.GGMLQuantizationType[kind.upper()]
    return gguf.GGMLQuantizationType.F16 if part.values.shape[1] % gguf.GGML_QUANT_SIZES[dtype][0] else dtype


def encoded(part: Part, dtype: Any) -> np.ndarray:
    """The bytes of a tensor, (rows, bytes) or (bytes). Raises `UsageError` for a number that the type cannot hold."""
    import gguf

    with np.errstate(over="ignore"):
        content = gguf.quantize(part.theirs(), dtype)
    if not np.isfinite(gguf.dequantize(content, dtype)).all():
        raise UsageError(f"{part.name} has numbers above 65504, the largest of {dtype.name.lower()}; use --dtype bf16")
    return content.view(np.uint8)


def write(writer: Any, path: Path, parts: list[Part], kind: str) -> None:
    """Writes the file, encoding one tensor at a time. Raises OSError."""
    import gguf

    for part in parts:
        dtype = type_of(part, kind)
        row_bytes = gguf.quant_shape_to_byte_shape(part.values.shape, dtype)
        writer.add_tensor_info(part.name, row_bytes, np.dtype(np.uint8), math.prod(row_bytes), raw_dtype=dtype)
    writer.write_header_to_file(path)
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for part in parts:
        writer.write_tensor_data(encoded(part, type_of(part, kind)))
    writer.flush()
    os.fsync(writer.fout[0].fileno())
    writer.close()


def read_back(path: Path, parts: list[Part], kind: str, file: Path) -> None:
    """Sets the model's weights to those in the file. Raises `StorageError` if their bytes are not the encoded ones."""
    import gguf

    tensors_by_name = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    for part in parts:
        dtype, tensor = type_of(part, kind), tensors_by_name.get(part.name)
        if (
            tensor is None
            or tensor.tensor_type != dtype
            or not np.array_equal(tensor.data.view(np.uint8), encoded(part, dtype))
        ):
            raise StorageError(f"reading back {file} gave another {part.name} than was written; check the disk, try again")
        part.read(gguf.dequantize(tensor.data, dtype))


CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
# Expression of a `Split` -> llama.cpp's name for this splitter.
PATTERNS = {
    CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|" + REST: "qwen2",
    CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|" + REST: "llama-bpe",
}
# llama.cpp needs merges for every vocabulary. This one makes no token, so it has no effect.
NO_MERGES = ("~ ~",)


def add_tokenizer(writer: Any, tokenizer: Tokenizer, template: str = "") -> None:
    """Adds the tokenizer to the metadata of a `gguf.GGUFWriter`, with a chat `template` if its files lack one; `UsageError`
    for a splitter that llama.cpp lacks, and for pictures."""
    import gguf

    if tokenizer.kind == PALETTE:
        raise UsageError("expected a tokenizer of text for GGUF, found a palette of pictures; `export --to hf` writes it")
    files = vocabulary_files(tokenizer, 0) | ({CHAT_TEMPLATE_FILE: template.encode()} if template else {})
    tables: Any = parse_json(files[TOKENIZER_FILE])
    pieces = has_pieces(tables)
    tokens, types = token_list(tokenizer, tables)
    with tempfile.TemporaryDirectory() as folder:
        for name, content in files.items():
            (Path(folder) / name).write_bytes(content)
        ids = {"eos_token_id": tokenizer.end_of_text}
        (Path(folder) / "config.json").write_text(json.dumps(ids))  # where tokenizer_config.json names none
        special = gguf.SpecialVocab(folder, load_merges=not pieces, n_vocab=len(tokens))
    special.merges = special.merges or list(() if pieces else NO_MERGES)
    if tokenizer.kind != "model":  # documents of ours begin with end-of-text
        special.add_special_token["bos"] = True
    elif tokenizer.begins:
        special.special_token_ids["bos"], special.add_special_token["bos"] = tokenizer.begins[0], True
    else:  # llama.cpp's own choice depends on the splitter's name
        special.add_special_token.setdefault("bos", False)
    if pieces:
        writer.add_tokenizer_model("llama")  # SentencePiece's BPE
        writer.add_tokenizer_pre("default")
        writer.add_token_scores(scores(tokens, tables))
        writer.add_add_space_prefix(False)
    else:
        writer.add_tokenizer_model("gpt2")  # byte-level BPE
        writer.add_tokenizer_pre(splitter(tables))
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    special.add_to_gguf(writer, quiet=True)


def token_list(tokenizer: Tokenizer, tables: dict[str, Any]) -> tuple[list[str], list[int]]:
    """(tokens by id, their types). Added ones are plain text, others byte-level or, of a SentencePiece, as in `tables`."""
    from gguf import TokenType

    added = {token["id"]: token for token in tables["added_tokens"]}
    pieces = {number: piece for piece, number in tables["model"]["vocab"].items()} if has_pieces(tables) else {}
    tokens, types = list[str](), list[int]()
    for number, content in enumerate(tokenizer.token_bytes):
        if number in added:
            text, kind = added[number]["content"], TokenType.CONTROL if added[number]["special"] else TokenType.USER_DEFINED
        elif content:
            text, kind = pieces.get(number) or characters(content), TokenType.NORMAL
        else:  # a row of the vocabulary without a token
            text, kind = f"[PAD{number}]", TokenType.UNUSED
        if pieces:
            kind = TokenType.UNKNOWN if text == tables["model"].get("unk_token") else kind
            kind = TokenType.BYTE if BYTE.fullmatch(text) else kind
            text = text.replace(BLANK, " ") if kind == TokenType.USER_DEFINED else text
        tokens.append(text)
        types.append(kind)
    return tokens, types


def scores(tokens: list[str], tables: dict[str, Any]) -> list[float]:
    """A score per token. SentencePiece joins the pair whose token scores highest, `tokenizers` the first merge's."""
    ranks, merges = dict[str, float](), tables["model"]["merges"]
    for rank, merge in enumerate(merges):
        ranks.setdefault("".join(merge) if isinstance(merge, list) else merge.replace(" ", ""), -float(rank))
    return [ranks.get(token, -float(len(merges))) for token in tokens]


def splitter(tables: dict[str, Any]) -> str:
    """llama.cpp's name for the splitter in a `tokenizer.json`; `UsageError` if it has none."""
    pre: dict[str, Any] = tables["pre_tokenizer"] or {}
    steps = pre.get("pretokenizers", [pre])
    last, others = steps[-1], steps[:-1]
    name: str | None = None
    if last.get("type") == "ByteLevel" and not last.get("add_prefix_space"):
        splits = last.get("use_regex", True)
        if not others:
            name = "gpt-2"  # also for plain bytes: without merges, any splitter works
        elif splits and others == [{"type": "Digits", "individual_digits": True}]:
            name = "smollm"
        elif not splits and len(others) == 1 and others[0].get("behavior") == "Isolated":
            name = PATTERNS.get(str((others[0].get("pattern") or {}).get("Regex")))
    if not name:
        raise UsageError(
            "expected a splitter that llama.cpp has (GPT-2's, SmolLM's, Llama 3's, Qwen's) in the model's tokenizer.json,"
            f" found {json.dumps(pre):.120}; `export --to hf` and llama.cpp's own converter may know it"
        )
    return name
