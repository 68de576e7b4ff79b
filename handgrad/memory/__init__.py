"""Memory planning: tables of parameters and activations with lifetimes, flat buffers, allocations."""
