"""Several processes that train together.

launchers      this process's rank, as torchrun, srun or mpirun tells it
rendezvous     how the processes form a group, and leave it
ranks          the group: its collectives, checked against each other
heartbeat      tells the others that this process lives, and ends it when one of them is lost
order          the sequence of collectives, the same on all ranks
replicas       the ranks' copies of the weights, the same on all ranks
stragglers     the rank that the others wait for
gradient_sync  sums the lanes' gradients in a fixed tree, all-gathers the updated weights
"""
