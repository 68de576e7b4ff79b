"""Calls cuBLASLt directly: each GEMM has an epilogue and an algorithm, chosen once and kept.

`torch.mm` picks an algorithm at every call by a heuristic of the library; a sum in another order is another result.
Here a table in `tuned/` fixes the algorithm for this GPU and library version (`benchmarks.tune` writes one). For a GEMM
that the table lacks, this takes the heuristic's first answer, which is the same in every run with the same library.

Row-major (tokens, features) is column-major (features, tokens). In the library's column-major terms every GEMM here
is d (m, n) = op(a) op(b) + beta c, where op transposes or does nothing.
https://docs.nvidia.com/cuda/cublas/#using-the-cublaslt-api
"""

import contextlib
import functools
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from nvmath.bindings import cublasLt as lt
from torch import Tensor

from handgrad.errors import DataError, UsageError
from handgrad.ops.sizes import WORKSPACE_BYTES

# Enumerators of the library's C headers (library_types.h, cublasLt.h).
DATA_TYPES = {torch.float32: 0, torch.float16: 2, torch.bfloat16: 14, torch.float8_e4m3fn: 28, torch.float8_e5m2: 29}
COMPUTE_32F, COMPUTE_32F_FAST_TF32 = 68, 77
PLAIN, BIAS, GELU_AUX_BIAS, DGELU = 1, 4, 164, 192
SPLITS, REDUCTION = lt.MatmulAlgoConfigAttribute.SPLITK_NUM, lt.MatmulAlgoConfigAttribute.REDUCTION_SCHEME
MOST_CANDIDATES = 32  # of the heuristic, for a product without a split
EPILOGUES = {PLAIN: "plain", BIAS: "bias", GELU_AUX_BIAS: "gelu", DGELU: "dgelu"}

ALIGNMENT_BYTES = 256  # alignment that the heuristic may assume of a pointer, unless the pointer has less

InverseScales = tuple[Tensor, Tensor]  # the values of a 1 in the fp8 operands a and b: float32, on the device

ONE = np.ones(1, np.float32)
ZERO = np.zeros(1, np.float32)


@dataclass(frozen=True)
class Product:
    """A GEMM as the library sees it; the key that an algorithm is chosen by."""

    m: int
    n: int
    k: int
    transpose_a: bool
    transpose_b: bool
    a_dtype: torch.dtype
    b_dtype: torch.dtype  # the dtype of a, except that fp8 has two
    out_dtype: torch.dtype
    epilogue: int
    adds: bool  # True: adds c (beta 1); False: no c (beta 0)
    tf32: bool
    alignment_bytes: int
    fast_sums: bool = False  # fp8 only: accumulate at the tensor cores' own width throughout
    a_stride: int = 0  # elements from one row of a in memory to the next; 0 if contiguous
    b_stride: int = 0
    whole_sums: bool = False  # no split of the inner dimension, which makes another sum for another n

    def name(self) -> str:
        """The key in a table of algorithms."""
        op = "NT"[self.transpose_a] + "NT"[self.transpose_b]
        inputs = (self.a_dtype,) if self.a_dtype == self.b_dtype else (self.a_dtype, self.b_dtype)
        kind = "-".join(str(k).removeprefix("torch.") for k in (*inputs, self.out_dtype))
        kind += "-tf32" * self.tf32 + "-fast" * self.fast_sums
        aligned = "" if self.alignment_bytes == ALIGNMENT_BYTES else f" align{self.alignment_bytes}"
        aligned += f" strides {self.a_stride} {self.b_stride}" if self.a_stride or self.b_stride else ""
        return f"{self.m}x{self.n}x{self.k} {op} {kind} {EPILOGUES[self.epilogue]}{' add' * self.adds}{aligned}"


