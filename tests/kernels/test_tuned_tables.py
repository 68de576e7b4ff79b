"""The shipped tables of algorithms: rows that a product can name, with the eight words the library wants."""

import json
import re
from pathlib import Path

import pytest

import handgrad
from handgrad.errors import UsageError

TABLES = sorted((Path(handgrad.__file__).parent / "ops" / "cuda" / "tuned").glob("*.json"))
KINDS = r"(bfloat16|float16|float32|float8_e4m3fn|float8_e4m3fn-float8_e5m2)-(bfloat16|float16|float32)(-tf32|-fast)?"
ROW = re.compile(rf"\d+x\d+x\d+ [NT][NT] {KINDS} (plain|bias|gelu|dgelu)( add)?( align\d+)?( strides \d+ \d+)?")


@pytest.mark.parametrize("path", TABLES, ids=lambda path: path.stem)
def test_a_table_belongs_to_one_gpu_and_library(path: Path) -> None:
    table = json.loads(path.read_text())
    assert path.stem == f"{table['gpu'].lower().replace(' ', '-')}-cublaslt-{table['cublaslt']}"
    for name, words in table["algorithms"].items():
        assert ROW.fullmatch(name), name
        assert len(words) == 8 and all(0 <= int(word, 16) < 1 << 64 for word in words), name


MICRO_BATCHES = {768: 64, 1024: 32, 1280: 32, 1600: 16}  # by channels


@pytest.mark.parametrize("C", MICRO_BATCHES)
def test_every_product_of_gpt2_is_tuned_for_the_h200(C: int) -> None:
    """Forward, input gradient and weight gradient of the four products of a block and of the head."""
    rows = json.loads(next(path for path in TABLES if "h200" in path.stem).read_text())["algorithms"]
    N, F, Vp, chunk = MICRO_BATCHES[C] * 1024, 4 * C, 50304, 4096
    forward = {(3 * C, C): "bias", (C, C): "bias add", (F, C): "gelu", (C, F): "bias add"}
    backward = {(3 * C, C): "plain", (C, C): "plain", (F, C): "plain", (C, F): "dgelu"}
    wanted = [f"{O}x{N}x{I} TN bfloat16-bfloat16 {epilogue}" for (O, I), epilogue in forward.items()]
    wanted += [f"{I}x{N}x{O} NN bfloat16-bfloat16 {epilogue}" for (O, I), epilogue in backward.items()]
    wanted += [f"{I}x{O}x{N} NT bfloat16-float32 plain add" for O, I in forward]
    wanted += [f"{Vp}x{chunk}x{C} TN bfloat16-bfloat16 plain", f"{C}x{chunk}x{Vp} NN bfloat16-bfloat16 plain"]
    wanted += [f"{C}x{Vp}x{chunk} NT bfloat16-float32 plain add"]
    e4m3, both = "float8_e4m3fn-bfloat16-fast", "float8_e4m3fn-float8_e5m2"
    forward[F, C] = "bias"  # with no GELU in fp8
    wanted += [f"{O}x{N}x{I} TN {e4m3} {epilogue}" for (O, I), epilogue in forward.items()]
    for kinds in ("float8_e4m3fn", both):  # by the format of the gradients
        wanted += [f"{I}x{N}x{O} TN {kinds}-bfloat16-fast plain" for O, I in forward]
        wanted += [f"{I}x{O}x{N} TN {kinds}-float32 plain add" for O, I in forward]
    wanted.append(f"{Vp}x{chunk}x{C} TN {e4m3} plain")
    assert [name for name in wanted if name not in rows] == []


def test_doctor_says_which_table_a_gpu_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("nvmath")
    cublaslt = pytest.importorskip("handgrad.ops.cuda.cublaslt")
    monkeypatch.setattr(cublaslt.lt, "get_version", lambda: 130100)
    monkeypatch.setattr(cublaslt.Path, "home", lambda: tmp_path)
    monkeypatch.setattr(cublaslt.torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    assert cublaslt.tuning() == "GEMM algorithms from nvidia-h200-cublaslt-130100.json (shipped)"
    monkeypatch.setattr(cublaslt.torch.cuda, "get_device_name", lambda: "NVIDIA A100")
    assert cublaslt.tuning() == (
        "GEMM algorithms from cuBLASLt's heuristic: no table nvidia-a100-cublaslt-130100.json (shipped:"
        " nvidia-h100-80gb-hbm3-cublaslt-130100.json, nvidia-h200-cublaslt-130100.json); `python -m benchmarks.tune MODEL`,"
        " in the repository, measures each GEMM and writes the table"
    )
    cublaslt.user_table().parent.mkdir(parents=True)
    cublaslt.user_table().write_text("{}")
    assert cublaslt.tuning() == "GEMM algorithms from nvidia-a100-cublaslt-130100.json (tuned here)"


@pytest.mark.parametrize(
    ("length", "num_heads", "channels", "problem"),
    [
        (1024, 12, 768, ""),
        (1024, 3, 768, ""),
        (1024, 2, 768, "heads may have up to 256"),
        (64, 1, 20, "multiple of 8"),
        (1 << 20, 12, 768, "2\\^31"),
    ],
)
def test_sizes_that_the_kernels_do_not_take(length: int, num_heads: int, channels: int, problem: str) -> None:
    kernels = pytest.importorskip("handgrad.ops.cuda")
    sizes = {"length": length, "num_heads": num_heads, "channels": channels}
    if not problem:
        kernels.check_sizes(**sizes)
        return
    with pytest.raises(UsageError, match=f"{problem}.*--backend reference"):
        kernels.check_sizes(**sizes)
