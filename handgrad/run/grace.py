"""The seconds that a launcher leaves between its stop signal and SIGKILL, held against the time that a save takes."""

from collections.abc import Mapping

DEFAULT_SECONDS = 30.0  # torchrun's, Kubernetes' (terminationGracePeriodSeconds) and SLURM's (KillWait)
VARIABLE = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"


def grace_seconds(environment: Mapping[str, str]) -> float:
    try:
        return float(environment.get(VARIABLE, DEFAULT_SECONDS))
    except ValueError:
        return DEFAULT_SECONDS


def too_slow(
    save_seconds: float, step_seconds: float, environment: Mapping[str, str], under_way_seconds: float = 0.0
) -> str:
    """A line about a stop that would be killed, "" for one that would not. A stop takes the step under way, the save that
    may be under way behind it, and its own save."""
    grace, needed = grace_seconds(environment), save_seconds + step_seconds + under_way_seconds
    if needed <= grace:
        return ""
    earlier = f" and {under_way_seconds:.1f} s of a save under way" if under_way_seconds else ""
    return (
        f"a stop takes {needed:.1f} s ({save_seconds:.1f} s to save after a step of {step_seconds:.1f} s{earlier}), longer"
        f" than the {grace:g} s between a launcher's stop signal and SIGKILL; give it more: {VARIABLE}={2 * needed:.0f},"
        f" #SBATCH --signal=TERM@{2 * needed:.0f}, terminationGracePeriodSeconds"
    )
