"""Each kernel launched once on small tensors, beside the reference.

draw          inputs, outputs and accumulators for one launch
checking      a launch, what it made, what is right, and how far these may differ
operations    every operation in 16 or 32 bits, beside the reference in float64
dropout       those of dropout
fp8           what makes and multiplies fp8 numbers
"""
