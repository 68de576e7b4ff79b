"""Gradients by hand beside central differences of the forward: no autograd, no other library.

differences   the central differences, and the comparison
operations    a case per backward of `ops.reference`
models        every parameter of a small network of each architecture
"""
