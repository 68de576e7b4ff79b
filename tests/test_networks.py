"""Networks own their shape: nothing else compares their names, and what their records say is what their tables have."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import handgrad
from handgrad.memory.rows import count_parameters
from handgrad.models import parameter_table
from handgrad.networks import NETWORKS
from handgrad.settings.config import ModelShape

PACKAGE = Path(handgrad.__file__).parent
SHAPES = {
    "gpt2": ModelShape(57, 32, 2, 2, 32),
    "modern": ModelShape(57, 32, 2, 2, 32, "modern"),
    "modern, untied": ModelShape(57, 32, 2, 2, 32, "modern", "untied_head"),
    "llama": ModelShape(57, 32, 2, 4, 32, "llama", llama="kv_heads=2,head_width=16,qkv_bias,qk_norm"),
    "llama, tied": ModelShape(57, 32, 2, 4, 32, "llama", llama="tied"),
    "gemma3": ModelShape(57, 32, 2, 4, 32, "gemma3", gemma3="kv_heads=1,head_width=16"),
    "olmo": ModelShape(57, 32, 2, 4, 32, "olmo", olmo="kv_heads=1"),
}


@pytest.mark.parametrize("module", ["handgrad.networks", "handgrad.networks.lora", "handgrad.networks.fp8"])
def test_networks_are_free_of_torch(module: str) -> None:
    code = f"import sys, {module}; sys.exit(' '.join({{'torch', 'triton'}} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stderr.strip() == ""


@pytest.mark.parametrize("name", SHAPES)
def test_the_gemms_are_the_matrices_of_the_table(name: str) -> None:
    shape = SHAPES[name]
    gemms = {gemm.weight: (sum(gemm.outputs.values()), gemm.inputs) for gemm in shape.gemms}
    rows = {row.name.removeprefix("blocks.1."): row for row in parameter_table(shape) if "blocks.0." not in row.name}
    assert gemms == {name: row.shape for name, row in rows.items() if row.group == "matrix"}
    in_blocks = gemms if shape.fp8_parts else ()  # none: of the loss head alone
    assert rows.keys() & shape.forms.keys() == {*in_blocks, "head" if "head" in rows else "wte"}


def test_every_parameter_of_gpt2_is_counted() -> None:
    shape = SHAPES["gpt2"]
    attention = shape.num_layers * shape.channels * shape.sequence_length
    assert shape.flops_per_token == 6 * (count_parameters(parameter_table(shape)) + attention)


# llm.c's files hold a GPT-2, and `bench fp8` measures its kernels.
NAMING = {"interop/export.py": 1, "commands/bench.py": 1, "networks/modern.py": 2}


def test_nothing_else_compares_an_architectures_name() -> None:
    found: dict[str, int] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Compare) and "architecture" in ast.unparse(node):
                sides = {side.value for side in ast.walk(node) if isinstance(side, ast.Constant)}
                if sides & NETWORKS.keys():
                    name = str(path.relative_to(PACKAGE))
                    found[name] = found.get(name, 0) + 1
    assert found == NAMING
