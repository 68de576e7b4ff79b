"""Kernels that were compiled before: their costs, by a hash of everything that determines the machine code.

    python -m tests.kernels.compiled_record      compiles every table anew and writes the record

To compile a kernel takes 0.4 CPU seconds; to lower it to Triton's first form (TTIR), 0.03. The hash is of that form, the
options, the target and the versions of Triton and ptxas. Constants, argument types and every function that the kernel calls
are in it by their effect; comments and line numbers are not. Tests read an unchanged kernel's costs here. They compile each
other kernel, until the record is made anew, and each day another fiftieth of the recorded ones, whose costs must be those
recorded. Whoever runs a table by hand compiles all of it.
"""

import functools
import hashlib
import importlib
import inspect
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler.compiler import get_cache_invalidating_env_vars, make_backend

from benchmarks.record import keep_commit, provenance
from tests.kernels.tables import USE

RECORD = Path(__file__).parents[2] / "benchmarks" / "results" / "kernel-costs.json"
DAYS = 50  # after which each recorded kernel has been compiled once more
TABLES = ("attention", "decode", "fp8", "gelu_fp8", "llama_fp8", "memory", "modern", "modern_fp8", "muon")

made: dict[str, dict[str, Any]] = {}  # hash: costs, of what this process compiled


def costs(
    source: ASTSource,
    target: GPUTarget,
    options: dict[str, object],
    counts: Callable[[str], dict[str, Any]],
    compiled: Callable[[], dict[str, Any]],
) -> dict[str, Any]:
    """The recorded costs of a kernel, or those that `compiled` finds. `counts` is the part of `compiled` that reads the
    PTX, and belongs to the hash. Raises `AssertionError` where a kernel of the day costs something else than recorded."""
    key = kernel_hash(source, target, options, counts)
    found = recorded().get(key)
    if found is None or int(key, 16) % DAYS == int(time.time()) // 86400 % DAYS:
        made[key] = compiled()
        assert found in (None, made[key]), f"{source.name} ({key}): {found} in {RECORD.name}, compiled {made[key]}"
        return made[key]
    return found


@functools.cache
def recorded() -> dict[str, dict[str, Any]]:
    """Hash: costs. Nothing where the process may not use the record."""
    if not os.environ.get(USE) or not RECORD.is_file():
        return {}
    record = json.loads(RECORD.read_text())
    return {key: dict(zip(record["fields"], values, strict=True)) for key, values in record["kernels"].items()}


def kernel_hash(
    source: ASTSource, target: GPUTarget, options: dict[str, object], counts: Callable[[str], dict[str, Any]]
) -> str:
    """Of all that its machine code and the reading of it depend on."""
    backend = make_backend(target)
    parsed = backend.parse_options(dict(options))
    context = triton._C.libtriton.ir.context()
    triton._C.libtriton.ir.load_dialects(context)
    backend.load_dialects(context)
    code, modules = backend.get_codegen_implementation(parsed), backend.get_module_map()
    form = source.make_ir(target, parsed, code, modules, context).str_nodebug()
    versions = triton.__version__, backend.hash(), sorted(get_cache_invalidating_env_vars().items())
    whole = form, parsed.hash(), target, *versions, inspect.getsource(counts)
    return hashlib.sha256("\n".join(map(str, whole)).encode()).hexdigest()[:16]


def main() -> None:
    assert not os.environ.get(USE), f"unset {USE}: the record is made of what is compiled"
    keep_commit()
    from tests.kernels.compiling import compile_all

    for name in TABLES:
        table = importlib.import_module(f"tests.kernels.{name}_kernel_table")
        print(f"{name}: {len(compile_all(table.compile_one, table.jobs_of_tests()))} kernels", flush=True)
    fields = list(next(iter(made.values())))
    head = {**provenance(torch.device("cpu")), "triton": triton.__version__, "fields": fields}
    lines = [f"  {json.dumps(key)}: {json.dumps(list(made[key].values()))}" for key in sorted(made)]
    start = json.dumps(head, indent=1).removesuffix("\n}")
    RECORD.write_text(start + ',\n "kernels": {\n' + ",\n".join(lines) + "\n }\n}\n")
    print(f"written    {RECORD}")


if __name__ == "__main__":
    from tests.kernels import compiled_record  # the module that compiling fills, not this process's __main__

    compiled_record.main()
