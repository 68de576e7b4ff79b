"""Several processes that train together.

launchers   where this process stands, told by torchrun, srun or mpirun
joining     how the processes find each other, and part
ranks       the group of processes: its collectives, checked against each other
watch       tells the others that this process lives, and ends it when one of them is lost
stragglers  which rank the others wait for
network     how fast the collectives and the links between ranks are
"""
