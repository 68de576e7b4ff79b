"""GEMMs in fp8. The backends `reference` and `cuda` have all plain operations and the further ones named here. Each tensor
argument may be plain or `Quantized`. Start at `formats`."""

# Operations of the fp8 backends besides `handgrad.ops.OPERATIONS`.
OPERATIONS = ("quantize", "transpose", "fold_statistics", "update_scaling", "statistics_parts", "tuned_keep_bf16")
