"""The CPU as the system describes it, and the limits on this process from control groups and `ulimit`."""

import contextlib
import platform
import resource
from collections.abc import Iterator
from pathlib import Path

CPU_INFO = "/proc/cpuinfo"


def value(file: str, key: str) -> str:
    """The first value of `key` in a file of "key: value" lines; "" if there is none."""
    path = Path(file)
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith(key)), "")


def name() -> str:
    return value(CPU_INFO, "model name") or platform.processor() or platform.machine()


def is_intel() -> bool:
    """True for Intel CPUs on Linux, where torch's wheels carry MKL."""
    return value(CPU_INFO, "vendor_id") == "GenuineIntel"


def multiplies_bf16() -> bool:
    """True for a CPU with bf16 GEMM instructions, AVX-512 BF16 or AMX. Only Linux reports them; False elsewhere."""
    return not {"avx512_bf16", "amx_bf16"}.isdisjoint(value(CPU_INFO, "flags").split())


def group_folders(controller: str, root: Path = Path("/")) -> Iterator[tuple[Path, int]]:
    """(folder, version) of every control group that limits this process through a controller, parents included."""
    groups = root / "proc/self/cgroup"
    lines = groups.read_text().splitlines() if groups.exists() else []
    for _, controllers, group in (line.split(":", 2) for line in lines):
        if controllers and controller not in controllers.split(","):
            continue
        for mounted in (controllers, controller) if controllers else ("", "unified"):
            for folder in levels(root / "sys/fs/cgroup" / mounted, group):
                yield folder, 1 if controllers else 2


def levels(top: Path, group: str) -> Iterator[Path]:
    """The folders of a control group and its parents. A container may see its own group at the top."""
    inner = top / group.lstrip("/")
    yield inner
    yield from (folder for folder in inner.parents if folder.is_relative_to(top))


# By cgroup version, 1 or 2: limit, memory in use, and the prefix of memory.stat counts that include child groups.
# https://docs.kernel.org/admin-guide/cgroup-v1/memory.html, https://docs.kernel.org/admin-guide/cgroup-v2.html
MEMORY_FILES = {1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"), 2: ("memory.max", "memory.current", "")}
# File pages that the kernel evicts before it kills a process, recently used ones included, as MemAvailable in /proc/meminfo
# counts them. Shared memory and locked pages are on other lists (anon, unevictable).
FILE_CACHE = ("inactive_file", "active_file")
# File pages that the kernel must write to disk first; version 1 names them without "file_".
UNWRITTEN = ("dirty", "writeback", "file_dirty", "file_writeback")
# Limits of `ulimit -v` and `-d`, each with the usage in /proc/self/status that counts against it.
ADDRESS_LIMITS = {resource.RLIMIT_AS: "VmSize", resource.RLIMIT_DATA: "VmData"}


def memory_left(root: Path = Path("/")) -> list[int]:
    """Bytes left under each limit on this process, 0 or more; an empty list without limits."""
    left = []
    for folder, version in group_folders("memory", root):
        limit_file, use_file, prefix = MEMORY_FILES[version]
        with contextlib.suppress(OSError, ValueError):  # without such a file, or "max"
            limit, use = (int((folder / file).read_text()) for file in (limit_file, use_file))
            left.append(limit - max(0, use - evictable(values(folder / "memory.stat", " "), prefix)))
    in_use = values(root / "proc/self/status", ":")
    for limit, name in ADDRESS_LIMITS.items():
        soft = resource.getrlimit(limit)[0]
        if soft != resource.RLIM_INFINITY:
            left.append(soft - 1024 * in_use.get(name, 0))
    return [max(0, one) for one in left]


def evictable(stat: dict[str, int], prefix: str) -> int:
    """Bytes of file cache that a control group drops when it reaches its limit, from its memory.stat."""
    cached, unwritten = (sum(stat.get(prefix + name, 0) for name in names) for names in (FILE_CACHE, UNWRITTEN))
    return max(0, cached - unwritten)


def values(path: Path, separator: str) -> dict[str, int]:
    """The whole numbers in a file of lines like "name: 12 kB"."""
    pairs = (line.partition(separator) for line in (path.read_text().splitlines() if path.exists() else []))
    return {name: int(rest.split()[0]) for name, _, rest in pairs if rest.split() and rest.split()[0].isdecimal()}
