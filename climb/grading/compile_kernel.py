"""Compiles the kernel of step 15 for an H100, and prints its costs as JSON: python compile_kernel.py FILE

Run without TRITON_INTERPRET, and without torch: then it takes two seconds and no GPU.
"""

import importlib.util
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

BLOCK, WARPS, HOPPER = 1024, 4, 90


def main() -> None:
    spec = importlib.util.spec_from_file_location("reader", sys.argv[1])
    spec.loader.exec_module(module := importlib.util.module_from_spec(spec))
    types = dict.fromkeys(("y", "x", "weight", "bias"), "*bf16") | {"C": "i32", "epsilon": "fp32", "BLOCK": "constexpr"}
    aligned = {(place,): [["tt.divisibility", 16]] for place in range(5)}  # as tensors and a C of 768 are
    source = ASTSource(module.triton_layer_norm, types, constexprs={"BLOCK": BLOCK}, attrs=aligned)
    made = triton.compile(source, target=GPUTarget("cuda", HOPPER, 32), options={"num_warps": WARPS})
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
        usage = subprocess.run(
            [tool, "--dump-resource-usage", file.name], check=True, capture_output=True, text=True
        ).stdout
    registers, stack = map(int, re.search(r"REG:(\d+) STACK:(\d+)", usage).groups())
    loads = re.findall(r"ld(?:\.\w+)*?\.global[\w.:]*?(?:\.v(\d))?\.b(\d+)\s", made.asm["ptx"])
    lane_bytes = sum(int(count or 1) * int(bits) // 8 for count, bits in loads)
    spills = stack + len(re.findall(r"[ls][dt]\.local", made.asm["ptx"]))
    read = lane_bytes * 32 * WARPS
    print(json.dumps({"registers": registers, "shared": made.metadata.shared, "spills": spills, "read": read}))


if __name__ == "__main__":
    main()