class Plan:
    """A GEMM's descriptors and algorithm, ready to launch."""

    def __init__(self, product: Product):
        self.product = product
        self.is_fp8 = product.a_dtype.itemsize == 1
        self.descriptor = lt.matmul_desc_create(*self.types()[:2])
        attribute = lt.MatmulDescAttribute
        self.set(attribute.TRANSA, int(product.transpose_a), np.int32)
        self.set(attribute.TRANSB, int(product.transpose_b), np.int32)
        self.set(attribute.EPILOGUE, product.epilogue, np.int32)
        if product.epilogue in (GELU_AUX_BIAS, DGELU):
            self.set(attribute.EPILOGUE_AUX_LD, product.m, np.int64)
        m, n, k = product.m, product.n, product.k
        if self.is_fp8:
            self.set(attribute.FAST_ACCUM, int(product.fast_sums), np.int8)
        a_shape, b_shape = (k, m) if product.transpose_a else (m, k), (n, k) if product.transpose_b else (k, n)
        self.a = lt.matrix_layout_create(DATA_TYPES[product.a_dtype], *a_shape, product.a_stride or a_shape[0])
        self.b = lt.matrix_layout_create(DATA_TYPES[product.b_dtype], *b_shape, product.b_stride or b_shape[0])
        self.d = lt.matrix_layout_create(DATA_TYPES[product.out_dtype], m, n, m)
        self.beta = ONE if product.adds else ZERO
        self.algorithm: np.ndarray = self.whole() if product.whole_sums else self.choose()

    def set(self, attribute: int, value: int, dtype: type) -> None:
        buffer = np.array([value], dtype)
        lt.matmul_desc_set_attribute(self.descriptor, int(attribute), buffer.ctypes.data, buffer.nbytes)

    def choose(self) -> np.ndarray:
        """The table's algorithm, or the heuristic's first. Raises `UsageError` if the library has none that fits."""
        frozen = self.frozen()
        if frozen is not None:
            return frozen
        heuristic = self.candidates(1)
        if not heuristic:
            raise UsageError(
                f"cuBLASLt has no algorithm for the product {self.product.name()} on {torch.cuda.get_device_name()}:"
                " channels must be a multiple of 8; use --backend reference for other sizes, or where the library lacks it"
            )
        return heuristic[0]

    def whole(self) -> np.ndarray:
        """The algorithm of `choose` without its split of the inner dimension. If the library lacks that form, the next one
        of the heuristic that it has unsplit. Raises `UsageError` if there is none."""
        settings = np.array([1], np.int32), np.array([int(lt.ReductionScheme.NONE)], np.uint32)
        for algorithm in (self.choose(), *self.candidates(MOST_CANDIDATES)):
            with contextlib.suppress(lt.cuBLASLtError):  # a split one may have no form without its split
                for attribute, value in zip((SPLITS, REDUCTION), settings, strict=True):
                    setting = algorithm.ctypes.data, int(attribute), value.ctypes.data, value.nbytes
                    lt.matmul_algo_config_set_attribute(*setting)
                self.check(algorithm)
                return algorithm
        raise UsageError(
            f"cuBLASLt has no algorithm for the product {self.product.name()} in one program, which a run on rewards needs;"
            " use --backend reference"
        )

    def check(self, algorithm: np.ndarray) -> None:
        """Raises `cuBLASLtError` if the library refuses an algorithm."""
        result, layouts = lt.MatmulHeuristicResult(1), (self.a, self.b, self.d, self.d)
        lt.matmul_algo_check(library(), self.descriptor, *layouts, algorithm.ctypes.data, result.ptr)

    def frozen(self) -> np.ndarray | None:
        """The table's algorithm or None: eight 64-bit words, valid only for this library version. Raises `DataError`."""
        words = frozen_algorithms().get(self.product.name())
        if words is None:
            return None
        algorithm = np.array([int(word, 16) for word in words], np.uint64)
        try:
            self.check(algorithm)
        except lt.cuBLASLtError as error:
            raise DataError(
                f"cuBLASLt refuses the tuned algorithm of {self.product.name()} ({error}); remove {user_table()} or run"
                " `python -m benchmarks.tune` again"
            ) from None
        return algorithm

    def candidates(self, count: int, algorithm_id: int | None = None) -> list[np.ndarray]:
        """Up to `count` algorithms from the library's heuristic, best first; only of the family `algorithm_id` if given."""
        preference = lt.matmul_preference_create()

        def prefer(attribute: int, value: int, dtype: type) -> None:
            buffer = np.array([value], dtype)
            lt.matmul_preference_set_attribute(preference, int(attribute), buffer.ctypes.data, buffer.nbytes)

        attribute = lt.MatmulPreferenceAttribute
        prefer(attribute.MAX_WORKSPACE_BYTES, WORKSPACE_BYTES, np.uint64)
        for matrix in "ABCD":
            prefer(getattr(attribute, f"MIN_ALIGNMENT_{matrix}_BYTES"), self.product.alignment_bytes, np.uint32)
        results, found_count = lt.MatmulHeuristicResult(count), np.zeros(1, np.int32)
        words = results._data["algo"]["data_"].reshape(-1, 8)  # the opaque structs, which the library lets callers save
        if algorithm_id is not None:
            prefer(attribute.SEARCH_MODE, int(lt.MatmulSearch.LIMITED_BY_ALGO_ID), np.int32)
            words[0] = self.family(algorithm_id)
        layouts = self.a, self.b, self.d, self.d
        try:
            lt.matmul_algo_get_heuristic(
                library(), self.descriptor, *layouts, preference, count, results.ptr, found_count.ctypes.data
            )
        except lt.cuBLASLtError:  # NOT_SUPPORTED: no algorithm at all
            return []
        finally:
            lt.matmul_preference_destroy(preference)
        return [words[i].copy() for i in range(found_count[0])]

    def types(self) -> tuple[int, ...]:
        """The library's codes for the types of the computation, the scale, a, b, c and d."""
        product = self.product
        compute = COMPUTE_32F_FAST_TF32 if product.tf32 else COMPUTE_32F
        kinds = (torch.float32, product.a_dtype, product.b_dtype, product.out_dtype, product.out_dtype)
        return compute, *(DATA_TYPES[kind] for kind in kinds)

    def family(self, algorithm_id: int) -> np.ndarray:
        """The words of a family's algorithm, with all of its settings at their defaults."""
        algorithm = np.zeros(8, np.uint64)
        lt.matmul_algo_init(library(), *self.types(), algorithm_id, algorithm.ctypes.data)
        return algorithm

    def families(self) -> list[int]:
        """Ids of the algorithm families that support these types."""
        return list(lt.matmul_algo_get_ids(library(), *self.types(), 64))

    def launch(
        self,
        d: Tensor,
        a: Tensor,
        b: Tensor,
        c: Tensor,
        bias: Tensor | None,
        aux: Tensor | None,
        inverse_scales: InverseScales | None,
        scratch: Tensor,
    ) -> None:
        """d = op(a) op(b) + beta c with this plan's epilogue, on the current stream."""
        attribute = lt.MatmulDescAttribute
        a_inverse, b_inverse = inverse_scales or (None, None)
        for pointer, tensor in (
            (attribute.A_SCALE_POINTER, a_inverse),
            (attribute.B_SCALE_POINTER, b_inverse),
            (attribute.BIAS_POINTER, bias),
            (attribute.EPILOGUE_AUX_POINTER, aux),
        ):
            if tensor is not None:
                self.set(pointer, tensor.data_ptr(), np.uint64)
        assert scratch.numel() >= WORKSPACE_BYTES
        inputs = ONE.ctypes.data, a.data_ptr(), self.a, b.data_ptr(), self.b, self.beta.ctypes.data, c.data_ptr(), self.d
        workspace = self.algorithm.ctypes.data, scratch.data_ptr(), WORKSPACE_BYTES
        stream = torch.cuda.current_stream().cuda_stream
        lt.matmul(library(), self.descriptor, *inputs, d.data_ptr(), self.d, *workspace, stream)


