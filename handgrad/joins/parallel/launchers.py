"""Reads the rank of this process from its launcher's environment variables."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from handgrad.errors import UsageError

DEFAULT_PORT = 29500
SLURM_PORTS = range(20000, 40000)  # chosen by job number, so that two jobs on a node do not collide
OPEN_MPI = tuple(f"OMPI_COMM_WORLD_{part}" for part in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))
MPICH = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")


@dataclass(frozen=True)
class RankInfo:
    """One process of a group started together."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0  # among this machine's processes; selects the GPU
    local_size: int = 1
    launcher: str = ""  # empty for a single process
    address: str = ""  # of rank 0's machine
    port: int = 0

    @property
    def nodes(self) -> int:
        return -(-self.size // self.local_size)


def find_rank_info(environment: Mapping[str, str]) -> RankInfo:
    """Reads the variables of torchrun, srun or mpirun. Of nested launchers the innermost counts. Raises `UsageError`
    for an incomplete or contradictory environment."""
    if "RANK" in environment or "WORLD_SIZE" in environment:
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        return rank_info("torchrun", environment, names, address="", port=DEFAULT_PORT)
    # In a SLURM job, mpirun starts its daemons through srun, and their children inherit the daemon's SLURM numbers. But
    # `srun --mpi=pmi2` sets PMI_RANK too: without a local rank, srun started this process.
    names = OPEN_MPI if OPEN_MPI[0] in environment else MPICH
    if names[0] in environment and (names[2] in environment or not slurm_starts_several(environment)):
        local = environment.get(names[3]) == environment.get(names[1])
        return rank_info("mpirun", environment, names, address="127.0.0.1" if local else "", port=DEFAULT_PORT)
    if slurm_starts_several(environment):
        names = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "")
        nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST") or ""
        port = SLURM_PORTS[number(environment, "SLURM_JOB_ID", 0) % len(SLURM_PORTS)]
        local_size = tasks_here(environment)
        return rank_info("srun", environment, names, address=first_host(nodes), port=port, local_size=local_size)
    return RankInfo()


def slurm_starts_several(environment: Mapping[str, str]) -> bool:
    """True in one of several tasks of an `srun`. An `sbatch` script and an `salloc` shell also see the job's task
    count but are a single process; only the tasks of a step have SLURM_STEP_NUM_TASKS."""
    return "SLURM_PROCID" in environment and number(environment, "SLURM_STEP_NUM_TASKS", 1) > 1


def tasks_here(environment: Mapping[str, str]) -> int:
    """Tasks of this step on this node, from a list like "4(x2),3" in node order."""
    text = environment.get("SLURM_STEP_TASKS_PER_NODE") or environment.get("SLURM_TASKS_PER_NODE") or ""
    counts: list[int] = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        counts += [int(count)] * int(times or 1)
    node = number(environment, "SLURM_NODEID", 0)
    return counts[node] if node < len(counts) else number(environment, "SLURM_STEP_NUM_TASKS", 1)


def first_host(nodes: str) -> str:
    """The first host of a SLURM node list: "rack[1-2]gpu[003-006,9]-ib,x7" begins with rack1gpu003-ib."""
    first = re.findall(r"(?:[^,\[]|\[[^\]]*\])*", nodes)[0]  # up to the first comma outside brackets
    return re.sub(r"\[(\w*)[^\]]*\]", r"\1", first)


def rank_info(
    launcher: str,
    environment: Mapping[str, str],
    names: tuple[str, ...],
    *,
    address: str,
    port: int,
    local_size: int | None = None,
) -> RankInfo:
    """Reads and checks the `RankInfo` from the variables `names` (rank, size, local rank, local size)."""
    rank, size = (number(environment, name) for name in names[:2])
    if size < 1 or not 0 <= rank < size:
        raise UsageError(f"expected {names[0]} from 0 to {names[1]} - 1, found {rank} and {size}; start with {launcher}")
    if size == 1:
        return RankInfo()
    local_rank = number(environment, names[2])
    local_size = number(environment, names[3]) if local_size is None else local_size
    if not 0 <= local_rank < local_size:
        raise UsageError(f"expected {names[2]} below {local_size}, found {local_rank}; start again with {launcher}")
    address = environment.get("MASTER_ADDR") or address
    if not address:
        raise UsageError(f"MASTER_ADDR is not set; set it to the name of rank 0's machine, the same for all {size} ranks")
    port = number(environment, "MASTER_PORT", port)
    if not 1 <= port <= 65535:
        raise UsageError(f"expected MASTER_PORT from 1 to 65535, found {port}; set it to a free port, or not at all")
    return RankInfo(rank, size, local_rank, local_size, launcher, address, port)


def number(environment: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environment.get(name)
    if text is None and default is not None:
        return default
    if text is None or not re.fullmatch(r"\d+", text):
        raise UsageError(f"expected {name} to be a whole number, found {text!r}; start again with torchrun, srun or mpirun")
    return int(text)
