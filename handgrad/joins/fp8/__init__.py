"""GEMMs in fp8, beside the plain path: `reference` and `cuda` are backends with the operations of the plain ones and those
named here. Their tensors are plain or `Quantized`, each by itself; start at `formats`."""

# What the fp8 backends have beside `handgrad.ops.OPERATIONS`.
OPERATIONS = ("quantize", "transpose", "fold_statistics", "update_scaling", "statistics_parts", "tuned_keep_bf16")
