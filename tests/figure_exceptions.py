"""Figures with a measured unit that come from no record: the phrase that holds them, and why.

Nothing here is measured, but for the log's line, which no record holds.
"""

PAGES: dict[str, dict[str, str]] = {
    "CHANGELOG.md": {
        "takes 0.1 s of CPU time (2 s before)": "no record: taken by hand when the line was written",
        "have a line at 3.272": "llm.c's publication",
        "is 1.5e-3 after": "a setting",
        "to forty times": "a setting",
        "spins ten times as long": "a constant of machine/threads.py",
        "nor a third time without": "an ordinal",
        "limit by about a tenth": "arithmetic",
        "than a tenth of an": "an example of the output",
        "and twenty times its rate": "a setting",
        "adds two ninths of the": "arithmetic",
    },
    "docs/results.md": {
        "6.4 million are the embedding": "arithmetic",
        "(NVIDIA H200, 150 GB)": "the machine's name",
        "power limit of 700 W": "the vendor's specification",
        "After 3 s that do not count": "WARM_UP_SECONDS of benchmarks/gpu_step.py",
        "needs ten times as many": "a constant of machine/threads.py",
    },
    "docs/distributed.md": {
        "after 4 s of load": "WARM_UP_SECONDS of benchmarks/scaling.py",
        "of 4x the slowest alone": "a heading",
        "5 or 20 µs a message": "nominal, an assumption of benchmarks/efficiency.py",
        "99.7 and 99.9 %": "arithmetic of benchmarks/efficiency.py",
        "97.8 and 98.6 %": "the table above; tests/test_scaling_docs.py makes the sentence",
        "90 % of linear": "the definition of a column",
        "than six times": "a constant",
        "by a tenth and five milliseconds": "a constant",
    },
    "docs/arena.md": {
        "hold it below 1 %": "a bound that tests hold",
        "level 3 below 1.6 %": "a bound that tests hold",
    },
    "docs/data.md": {
        "tiny Shakespeare, 1.1 MB": "the size of a file",
        "0.005 of hub datasets": "a default",
        "a tenth of it": "a default",
        "about 256 Ki characters": "a size",
    },
    "docs/decisions.md": {
        "three tenths of GPT-2 124M's GEMMs": "arithmetic",
        "2.7 times as large": "arithmetic of the padding",
        "within 8 % at 124M": "arithmetic of the lanes' shares",
        "1.5 GB for 124M, 18.7 GB for 1558M": "arithmetic: 12 bytes a parameter",
        "would be 80 MB per epoch": "arithmetic: 8 bytes a sample",
        "a thousand times larger than": "arithmetic",
        "two fifths more than the": "counted lines of code",
        "compile a fiftieth of the": "a constant of the tests",
        "it six times as large": "arithmetic",
    },
    "docs/evaluation.md": {"GPT-2 124M has 0.2955 by it": "llm.c's publication"},
    "docs/launching.md": {
        "a pod 30 s after its stop": "Kubernetes' default",
        "slower than 70% of the median": "a threshold of `doctor`",
        "up to five times": "a constant",
        "Two minutes before the": "a constant",
    },
    "docs/planning.md": {
        "0.985 of the step": "fitted; tests/test_planning.py holds the predictions",
        "and the 0.985": "the same",
        "at most 3 % off": "a bound that tests hold",
        "and 10 % in speed": "a bound that tests hold",
        "three times for each": "arithmetic",
        "a fourth where it": "arithmetic",
    },
    "docs/report.md": {
        "below 0 % |": "the floor by definition",
        "running mean over 2 % of the run": "a constant of the report",
        "stays below 2 MB": "a bound that tests hold",
        "line marks 3.272": "llm.c's publication",
        "most a tenth of one": "a default",
        "after a fifth of the": "a default",
    },
    "docs/stories.md": {
        "49.0 nats": "arithmetic of the grammar",
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
        "from a thousandth to": "arithmetic",
        "1 to a thousandth": "arithmetic",
        "first version five times": "a constant",
    },
    "docs/operations/adamw.md": {
        "100 times too large": "an example",
        "a relative 5 % at most": "arithmetic of the moments",
        "the change of 0.1 %": "arithmetic of bf16",
        "3.5 GB per step, 3.7 in bf16": "arithmetic: 28 and 30 bytes a parameter",
        "about 1 or less": "mathematics",
    },
    "docs/operations/attention.md": {
        "that is 1.6 GB in bf16, against 3.1 MB": "arithmetic: B H T T and B H T numbers",
        "query and head: 6.3 MB": "arithmetic",
        "the thirds of": "arithmetic",
    },
    "docs/operations/classifier.md": {
        "the whole logits take 6.6 GB": "arithmetic",
    },
    "docs/operations/embedding.md": {
        "about 256 equal contributions": "arithmetic",
    },
    "docs/operations/linear.md": {
        "warms the GPU for 3 s": "a constant of benchmarks/tune.py",
        "for 0.6 s each": "a constant of benchmarks/tune.py",
        "Four times per block": "mathematics",
    },
    "docs/operations/norm.md": {
        "that is 0.5 GB, against AdamW's 3.5 GB": "arithmetic: bytes a parameter",
    },
    "README.md": {"first ten minutes": "a title"},
    "docs/README.md": {"first ten minutes": "a title"},
    "docs/chat.md": {
        "An eighth of all": "a default",
        "most a quarter of it": "a default",
    },
    "docs/coming_from.md": {"a twentieth of the": "a default"},
    "docs/finetuning.md": {
        "most a quarter of the": "a default",
        "a twentieth of its": "a setting",
    },
    "docs/first_ten_minutes.md": {"first ten minutes": "a title"},
    "docs/lora.md": {"nine times as much": "arithmetic of the formula above"},
    "docs/modern.md": {
        "3e-3, 3e-1, 2.2e-1": "a setting",
        "warm-up of a hundredth": "a setting",
        "and twenty times the rate": "a setting",
        "from five times the rate": "a setting",
        "At twenty times the rate": "a setting",
    },
    "docs/operations/README.md": {"three times (forward once": "arithmetic"},
    "docs/operations/dropout.md": {"about half a dozen": "arithmetic"},
    "docs/operations/gelu.md": {
        "maximum is about 1.13": "mathematics",
        "about 10. Cancellation": "mathematics",
    },
    "docs/operations/layernorm.md": {"so a fifth of the": "arithmetic"},
    "docs/operations/mix.md": {"a hundred times as fast": "a constant"},
    "docs/operations/recompute.md": {
        "two ninths (level": "arithmetic",
        "1: a ninth": "arithmetic",
    },
    "docs/operations/relu2.md": {"around 0, as": "mathematics"},
    "docs/operations/rmsnorm.md": {"nearly 0,": "mathematics"},
    "docs/sampling.md": {"of a quarter of the": "a default"},
    "docs/training.md": {
        "up to four times": "arithmetic",
        "validates about ten times": "a default",
        "samples four times and saves": "a default",
        "524,288 | 2.5e-4 |": "a setting",
        "over a twentieth of the": "a setting",
        "to a tenth of its": "a setting",
        "over a tenth and": "a setting",
        "a fifth by default": "a setting",
    },
}

# Pages whose figures are not held yet.
NOT_YET: tuple[str, ...] = ()

# Records whose commit is none, or not in the history: why.
COMMITS: dict[str, str] = {
    "h200-llmc": "another program's",
    "h200-fp8-choices": "several trees of one day, some uncommitted, as the record says",
}
