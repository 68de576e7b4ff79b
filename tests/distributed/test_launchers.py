"""The variables that torchrun, srun and mpirun set, and the errors if they contradict each other."""

import pytest

from handgrad.errors import UsageError
from handgrad.joins.parallel.launchers import RankInfo, find_rank_info, first_host, tasks_here

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "node7",
    "MASTER_PORT": "12345",
}
# What the script of an sbatch sees: the job's tasks, of which it is none.
BATCH = {
    "SLURM_JOB_ID": "40123",
    "SLURM_NTASKS": "8",
    "SLURM_NTASKS_PER_NODE": "4",
    "SLURM_TASKS_PER_NODE": "4(x2)",
    "SLURM_JOB_NODELIST": "gpu[003-006,9],x7",
    "SLURM_NODEID": "0",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
}
SRUN = {
    **BATCH,
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_STEP_TASKS_PER_NODE": "4,3",
    "SLURM_STEP_NODELIST": "gpu[004-005]",
    "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.1",  # where srun was typed, maybe a login node: not where rank 0 is
    "SLURM_NODEID": "1",
    "SLURM_PROCID": "6",
    "SLURM_LOCALID": "2",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
}
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"}


def test_a_single_process() -> None:
    assert find_rank_info({}) == RankInfo()
    assert RankInfo().nodes == 1
    assert find_rank_info({"MASTER_ADDR": "left over", "MASTER_PORT": "from something", "LOCAL_RANK": "3"}) == RankInfo()


def test_torchrun() -> None:
    info = find_rank_info(TORCHRUN)
    assert info == RankInfo(5, 8, 1, 4, "torchrun", "node7", 12345)
    assert info.nodes == 2
    assert find_rank_info({**SRUN, **OPEN_MPI, **MPICH, **TORCHRUN}) == info, "started by torchrun inside the others"


def test_srun() -> None:
    info = find_rank_info(SRUN)
    assert info == RankInfo(6, 7, 2, 3, "srun", "gpu004", 20123)
    assert find_rank_info({**SRUN, "MASTER_ADDR": "fast0", "MASTER_PORT": "999"}) == RankInfo(
        6, 7, 2, 3, "srun", "fast0", 999
    )
    listed_by_the_job = {name: value for name, value in SRUN.items() if name != "SLURM_STEP_NODELIST"}
    assert find_rank_info(listed_by_the_job).address == "gpu003"


