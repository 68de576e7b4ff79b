"""Attention's kernels as they are launched at GPT-2's sizes, compiled without a GPU (`tables`)."""

from itertools import product
from types import ModuleType

from handgrad.joins.dropout import cuda as dropout
from handgrad.joins.fp8.cuda import attention as fp8
from handgrad.networks.fp8 import WIDEST_HEAD_OF_FP8
from handgrad.ops.cuda import attention_triton
from handgrad.ops.sizes import ATTENTION_TILES, TURING_TILES, AttentionTile, attention_tile
from tests.kernels.compiling import SHARED_LIMIT, compile_kernel

RANDOM = {"samples": "*i64:16", "stream": "i32", "threshold": "i32", "dropout_scale": "fp32"}
FORMATS = {"fp8e4nv": (448.0, 2.0**-10), "fp8e5": (57344.0, 2.0**-17)}
KINDS: dict[str, ModuleType] = {"plain": attention_triton, "grouped": attention_triton, "dropout": dropout}
KINDS |= dict.fromkeys(FORMATS, fp8)
DOCUMENTS = " with documents"  # behind a kind
OLDER = "dkdv", 256  # its tiles have too few rows for Hopper's tensor-core instructions: they run Ampere's

Case = tuple[str, int, str, str, int, bool]  # kernel, head width, kind, dtype, architecture, whether lengths leave a tail


def arguments(kernel, D: int, dtype: str, config: AttentionTile, *, tail: bool, kind: str) -> tuple[dict, dict, dict]:
    """(signature, constants, options) of a kernel as it is launched at GPT-2's sizes; of `kind` fp8e4nv and fp8e5, that
    write a gradient in fp8 alone."""
    kind, documents = kind.removesuffix(DOCUMENTS), kind.endswith(DOCUMENTS)
    types = {
        "starts": "*i32:16",
        "lse": "*fp32:16",
        "sums": "*fp32:16",
        "H": "i32",
        "T": "i32" if tail else "i32:16",
        "C": "i32:16",
    }
    types |= {"row_stride": "i32:16", "N": types["T"], "PARTS": "i32:16", "scaling": "*fp32", "statistics": "*fp32"}
    types |= {"rows": f"*{kind}:16", "columns": f"*{kind}:16", **RANDOM}
    signature = {name: types.get(name, f"*{dtype}:16") for name in kernel.arg_names}
    constants = {"D": D, "WIDTH": D, "QUERIES": config.queries, "KEYS": config.keys, "TAIL": tail}
    constants |= {"GROUP": 4} if kind == "grouped" else {}
    constants |= {"starts": None} if "starts" in kernel.arg_names and not documents else {}
    if kind in FORMATS:
        largest, vanishes_at = FORMATS[kind]
        constants |= {"LARGEST": largest, "VANISHES_AT": vanishes_at}
        constants |= {"dqkv": None} if "dqkv" in kernel.arg_names else {}
    return signature, constants, {"maxnreg": config.registers} if config.registers else {}


def kernel_of(name: str, kind: str):
    """The kernel of a case."""
    base = kind.removesuffix(DOCUMENTS)
    return getattr(KINDS[base], "grouped_dkdv_kernel" if (base, name) == ("grouped", "dkdv") else f"{name}_kernel")


def compile_one(case: Case) -> dict[str, object]:
    name, D, kind, dtype, arch, tail = case
    base, kernel = kind.removesuffix(DOCUMENTS), kernel_of(name, kind)
    narrow, newer = dtype != "fp32", arch in (90, 100)
    groups = {"grouped": base == "grouped", "documents": kind != base}
    config = attention_tile(name, D, narrow=narrow, newer=newer, turing=arch < 80, **groups)
    config = fp8.TILES.get((name, D), config) if base in FORMATS else config
    signature, constants, options = arguments(kernel, D, dtype, config, tail=tail, kind=kind)
    made = compile_kernel(kernel, signature, constants, config.warps, config.stages, arch, **options)
    return {
        "kernel": f"{kind} {name} D {D} sm_{arch} {dtype}{' tail' * tail} {tuple(config)}",
        "dtype": dtype,
        "arch": arch,
        **made,
        "limit": SHARED_LIMIT[86 if arch == 80 else arch],  # A100's tiles are those of the smaller cards
        "most_stack": most_stack(name, D, kind, narrow=narrow, arch=arch, tail=tail),
        "wgmma": made["wgmma"] if arch == 90 and narrow and (name, D) != OLDER else None,
    }


