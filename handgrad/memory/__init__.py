"""Tensors as rows that become planned memory: parameters, activations and their lifetimes, flat buffers, allocations."""
