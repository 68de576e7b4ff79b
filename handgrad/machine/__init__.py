"""The machine at hand: devices, limits, threads, power, CUDA graphs, and the backend that it can run."""
