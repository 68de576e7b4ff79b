"""Figures with a measured unit that come from no record: the phrase that holds them, and why.

Nothing here is measured, but for the log's line, which no record holds.
"""

PAGES: dict[str, dict[str, str]] = {
    "CHANGELOG.md": {
        "takes 0.1 s of CPU time (2 s before)": "no record: taken by hand when the line was written",
        "have a line at 3.272": "llm.c's publication",
    },
    "docs/results.md": {
        "(NVIDIA H200, 150 GB)": "the machine's name",
        "power limit of 700 W": "the vendor's specification",
        "After 3 s that do not count": "WARM_UP_SECONDS of benchmarks/gpu_step.py",
    },
    "docs/distributed.md": {
        "within 8 %": "arithmetic of the lanes' shares",
        "after 4 s of load": "WARM_UP_SECONDS of benchmarks/scaling.py",
        "of 4x the slowest alone": "a heading",
        "5 or 20 µs a message": "nominal, an assumption of benchmarks/efficiency.py",
        "99.7 and 99.9 %": "arithmetic of benchmarks/efficiency.py",
        "97.8 and 98.6 %": "the table above; tests/test_scaling_docs.py makes the sentence",
        "90 % of linear": "the definition of a column",
        "90% of linear from": "the definition of a column",
    },
    "docs/arena.md": {
        "hold it below 1 %": "a bound that tests hold",
        "level 3 below 1.6 %": "a bound that tests hold",
        "within 1 % of the bound, 1.6 %": "a bound that tests hold",
    },
    "docs/data.md": {
        "tiny Shakespeare, 1.1 MB": "the size of a file",
        "0.005 of hub datasets": "a default",
        "would be 78 MB": "arithmetic: a table of 10 billion tokens",
        "h(key, 2k, a)": "an equation",
        "h(key, 2k + 1, b)": "an equation",
    },
    "docs/decisions.md": {
        "2.7 times as large": "arithmetic of the padding",
        "within 8 % at 124M": "arithmetic of the lanes' shares",
        "1.5 GB for 124M, 18.7 GB for 1558M": "arithmetic: 12 bytes a parameter",
        "400 MB a chunk": "arithmetic: 4096 rows of the vocabulary",
        "6 MB of workspace": "arithmetic: 8 bytes per query and head",
        "would be 80 MB per epoch": "arithmetic: 8 bytes a sample",
    },
    "docs/evaluation.md": {"GPT-2 124M has 0.2955 by it": "llm.c's publication"},
    "docs/launching.md": {
        "a pod 30 s after its stop": "Kubernetes' default",
        "slower than 70% of the median": "a threshold of `doctor`",
    },
    "docs/planning.md": {
        "0.985 of the step": "fitted; tests/test_planning.py holds the predictions",
        "and the 0.985": "the same",
        "at most 3 % off": "a bound that tests hold",
        "and 10 % in speed": "a bound that tests hold",
    },
    "docs/report.md": {
        "below 0 % |": "the floor by definition",
        "running mean over 2 % of the run": "a constant of the report",
        "stays below 2 MB": "a bound that tests hold",
        "line marks 3.272": "llm.c's publication",
    },
    "docs/stories.md": {
        "49.0 nats": "arithmetic of the grammar",
        "41.9 nats": "arithmetic of the grammar",
        "ln 20 = 3.0 nats": "arithmetic",
        "costs 0 nats": "arithmetic",
        "39.12 nats per story": "the grammar's entropy, computed",
        "0.470 nats per token": "the grammar's entropy, computed",
    },
    "docs/operations/muon.md": {
        "are 1.5 TFLOP a step": "arithmetic",
        "0.36 % of a\nstep": "arithmetic",
        "it is 142 MB, twelve matrices": "the plan",
        "is 34 bytes, where AdamW moves 30": "arithmetic",
        "That leaves 1.16 of the\n1.52 TFLOP": "arithmetic of the tiles",
    },
    "docs/operations/adamw.md": {
        "100 times too large": "an example",
        "a relative 5 % at most": "arithmetic of the moments",
        "the change of 0.1 %": "arithmetic of bf16",
        "3.5 GB per step, 3.7 in bf16": "arithmetic: 28 and 30 bytes a parameter",
    },
    "docs/operations/attention.md": {
        "that is 1.6 GB in bf16, against 3.1 MB": "arithmetic: B H T T and B H T numbers",
        "6.3 MB |": "arithmetic: 8 bytes per query and head",
        "3.3 MB |": "arithmetic: 8 bytes per query and head",
    },
    "docs/operations/classifier.md": {"the whole logits take 6.6 GB": "arithmetic"},
    "docs/operations/embedding.md": {
        "makes up 4 % of": "an example",
        "All four are below 85 %": "the goal of `bench kernels`",
    },
    "docs/operations/linear.md": {
        "warms the GPU for 3 s": "a constant of `tune`",
        "for 0.6 s each": "a constant of `tune`",
        "24 times in a micro-step": "a layer each",
        "it is below 85 %": "the goal of `bench kernels`",
    },
    "docs/operations/norm.md": {"that is 0.5 GB, against AdamW's 3.5 GB": "arithmetic: bytes a parameter"},
}

# Pages whose figures are not held yet.
NOT_YET: tuple[str, ...] = ()

# Records whose commit is none, or not in the history: why.
COMMITS: dict[str, str] = {
    "h200-llmc": "another program's",
    "h200-fp8-choices": "several trees of one day, some uncommitted, as the record says",
}
