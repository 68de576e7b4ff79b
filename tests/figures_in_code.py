"""The records behind the figures of docstrings and comments, file by file, in the words of `tests/figures.py`."""

CLAIMS: dict[str, str] = {
    "handgrad/joins/fp8/cuda/linear.py": """in h200-fp8
6 = products[size=1558M][product=head][direction=dgrad][gradients=e4m3].fp8_other_sums_milliseconds \
 / products[size=1558M][product=head][direction=dgrad][gradients=e4m3].fp8_milliseconds - 1 in %
42 % = products[size=124M][product=head][direction=forward].fp8_other_sums_milliseconds \
 / products[size=124M][product=head][direction=forward].fp8_milliseconds - 1
2.7e-3 1.7e-3 = products[size=1558M][product=fc][direction=dgrad][gradients=e4m3].{sums_error, other_sums_error}
6.3e-3 = products[size=124M][product=head][direction=dgrad][gradients=e5m2].sums_error
5e-3 2e-4 = products[size=124M][product=fc][direction=wgrad][gradients=e4m3].{other_sums_error, sums_error}
4.1 = kernels[size=124M][kernel=bias sums of fc].share_of_copy * copy_terabytes_per_second in TB/s
4.2 TB/s = copy_terabytes_per_second
in h200-fp8-choices
1.5 ms = epilogues_milliseconds.124M_fcproj_dgrad.gelu_derivative
0.32 = epilogues_milliseconds.124M_fcproj_dgrad.plain""",
    "handgrad/ops/cuda/choosing.py": """in h200-decode-choices
32 us = runs."first*"."one program chooses, microseconds*"
6 = sum runs."second*"."choice in parts*"[*]""",
    "handgrad/ops/cuda/classifier.py": """in h200-kernel-choices
89 % = classifier_forward_backward_copy_bandwidth_share."8 warps*"
86 % = classifier_forward_backward_copy_bandwidth_share."16 warps*\"""",
    "handgrad/ops/sizes.py": """in h200-kernel-choices
92 % = layernorm_backward_copy_bandwidth_share.65536x768."three stages"
68 % = layernorm_backward_copy_bandwidth_share.65536x768."one stage"
90 % = bias_sums_copy_bandwidth_share.65536x2304."64 columns*"
76 % = bias_sums_copy_bandwidth_share.65536x2304."128 columns*\"""",
    "handgrad/joins/fp8/sizes.py": """in h200-fp8-choices
413 us = gelu_backward_microseconds_124M.8x128_4_warps
511 = gelu_backward_microseconds_124M.32_quads_x_64_columns_8_warps""",
    "handgrad/ops/cpu/attention.py": """in cpu-operation-choices
1.6 = figures.attention_forward_4x256_4_heads_of_32_ms.bf16 / figures.attention_forward_4x256_4_heads_of_32_ms.float32
1.9 times = figures.attention_backward_4x256_4_heads_of_32_ms.bf16 \
 / figures.attention_backward_4x256_4_heads_of_32_ms.float32""",
    "handgrad/ops/reference/classifier.py": """in cpu-operation-choices
9 ms = figures.softmax_256_rows_ms."masked rows in blocks"
21 = figures.softmax_256_rows_ms."masked rows at once\"""",
    "handgrad/ops/cpu/linear.py": """in cpu-operation-choices
293 = figures.float32_product_256x768x3072_gflop_per_second."oneDNN weight*"
440 GFLOP/s = figures.float32_product_256x768x3072_gflop_per_second."oneDNN forward"
190 = figures.float32_product_256x768x3072_gflop_per_second."torch.mm\"""",
    "handgrad/ops/reference/optimizer.py": """in cpu-operation-choices
13x = figures.squared_norm_124m_ms."square and sum" / figures.squared_norm_124m_ms."vector_norm over blocks\"""",
    "handgrad/commands/demo.py": """in cpu-first-minutes
three minutes = commands[command=make train].seconds in minutes""",
    "handgrad/settings/presets.py": """in cpu-first-minutes
three minutes = commands[command=make train].seconds in minutes""",
    "handgrad/training/feed.py": """in cpu-operation-choices
0.27 ms = figures.sorted_positions_of_65536_tokens_ms[*]""",
}

