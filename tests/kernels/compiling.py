"""Compiles a Triton kernel for a GPU that is not there, and says what it costs: registers, stack, shared memory, and what
its PTX does.

Needs a process without TRITON_INTERPRET (or with 0 in it): tests start one.
"""

import functools
import gc
import re
import subprocess
import tempfile
import unittest.mock
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tests.kernels import compiled_record

# Bytes of shared memory that one program may use: CUDA C++ Programming Guide, table of compute capabilities.
SHARED_LIMIT = {75: 64 << 10, 80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10}
SHARED_LIMIT |= {120: 99 << 10, 121: 99 << 10}

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


def compile_kernel(
    kernel: triton.JITFunction,
    signature: dict[str, str],
    constants: dict[str, object],
    num_warps: int,
    num_stages: int,
    arch: int,
    **options: object,
) -> dict[str, Any]:
    """The costs of a kernel, as `costs_of` names them. `signature` gives the type of each argument that `constants` does
    not; ":16" behind it ("*bf16:16", "i32:16") promises divisibility by 16, as aligned tensors and strides have."""
    types, attributes = {}, {}
    constants = {p.name: p.default for p in kernel.params if p.is_constexpr and p.has_default} | constants
    for index, name in enumerate(kernel.arg_names):
        types[name], _, divisor = ("constexpr" if name in constants else signature[name]).partition(":")
        if divisor:
            attributes[(index,)] = [["tt.divisibility", int(divisor)]]
    source = ASTSource(kernel, types, constexprs=constants, attrs=attributes)
    options = {"num_warps": num_warps, "num_stages": num_stages, **options}
    target = GPUTarget("cuda", arch, 32)

    def compiled() -> dict[str, Any]:
        made = triton.compile(source, target=target, options=options)
        ptx = made.asm["ptx"]
        return {
            **resources(made.asm["cubin"]),
            "shared": made.metadata.shared,
            "serialized": serialized_wgmma(ptx) if arch == 90 and "wgmma.mma_async" in ptx else "",
            **costs_of(ptx),
        }

    return compiled_record.costs(source, target, options, costs_of, compiled)


def compile_all(compile_one: Callable[[Any], dict[str, Any]], jobs: Iterable[Any]) -> list[dict[str, Any]]:
    """A table's rows, two at a time. Python's collector rests, and a function is parsed once for all kernels that call it:
    with both, a quarter of the work of lowering."""
    gc.disable()
    parse = functools.cache(triton.JITFunction.parse)
    with unittest.mock.patch.object(triton.JITFunction, "parse", parse), ThreadPoolExecutor(2) as pool:
        rows = list(pool.map(compile_one, jobs))
    gc.enable()
    return rows


def costs_of(ptx: str) -> dict[str, Any]:
    """A kernel's instructions, counted in its PTX; `load` and `store` are bytes of the widest global access of one lane."""

    def widest(operation: str) -> int:
        found = re.findall(rf"{operation}\.global[\w.:]*?(?:\.v(\d))?\.b(\d+)\s", ptx)
        return max((int(count or 1) * int(bits) // 8 for count, bits in found), default=0)

    before, _, _ = ptx.partition("griddepcontrol.wait")  # the kernel before it may still run
    loads = [int(v or 1) * int(b) // 8 for v, b in re.findall(r"ld\.global[\w.:]*?(?:\.v(\d))?\.b(\d+)", before)]
    copies = [int(size, 16) for size in re.findall(r"cp\.async\.c[ag]\.shared\.global [^;]*?\], 0x(\w+)", before)]
    ahead = [int(size, 16) for size in re.findall(r"cp\.async\.cg\S+ .*0x([0-9a-f]+), %r", ptx)]
    return {
        "load": widest("ld"),
        "store": widest("st"),
        "spills": len(re.findall(r"[ls][dt]\.local", ptx)),
        "copy": max(ahead, default=0),  # bytes of the widest copy ahead of a loop
        "copies": len(re.findall(r"cp\.async\.c[ag]\.", ptx)),
        "wide_copies": ptx.count("cp.async.cg"),  # of 16 bytes, from global to shared memory
        "wide_reads_before_waiting": sum(size == 16 for size in loads + copies),
        "small_copies_before_waiting": sum(size < 16 for size in copies),
        "conversions": sorted(set(re.findall(r"cvt\.rn[\w.]*\.e[45]m[23]x2\.\w+", ptx))),
        "single_conversions": ptx.count("cvt.rn.bf16.f32"),
        "exponentials": ptx.count("ex2."),
        "quotients": ptx.count("rcp.") + ptx.count("div."),
        "wgmma": "wgmma.mma_async" in ptx,
        "tensor_cores": "mma" in ptx,
    }


def resources(cubin: bytes) -> dict[str, Any]:
    """Registers and bytes of stack of a lane."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = run(TOOLS / "cuobjdump", "--dump-resource-usage", file.name)
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert found, usage
    return {"registers": int(found[1]), "stack": int(found[2])}


def serialized_wgmma(ptx: str) -> str:
    """On Hopper, what ptxas says where it runs tensor-core instructions one after another, else "". Triton drops it: so the
    PTX is assembled a second time."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx)
        said = run(TOOLS / "ptxas", "-v", "--gpu-name", "sm_90a", str(source), "-o", str(source.with_suffix(".cubin")))
    return "\n".join(line for line in said.splitlines() if "wgmma" in line and "serialized" in line)


def run(*command: str | Path) -> str:
    result = subprocess.run(command, check=True, capture_output=True, text=True)
    return result.stdout + result.stderr
