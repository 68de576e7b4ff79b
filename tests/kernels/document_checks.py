"""Checks of attention within documents and of untrained targets, for the interpreter on a CPU and for a GPU alike."""

import math
from types import ModuleType

import torch

from handgrad.joins.dropout import cuda as dropout_kernels, reference as dropout_reference
from handgrad.joins.dropout.reference import Dropout
from handgrad.ops import cuda as kernels
from handgrad.ops.reference.attention import Mask
from tests.documents import document_starts, within
from tests.kernels.memory_checks import Case, Draw, Tensors, classifier_inputs, copy, nan, statistics_dtype


def attention(draw: Draw, lengths: list[list[int]], H: int, K: int, D: int, window: int = 0) -> Case:
    """out, lse and the gradients of q, k and v; of documents of one token, whose q and k have none, in one piece."""
    starts = within(document_starts(lengths), window).to(draw.device)
    B, T = starts.shape
    inputs = {"qkv": draw.normal(B * T, (H + 2 * K) * D), "dout": draw.normal(B * T, H * D), "starts": starts}

    def run(ops: ModuleType, t: Tensors, checked: bool = True) -> Tensors:
        qkv, dout = t["qkv"], t["dout"]
        out, lse, dqkv = nan(qkv, *dout.shape), nan(qkv, B, H, T, dtype=statistics_dtype(qkv)), nan(qkv, *qkv.shape)
        sizes = {"batch": B, "length": T, "num_heads": H, "kv_heads": K, "head_width": D, "dtype": qkv.dtype}
        documents = t["starts"] is not None and (not window or max(map(len, lengths)) > 1)
        size = ops.attention_scratch_bytes(**sizes, documents=documents, window=window)
        mask = Mask(t["starts"], window, documents)
        scratch = torch.full((size + 16,), 255, dtype=torch.uint8, device=qkv.device)
        ops.attention_forward(out, lse, qkv, scratch=scratch, mask=mask)
        ops.attention_backward(dqkv, dout, out, lse, qkv, scratch=scratch, mask=mask)
        assert not checked or (scratch[size:] == 255).all()  # a graph that is captured has no numbers yet
        if max(map(max, lengths)) == 1:
            return {"out": out, "lse": lse, "dqkv": dqkv}
        parts = dict(zip(("dq", "dk", "dv"), dqkv.split((H * D, K * D, K * D), 1), strict=True))
        return {"out": out, "lse": lse, **parts}

    return inputs, run


def terms(lengths: list[list[int]], D: int) -> dict[str, int]:
    """Of each result, the terms of the longest sum behind it: products of D numbers, and for keys and values of all queries
    of a document. In documents of a few tokens the reference's own error is that of a few numbers, small by chance."""
    longest = max(map(max, lengths))
    return {"lse": D, "dq": max(D, longest), "dk": max(D, longest), "dv": max(D, longest), "dqkv": D}


def attention_with_dropout(draw: Draw, lengths: list[list[int]], H: int, D: int) -> Case:
    """out, lse and the gradients of q, k and v, of samples on both sides of 2^32."""
    starts = document_starts(lengths).to(draw.device)
    B, T = starts.shape
    site = Dropout(torch.arange(B, device=draw.device) + (1 << 32) - 1, 0.3, 1337, 4)
    inputs = {"qkv": draw.normal(B * T, 3 * H * D), "dout": draw.normal(B * T, H * D), "starts": starts}

    def run(ops: ModuleType, t: Tensors) -> Tensors:
        backend = dropout_kernels if ops is kernels else dropout_reference
        qkv, dout = t["qkv"], t["dout"]
        out, lse, dqkv = nan(qkv, *dout.shape), nan(qkv, B, H, T, dtype=statistics_dtype(qkv)), nan(qkv, *qkv.shape)
        sizes = {"batch": B, "length": T, "num_heads": H, "head_width": D, "dtype": qkv.dtype}
        scratch = torch.full((backend.attention_scratch_bytes(**sizes),), 255, dtype=torch.uint8, device=qkv.device)
        backend.attention_forward(out, lse, qkv, site, mask=Mask(t["starts"]))
        more = {"scratch": scratch, "mask": Mask(t["starts"])}
        backend.attention_backward(dqkv, dout, out, lse, qkv, site, **more)
        return {"out": out, "lse": lse, **dict(zip(("dq", "dk", "dv"), dqkv.split(H * D, 1), strict=True))}

    return inputs, run