@functools.cache
def library() -> int:
    """The library's handle, one per process."""
    return lt.create()


PLANS: dict[Product, Plan] = {}  # one per GEMM that this process has launched


def plan(product: Product) -> Plan:
    """The plan of a GEMM, created at its first launch."""
    return PLANS.get(product) or PLANS.setdefault(product, Plan(product))


def multiply(
    d: Tensor,
    a: Tensor,
    b: Tensor,
    *,
    scratch: Tensor,
    transpose_a: bool = False,
    transpose_b: bool = False,
    epilogue: int = PLAIN,
    added: Tensor | None = None,
    bias: Tensor | None = None,
    aux: Tensor | None = None,
    inverse_scales: InverseScales | None = None,
    fast_sums: bool = False,
    tf32: bool = False,
    whole_sums: bool = False,
) -> None:
    """The column-major GEMM d = op(a) op(b) + added on row-major tensors d (n, m), a and b.

    fp8 operands need `inverse_scales`, and Hopper multiplies them only with `transpose_a` and without `transpose_b`.
    With `tf32` the tensor cores read 19 bits of float32 operands. `whole_sums`: one program adds up the inner dimension, so
    that a row of d does not depend on the number of rows."""
    n, m = d.shape
    k = a.shape[1] if transpose_a else a.shape[0]
    c = d if added is None else added
    pointers = d.data_ptr() | a.data_ptr() | b.data_ptr() | c.data_ptr() | ALIGNMENT_BYTES
    product = Product(
        *(m, n, k, transpose_a, transpose_b, a.dtype, b.dtype, d.dtype, epilogue),
        adds=added is not None,
        tf32=tf32 and a.dtype == torch.float32,
        alignment_bytes=pointers & -pointers,
        fast_sums=fast_sums,
        a_stride=0 if a.is_contiguous() else a.stride(0),
        b_stride=0 if b.is_contiguous() else b.stride(0),
        whole_sums=whole_sums,
    )
    plan(product).launch(d, a, b, c, bias, aux, inverse_scales, scratch)


