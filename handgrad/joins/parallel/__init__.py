"""Multi-process training.

launchers      reads this process's rank from torchrun, srun or mpirun
rendezvous     forms the group of processes, and leaves it
ranks          the group and its collectives, checked against each other
heartbeat      signals that this process is alive, and ends it if another one is lost
order          checks that all ranks run the same sequence of collectives
replicas       checks that all ranks hold the same weights
stragglers     finds the rank that the others wait for
gradient_sync  sums the lanes' gradients in a fixed tree, all-gathers the updated weights
"""