@pytest.mark.parametrize(
    "environment",
    [
        pytest.param(BATCH, id="the script of an sbatch"),
        # The step of an salloc's shell is srun's with --preserve-env: the job's tasks, but one in the step.
        pytest.param({**BATCH, "SLURM_STEP_ID": "4294967290", "SLURM_STEP_NUM_TASKS": "1"}, id="the shell of an salloc"),
        pytest.param({**SRUN, "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}, id="an srun of one task"),
        pytest.param({"SLURM_JOB_ID": "5", "SLURM_NTASKS": "8"}, id="an salloc's shell where it was typed"),
    ],
)
def test_slurm_without_several_tasks(environment: dict[str, str]) -> None:
    assert find_rank_info(environment) == RankInfo()


@pytest.mark.parametrize("mpi", [OPEN_MPI, MPICH], ids=["Open MPI", "MPICH"])
def test_mpirun_on_one_node(mpi: dict[str, str]) -> None:
    info = find_rank_info(mpi)
    assert (info.launcher, info.address, info.port, info.nodes) == ("mpirun", "127.0.0.1", 29500, 1)
    assert (info.rank, info.local_rank, info.local_size) == (int(next(iter(mpi.values()))),) * 2 + (4,)
    assert find_rank_info({**mpi, "MASTER_PORT": "4321"}).port == 4321


@pytest.mark.parametrize("size", ["OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS"])
def test_mpirun_on_several_nodes_needs_an_address(size: str) -> None:
    environment = {**(OPEN_MPI if size in OPEN_MPI else MPICH), size: "2"}
    environment |= {name: "1" for name in ("OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID") if name in environment}
    with pytest.raises(UsageError, match="MASTER_ADDR is not set; set it to the name of rank 0's machine"):
        find_rank_info(environment)
    info = find_rank_info({**environment, "MASTER_ADDR": "node1"})
    assert (info.address, info.nodes, info.local_size) == ("node1", 2, 2)


@pytest.mark.parametrize("mpi", [OPEN_MPI, MPICH], ids=["Open MPI", "MPICH"])
def test_mpirun_in_a_job_of_slurm(mpi: dict[str, str]) -> None:
    """mpirun starts its daemons by srun, one on each node; what they start inherits the daemon's info in that step."""
    daemon = {**SRUN, "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_PROCID": "1"}
    info = find_rank_info({**daemon, "SLURM_LOCALID": "0", **mpi})
    assert (info.launcher, info.rank, info.size) == ("mpirun", find_rank_info(mpi).rank, 4)


def test_srun_with_a_plugin_for_mpi() -> None:
    """`srun --mpi=pmi2` sets PMI_RANK as well, but says nothing of the machine: srun's own variables do."""
    assert find_rank_info({**SRUN, "PMI_RANK": "6", "PMI_SIZE": "7"}) == find_rank_info(SRUN)


@pytest.mark.parametrize(
    "nodes, first",
    [
        ("gpu7", "gpu7"),
        ("gpu7,gpu9", "gpu7"),
        ("gpu[003-006,9],x7", "gpu003"),
        ("gpu[9,003-006]", "gpu9"),
        ("gpu[003-006]-ib,x7", "gpu003-ib"),
        ("rack[1-2]node[03-04]", "rack1node03"),
        ("rack[1-2]node[03,07].lan,x[1-9]", "rack1node03.lan"),
        ("a,b[1-2]", "a"),
        ("", ""),
    ],
)
def test_first_host(nodes: str, first: str) -> None:
    assert first_host(nodes) == first


@pytest.mark.parametrize("text, node, tasks", [("4(x2),3", 0, 4), ("4(x2),3", 1, 4), ("4(x2),3", 2, 3), ("2", 0, 2)])
def test_tasks_here(text: str, node: int, tasks: int) -> None:
    assert tasks_here({"SLURM_STEP_TASKS_PER_NODE": text, "SLURM_NODEID": str(node), "SLURM_STEP_NUM_TASKS": "11"}) == tasks


WRONG = [
    (TORCHRUN, "RANK", "8", "expected RANK from 0 to WORLD_SIZE - 1, found 8 and 8"),
    (TORCHRUN, "RANK", "-1", "expected RANK to be a whole number, found '-1'"),
    (TORCHRUN, "RANK", "", "expected RANK to be a whole number, found ''"),
    (TORCHRUN, "RANK", None, "expected RANK to be a whole number, found None"),
    (TORCHRUN, "WORLD_SIZE", None, "expected WORLD_SIZE to be a whole number, found None"),
    (TORCHRUN, "WORLD_SIZE", "0", "expected RANK from 0 to WORLD_SIZE - 1"),
    (TORCHRUN, "WORLD_SIZE", "eight", "expected WORLD_SIZE to be a whole number, found 'eight'"),
    (TORCHRUN, "LOCAL_RANK", "4", "expected LOCAL_RANK below 4, found 4"),
    (TORCHRUN, "LOCAL_RANK", None, "expected LOCAL_RANK to be a whole number, found None"),
    (TORCHRUN, "LOCAL_WORLD_SIZE", None, "expected LOCAL_WORLD_SIZE to be a whole number, found None"),
    (TORCHRUN, "MASTER_ADDR", None, "MASTER_ADDR is not set"),
    (TORCHRUN, "MASTER_PORT", "http", "expected MASTER_PORT to be a whole number, found 'http'"),
    (TORCHRUN, "MASTER_PORT", "70000", "expected MASTER_PORT from 1 to 65535, found 70000"),
    (SRUN, "SLURM_PROCID", "7", "expected SLURM_PROCID from 0 to SLURM_STEP_NUM_TASKS - 1, found 7 and 7"),
    (SRUN, "SLURM_LOCALID", "3", "expected SLURM_LOCALID below 3, found 3"),
    (SRUN, "SLURM_LOCALID", None, "expected SLURM_LOCALID to be a whole number, found None"),
    (OPEN_MPI, "OMPI_COMM_WORLD_SIZE", None, "expected OMPI_COMM_WORLD_SIZE to be a whole number, found None"),
    (OPEN_MPI, "OMPI_COMM_WORLD_SIZE", "3", "expected OMPI_COMM_WORLD_RANK from 0 to OMPI_COMM_WORLD_SIZE - 1, found 3"),
    (OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_RANK", None, "expected OMPI_COMM_WORLD_LOCAL_RANK to be a whole number"),
    (MPICH, "PMI_SIZE", "many", "expected PMI_SIZE to be a whole number, found 'many'"),
    (MPICH, "MPI_LOCALNRANKS", None, "expected MPI_LOCALNRANKS to be a whole number, found None"),
]


@pytest.mark.parametrize("good, name, value, told", WRONG, ids=[f"{name}={value}" for _, name, value, _ in WRONG])
def test_what_does_not_fit_is_named(good: dict[str, str], name: str, value: str | None, told: str) -> None:
    environment = {key: text for key, text in {**good, name: value}.items() if text is not None}
    with pytest.raises(UsageError) as caught:
        find_rank_info(environment)
    assert told in str(caught.value)
    assert "; start" in str(caught.value) or "; set" in str(caught.value), "what to do next"
    find_rank_info(good)