# Frozen algorithms.


def table_name() -> str:
    """File name of the table for this GPU and library, such as 'nvidia-h200-cublaslt-130100.json'."""
    gpu = torch.cuda.get_device_name().lower().replace(" ", "-")
    return f"{gpu}-cublaslt-{lt.get_version()}.json"


def user_table() -> Path:
    """The table that `python -m benchmarks.tune` writes; its rows override the shipped ones."""
    return Path.home() / ".cache" / "handgrad" / "tuned" / table_name()


def shipped_table() -> Path:
    return Path(__file__).parent / "tuned" / table_name()


def describe() -> str:
    """The library's version and the table in use, with a hash of its rows: the bits depend on these."""
    rows = frozen_algorithms()
    if not rows:
        return (
            f"cuBLASLt {lt.get_version()}, the heuristic's first algorithms (`python -m benchmarks.tune` finds faster ones)"
        )
    digest = hashlib.sha256(json.dumps(rows, sort_keys=True).encode()).hexdigest()[:12]
    whose = "tuned here" if user_table().exists() else f"tuned for {torch.cuda.get_device_name()}"
    return f"cuBLASLt {lt.get_version()}, {len(rows)} algorithms {whose} ({digest})"


def tuning() -> str:
    """Names the tables of algorithms for this GPU and library; without any, says that the heuristic decides."""
    tables = {"tuned here": user_table(), "shipped": shipped_table()}
    files = [f"{path.name} ({whose})" for whose, path in tables.items() if path.exists()]
    if files:
        return f"GEMM algorithms from {' over '.join(files)}"
    shipped = ", ".join(sorted(path.name for path in shipped_table().parent.glob("*.json")))
    return (
        f"GEMM algorithms from cuBLASLt's heuristic: no table {table_name()} (shipped: {shipped});"
        " `python -m benchmarks.tune MODEL`, in the repository, measures each GEMM and writes the table"
    )


@functools.cache
def frozen_algorithms() -> dict[str, list[str]]:
    """The words of the algorithms by GEMM. The user's table overrides the shipped one."""
    return read_table(shipped_table(), "algorithms") | read_table(user_table(), "algorithms")


def read_table(path: Path, part: str) -> dict[str, Any]:
    """The part "algorithms" or "keep_bf16" of a table, empty if there is none. Raises `DataError` if it is damaged."""
    if not path.exists():
        return {}
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
        return dict(table[part] if part in table or part == "algorithms" else {})  # older tables lack the other
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{path} is no table of algorithms ({error}); remove it, or run `python -m benchmarks.tune`"
        ) from None