def most_stack(name: str, D: int, kind: str, *, narrow: bool, arch: int, tail: bool) -> int:
    """Bytes of a thread outside its registers."""
    base, documents = kind.removesuffix(DOCUMENTS), kind.endswith(DOCUMENTS)
    if (name, D, narrow) == ("dkdv", 256, False) and documents:  # float32 is no precision for speed
        return 288
    # Tiles that do not spill take up to twice the time (benchmarks/results/h200-attention-choices.json).
    if (name, D, narrow, arch) == ("dkdv", 128, True, 90) and (documents or base in ("grouped", *FORMATS)):
        return 640 if base in FORMATS else 256
    if (name, D, base in FORMATS) == ("dkdv", 64, True):  # without, longer (h200-attention-choices-fp8.json)
        return 80 if documents or tail else 40
    # Half as many queries take 1.5 to 1.6 times as long (benchmarks/results/h200-attention-choices-256.json).
    if (name, D, base, documents, arch) == ("dkdv", 256, "grouped", False, 90):
        return 96 * tail
    few_words = 40 if (name, D) == ("dq", 128) else 32  # outside the loops
    return few_words * (tail or documents)


def cases_of(arch: int, dtypes: tuple[str, ...]) -> list[Case]:
    """All that a run, an evaluation or a generation may launch on a card without fp8, for its dtypes."""
    widths = TURING_TILES if arch < 80 else ATTENTION_TILES
    kinds = [f"{kind}{more}" for kind in ("plain", "grouped", "dropout") for more in ("", DOCUMENTS)]
    return [(*key, kind, dtype, arch, tail) for key, kind, dtype, tail in product(widths, kinds, dtypes, (False, True))]


def jobs_of_tests(*, everything: bool = False) -> list[Case]:
    """Each tile. `everything`: also fp16, and lengths that leave a tail."""
    cases: list[Case] = []
    for (name, D), narrow, newer in product(ATTENTION_TILES, (True, False), (True, False)):
        dtypes = (("bf16", "fp16") if everything else ("bf16",)) if narrow else ("fp32",)
        tails = (False, True) if everything else (False,)
        architectures = (90, 100) if newer else (80,)
        kinds = ("plain", "dropout") if narrow and (D == 64 or everything) else ("plain",)
        cuts = list(product(kinds, dtypes, architectures, tails))
        if narrow or not newer or everything:
            cuts += product((f"plain{DOCUMENTS}",), dtypes, architectures[: 2 if everything else 1], tails)
        if narrow and newer:  # Triton (3.6, 3.7) compiles the statistics' reductions to one number not for sm_100
            more = f"fp8e4nv{DOCUMENTS}", f"grouped{DOCUMENTS}", f"dropout{DOCUMENTS}"
            fp8 = FORMATS if D <= WIDEST_HEAD_OF_FP8 else ()
            cuts += product((*fp8, "grouped", *more[not fp8 :]), ("bf16",), (90,), tails)
        cases += [(name, D, *cut) for cut in cuts]
    return cases


def check(rows: list[dict]) -> None:
    for row in rows:
        assert row["stack"] <= row["most_stack"] and row["shared"] <= row["limit"], row
        assert row["wgmma"] in (None, True) and not row["serialized"], row
    # A head of keys and values that query heads share is read in as wide copies, whatever the number of heads.
    copies = {row["kernel"]: row["wide_copies"] for row in rows}
    for kernel, count in copies.items():
        assert " dkdv " in kernel or copies.get(kernel.replace("grouped", "plain"), count) == count, kernel
