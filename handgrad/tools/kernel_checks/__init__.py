"""Each kernel launched once on small tensors, beside the reference.

checking    a launch, its results, the right ones, and how far these may differ
operations  every operation in 16 or 32 bits, also with dropout, beside the reference in float64
fp8         operations that make and multiply fp8 numbers
"""
