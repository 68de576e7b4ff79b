"""Compiles a Triton kernel for a GPU that is not there, and says what it costs: registers, stack, shared memory.

Needs a process without TRITON_INTERPRET (or with 0 in it): tests start one.
"""

import re
import subprocess
import tempfile
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

# Bytes of shared memory that one program may use: CUDA C++ Programming Guide, table of compute capabilities.
SHARED_LIMIT = {75: 64 << 10, 80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


def compile_kernel(
    kernel: triton.JITFunction,
    signature: dict[str, str],
    constants: dict[str, object],
    num_warps: int,
    num_stages: int,
    arch: int,
    **options: object,
) -> dict:
    """{ptx, cubin, registers, stack, shared, serialized} of a kernel. `signature` gives the type of each argument that
    `constants` does not; ":16" behind it ("*bf16:16", "i32:16") promises divisibility by 16, as aligned tensors and strides
    have. `serialized`: on Hopper, what ptxas says where it runs tensor-core instructions one after another, else ""."""
    types, attributes = {}, {}
    constants = {p.name: p.default for p in kernel.params if p.is_constexpr and p.has_default} | constants
    for index, name in enumerate(kernel.arg_names):
        types[name], _, divisor = ("constexpr" if name in constants else signature[name]).partition(":")
        if divisor:
            attributes[(index,)] = [["tt.divisibility", int(divisor)]]
    source = ASTSource(kernel, types, constexprs=constants, attrs=attributes)
    options = {"num_warps": num_warps, "num_stages": num_stages, **options}
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    cubin = compiled.asm["cubin"]
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = run(TOOLS / "cuobjdump", "--dump-resource-usage", file.name)
    ptx = compiled.asm["ptx"]
    registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", usage).groups()
    return {
        "ptx": ptx,
        "cubin": cubin,
        "registers": int(registers),
        "stack": int(stack),
        "shared": compiled.metadata.shared,
        "serialized": serialized_wgmma(ptx) if arch == 90 and "wgmma.mma_async" in ptx else "",
    }


def serialized_wgmma(ptx: str) -> str:
    """ptxas says it among other things, and Triton drops it: so the PTX is assembled a second time."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx)
        said = run(TOOLS / "ptxas", "-v", "--gpu-name", "sm_90a", str(source), "-o", str(source.with_suffix(".cubin")))
    return "\n".join(line for line in said.splitlines() if "wgmma" in line and "serialized" in line)


def run(*command: str | Path) -> str:
    result = subprocess.run(command, check=True, capture_output=True, text=True)
    return result.stdout + result.stderr