def check_others(draw: Draw, lengths: list[list[int]], H: int, K: int, D: int) -> None:
    """Another text in one document of the first row leaves the results of all others as they are, bit for bit."""
    inputs, run = attention(draw, lengths, H, K, D)
    before = run(kernels, copy(inputs))
    for changed in range(len(lengths[0])):
        first = sum(lengths[0][:changed])
        place = slice(first, first + lengths[0][changed])
        other = copy(inputs)
        for name in ("qkv", "dout"):
            other[name][place] = draw.normal(*other[name][place].shape) * 30
        for name, found in run(kernels, other).items():
            own = before[name]
            if name == "lse":
                found, own = (t.transpose(1, 2).flatten(0, 1) for t in (found, own))
            kept = torch.ones(len(own), dtype=torch.bool, device=own.device)
            kept[place] = False
            assert torch.equal(found[kept], own[kept]), name
            assert not torch.equal(found[place], own[place]), name


def check_one_document(draw: Draw, B: int, T: int, H: int, K: int, D: int) -> None:
    """One document in every row gives the bits of the kernels without documents. (Not of heads that cuDNN takes.)"""
    inputs, run = attention(draw, [[T]] * B, H, K, D)
    found, plain = run(kernels, copy(inputs)), run(kernels, copy(inputs) | {"starts": None})
    for name, own in plain.items():
        assert torch.equal(found[name], own), name


def check_weighted(draw: Draw, N: int, V: int, Vp: int, softcap: float = 0.0) -> None:
    """With a scale for each row, some below 0, a row has the bits of a call with its scale alone."""
    inputs = classifier_inputs(draw, N, V, Vp)
    scales = inputs["scale"] * torch.linspace(-1, 2, N, device=draw.device, dtype=inputs["scale"].dtype)
    options = {"vocab_size": V, "softcap": softcap}
    losses, dlogits = nan(scales, N), inputs["logits"].clone()
    kernels.classifier_forward_backward(losses, dlogits, inputs["targets"], scales, **options)
    for row in range(N):
        here, one, alone = slice(row, row + 1), nan(scales, 1), inputs["logits"][row : row + 1].clone()
        kernels.classifier_forward_backward(one, alone, inputs["targets"][here], scales[here].clone(), **options)
        assert torch.equal(losses[here], one) and torch.equal(dlogits[here], alone), row


def check_untrained(draw: Draw, N: int, V: int, Vp: int, softcap: float = 0.0) -> None:
    """Rows without a target, full of NaN, have no loss and no gradient; the others keep their bits."""
    inputs = classifier_inputs(draw, N, V, Vp)
    untrained = torch.arange(N, device=draw.device) % 3 != 1
    logits, targets = inputs["logits"].clone(), inputs["targets"].clone()
    logits[untrained], targets[untrained] = math.nan, -1
    results = []
    for t in (inputs, inputs | {"logits": logits, "targets": targets}):
        losses, again, dlogits = nan(t["scale"], N), nan(t["scale"], N), t["logits"].clone()
        options = {"vocab_size": V, "softcap": softcap, "untrained": t is not inputs}
        kernels.classifier_forward(again, t["logits"].clone(), t["targets"], **options)
        kernels.classifier_forward_backward(losses, dlogits, t["targets"], t["scale"], **options)
        results.append((losses, again, dlogits))
    for plain, found in zip(*results, strict=True):
        assert torch.equal(found[~untrained], plain[~untrained]) and (found[untrained] == 0).all()


def check_taught_rows(draw: Draw, N: int, V: int, Vp: int, *, reverse: bool) -> None:
    """With a teacher: rows without a target have no loss and no gradient, rows with a scale of their own the bits of a call
    alone."""
    t = draw.arguments("distill_forward_backward", N=N, V=V, Vp=Vp)
    scales = t["scale"] * torch.linspace(-1, 2, N, device=draw.device, dtype=t["scale"].dtype)
    targets, losses, dlogits = t["targets"].clone(), nan(scales, N), t["logits_to_dlogits_inout"].clone()
    targets[::3], dlogits[::3] = -1, math.nan
    options = {"vocab_size": V, "softcap": 15.0, "untrained": True, "reverse": reverse}
    kernels.distill_forward_backward(losses, dlogits, t["teacher_logits"], targets, scales, **options)
    for row in range(N):
        here, one, alone = slice(row, row + 1), nan(scales, 1), t["logits_to_dlogits_inout"][row : row + 1].clone()
        inputs = t["teacher_logits"][here].clone(), targets[here].clone(), scales[here].clone()
        kernels.distill_forward_backward(one, alone, *inputs, **options)
        assert torch.equal(losses[here], one) and torch.equal(dlogits[here], alone), row
        assert targets[row] >= 0 or not (losses[row] or dlogits[row].any()), row