EXCEPTIONS: dict[str, dict[str, str]] = {
    "benchmarks/efficiency.py": {"reaches 90 % of linear": "the definition of the function"},
    "handgrad/memory/arena.py": {"within 1.6 % of the least": "a bound that tests hold"},
    "handgrad/commands/evaluate.py": {"one every 20 s elsewhere": "a constant"},
    "handgrad/data/prepare.py": {
        "about 32 MB of text": "arithmetic: 32 units of a million characters",
        "in a third of a": "a constant",
        "occurs twenty times in the": "arithmetic",
    },
    "handgrad/data/recipe.py": {"0.005 of hub rows": "a default"},
    "handgrad/data/sources.py": {"to a tenth": "a constant"},
    "handgrad/machine/devices.py": {"NVIDIA H200, 141 GB": "an example of the output"},
    "handgrad/format.py": {
        "48.3% MFU": "an example of the output",
        "152 GFLOP/s": "an example of the output",
        "9.8e9 -": "an example of the output",
    },
    "handgrad/ops/cuda/classifier.py": {
        "cache of 50 MB": "the vendor's specification",
        "saves seven of sixteen exponentials": "arithmetic",
        "and an eighth of rounding": "arithmetic",
    },
    "handgrad/ops/cuda/embedding.py": {"up 4 % of all tokens": "an example"},
    "handgrad/ops/cuda/activations.py": {
        "(1 + tanh u), u = sqrt(2/pi) (x + 0.044715 x^3)": "an equation",
        "1 + tanh u = 2 s, s": "an equation",
        "SLOPE (x + 0.044715 x^3)": "an equation",
        "0 times infinity": "arithmetic",
    },
    "handgrad/ops/cuda/optimizer.py": {"off by 1e-5 at 0.999": "arithmetic"},
    "handgrad/ops/reference/activations.py": {
        "(1 + tanh u), u = sqrt(2/pi) (x + 0.044715 x^3)": "an equation",
        "(1 + 3 * 0.044715 x^2)": "an equation",
    },
    "handgrad/reports/drawing.py": {"1.4 times its points": "arithmetic of the page", "to a hundredth of a": "a constant"},
    "handgrad/reports/plots.py": {"above 99 % of the values": "a constant", "after a fifth of the": "a constant"},
    "handgrad/reports/results.py": {"last 2 % of the steps": "a constant", "600, 8.19k": "an example of the output"},
    "handgrad/tools/plan.py": {"3e-3 -> '<1 s'": "an example of the output"},
    "handgrad/tools/profile.py": {
        "-> '4.1 GFLOP/s'": "an example of the output",
        "about 1": "arithmetic",
        "4.1e9": "an example of the output",
        "5.1e10": "an example of the output",
        "below a tenth of a": "an example of the output",
    },
    "handgrad/tools/speeds.py": {"a copy of 2 GB on the device (64 MB on a CPU)": "constants"},
    "benchmarks/attention_context.py": {"about 500 tokens": "arithmetic"},
    "benchmarks/busy.py": {"than a tenth of a": "arithmetic"},
    "benchmarks/first_minutes.py": {"last fifteen minutes": "a constant"},
    "benchmarks/fp8_products.py": {"about 0.05 in the": "arithmetic"},
    "benchmarks/gpu_faults.py": {"two minutes or so": "a constant"},
    "benchmarks/gpu_kernels.py": {"channels 124.5 million parameters the": "arithmetic"},
    "benchmarks/llama_speed.py": {"is a tenth of it": "arithmetic"},
    "benchmarks/network.py": {"'11.0 GB/s'": "an example of the output"},
    "benchmarks/polar.py": {"polynomial five times": "a constant"},
    "handgrad/api/model.py": {"of a quarter of the": "a constant"},
    "handgrad/data/pieces.py": {"about 256 Ki characters": "a constant", "modulo 4 GiB": "the format's"},
    "handgrad/data/hub.py": {"to five times in a": "a constant"},
    "handgrad/data/questions.py": {"An eighth of all": "a constant"},
    "handgrad/generation/chat.py": {"or a quarter of it": "a constant"},
    "handgrad/generation/decode.py": {"of a quarter of the": "a constant"},
    "handgrad/ops/reference/muon.py": {"from a thousandth to": "arithmetic"},
    "handgrad/reports/serve.py": {"most a tenth of one": "a constant"},
    "handgrad/run/settings.py": {"most a quarter of the": "a constant"},
    "handgrad/run/step_check.py": {"a third attempt decides": "an ordinal"},
    "handgrad/run/autosize.py": {
        "most four times": "a constant",
        "three minutes on two": "a constant",
        "most a quarter of the": "a constant",
    },
    "handgrad/tools/gradient_checks.py": {"1.5e-10 f'''": "arithmetic", "around 1": "arithmetic"},
    "handgrad/joins/offload.py": {"a third of a": "a constant"},
}
