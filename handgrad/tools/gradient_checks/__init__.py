"""Gradients by hand beside those that the forward alone gives, by central differences: no autograd, no other library.

differences   the central differences, and the comparison
operations    a case per backward of `ops.reference`
models        every parameter of a small network of each architecture
"""
