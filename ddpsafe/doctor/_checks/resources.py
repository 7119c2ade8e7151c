"""What a job needs from the host or its container: memory, cores, files, processes, an init process."""

from __future__ import annotations

import os
import resource
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Final

import psutil

from ddpsafe._advice import ADVICE, COMMANDS
from ddpsafe._host import count_cores, read_limits, whole_cores
from ddpsafe.doctor._findings import Finding, failed, ok, to_copy, warning
from ddpsafe.doctor._system.infiniband import DEVICES

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from ddpsafe.doctor._checks import Check
    from ddpsafe.doctor._subject import Subject

_MIB: Final = 1 << 20
_SHARED_MEMORY: Final = Path("/dev/shm")  # noqa: S108 - it is what is checked
_SHM_BROKEN_BYTES: Final = 1 * _MIB
# Containers get 64 MiB by default, so that a launch in one has the warning.
_SHM_AT_LAUNCH_BYTES: Final = 128 * _MIB
_SHM_LOW_BYTES: Final = 1024 * _MIB
_FEWEST_FILES: Final = 4096
_FILES_PER_RANK: Final = 16
_FILES_BASE: Final = 64
_PROCESSES_PER_RANK: Final = 64
_THREADS_AT_START: Final = 16
_RANK_BYTES: Final = 1024 * _MIB
# What a rank needs just to import torch.
_RANK_AT_LAUNCH_BYTES: Final = 200 * _MIB


def _mib(count: float) -> str:
    return f"{count / _MIB:,.0f} MiB"


def check_shared_memory(subject: Subject) -> Iterator[Finding]:
    """Check /dev/shm, which has the batches of loader workers, NCCL's buffers and every semaphore."""
    if not sys.platform.startswith("linux"):  # elsewhere locks and shared memory have no directory
        return
    more = to_copy(
        "Give the container more, or mount it larger; in Kubernetes mount an emptyDir with "
        "medium: Memory at /dev/shm:",
        *COMMANDS["DS-MEM-shm"],
    )
    # Without a free byte not even a lock can be created.
    try:
        with tempfile.TemporaryFile(dir=_SHARED_MEMORY) as probe:
            probe.write(b"0" * resource.getpagesize())
            probe.flush()
        state = os.statvfs(_SHARED_MEMORY)
    except OSError as error:
        # At a launch it is a warning: ranks without loader workers need no lock.
        make = warning if subject.at_launch else failed
        yield make(
            "DS-LIM-001",
            f"Shared memory (/dev/shm) cannot be written ({error.strerror}); processes that share a lock, such as "
            "DataLoader workers, cannot be started.",
            cause="it is full, read-only or not mounted.",
            fix=more,
        )
        return
    free_bytes = state.f_bavail * state.f_frsize
    least_bytes = _SHM_AT_LAUNCH_BYTES if subject.at_launch else _SHM_LOW_BYTES
    if free_bytes >= least_bytes:
        fact = f"Shared memory (/dev/shm) has {_mib(free_bytes)} free."
        yield ok("DS-LIM-001", fact, free_bytes=free_bytes)
        return
    make = failed if free_bytes < _SHM_BROKEN_BYTES else warning
    total_bytes = state.f_blocks * state.f_frsize
    yield make(
        "DS-LIM-001",
        f"Shared memory (/dev/shm) has {_mib(free_bytes)} free of {_mib(total_bytes)}; DataLoader workers and NCCL "
        "pass data through it and die with a bus error when it is full.",
        cause=ADVICE["DS-MEM-shm"][0],
        fix=more,
        free_bytes=free_bytes,
        total_bytes=total_bytes,
    )


def check_open_files(subject: Subject) -> Iterator[Finding]:
    """Check the limit of open files; every tensor from a loader worker may need one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    least_files = _FILES_BASE + _FILES_PER_RANK * subject.nproc
    least_files = least_files if subject.at_launch else max(_FEWEST_FILES, least_files)
    if soft == resource.RLIM_INFINITY or soft >= least_files:
        yield ok("DS-LIM-002", f"{soft} files may be open.", soft=soft, hard=hard)
        return
    here, outside = COMMANDS["DS-MEM-descriptors"]
    # `ulimit` cannot exceed the hard limit, so the line to copy requests that.
    reachable = 65536 if hard == resource.RLIM_INFINITY else min(hard, 65536)
    yield warning(
        "DS-LIM-002",
        f"Only {soft} files may be open at once; the pipes of ranks and the tensors of loader workers need more.",
        cause="the default of the shell or of the container.",
        fix=to_copy("Raise it in the shell that starts the job:", here.format(files=reachable))
        if reachable > soft
        else to_copy(
            "That is the hard limit; raise it where the session or the container starts:", outside
        ),
        soft=soft,
        hard=hard,
    )


def check_locked_memory(subject: Subject) -> Iterator[Finding]:
    """Check the limit of locked memory, which InfiniBand needs for its buffers."""
    del subject
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    cards = sorted(path.name for path in DEVICES.iterdir()) if DEVICES.is_dir() else []
    # A small limit is normal on a host without such a card.
    if soft == resource.RLIM_INFINITY or not cards:
        yield ok(
            "DS-LIM-003",
            "No InfiniBand card needs locked memory." if not cards else "Memory may be locked.",
        )
        return
    yield warning(
        "DS-LIM-003",
        f"Only {soft // 1024} KiB of memory may be locked, and {', '.join(cards)} needs it for its "
        "buffers; NCCL fails with `ibv_reg_mr` or `Cannot allocate memory`.",
        cause="the default of the shell, of the container or of slurmd.",
        fix=to_copy(
            "Raise it where the job starts:",
            "ulimit -l unlimited",
            "docker run --ulimit memlock=-1 …",
        ),
    )


def check_processes(subject: Subject) -> Iterator[Finding]:
    """Count the processes and threads that may still be started."""
    processes_left = read_limits().processes_left
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    # The limit does not apply to root. Counting a user's threads is too slow for a launch.
    if not subject.at_launch and soft != resource.RLIM_INFINITY and os.geteuid() != 0:
        used = 0
        for process in psutil.process_iter(["uids", "num_threads"]):
            uids = process.info["uids"]
            if uids is not None and uids.real == os.getuid():
                used += process.info["num_threads"] or 1
        by_user = max(0, soft - used)
        processes_left = by_user if processes_left is None else min(processes_left, by_user)
    if processes_left is None or processes_left >= subject.nproc * _PROCESSES_PER_RANK:
        yield ok(
            "DS-LIM-004",
            f"{'Any number of' if processes_left is None else processes_left} processes may be started.",
        )
        return
    # A launch warns only if the ranks might not even start.
    starts = subject.nproc * _THREADS_AT_START
    if subject.at_launch and processes_left >= starts:
        return
    make = failed if processes_left < subject.nproc else warning
    yield make(
        "DS-LIM-004",
        f"Only {processes_left} more processes and threads may be started; {subject.nproc} ranks with their "
        f"threads and loader workers need about {subject.nproc * _PROCESSES_PER_RANK}.",
        cause="pids.max of the container, or `ulimit -u`, counts threads too.",
        fix=to_copy("Raise the limit:", "docker run --pids-limit=-1 …", "ulimit -u unlimited"),
        left=processes_left,
    )


def check_memory(subject: Subject) -> Iterator[Finding]:
    """Compare the available memory with what the ranks need to start."""
    limits = read_limits()
    free_bytes = psutil.virtual_memory().available
    left_bytes = (
        free_bytes
        if limits.memory_left_bytes is None
        else min(free_bytes, limits.memory_left_bytes)
    )
    bytes_per_rank = _RANK_AT_LAUNCH_BYTES if subject.at_launch else _RANK_BYTES
    bound = "" if limits.memory_bytes is None else f" (limit {_mib(limits.memory_bytes)})"
    if left_bytes >= bytes_per_rank * subject.nproc:
        yield ok(
            "DS-LIM-005",
            f"{_mib(left_bytes)} of memory are available{bound}.",
            left_bytes=left_bytes,
        )
        return
    yield warning(
        "DS-LIM-005",
        f"{_mib(left_bytes)} of memory are available{bound} for {subject.nproc} ranks, which need about "
        f"{_mib(bytes_per_rank * subject.nproc)} before any data; the kernel kills processes that need more.",
        cause="the limit of the container or of the scheduler's job, or other processes.",
        fix=to_copy(
            "Request more, or start fewer ranks:",
            "docker run --memory=64g …   # sbatch --mem=64G",
            f"--nproc-per-node {max(1, left_bytes // bytes_per_rank)}",
        ),
        left_bytes=left_bytes,
        limit_bytes=limits.memory_bytes,
    )


_MARKS: Final = {
    "Docker": Path("/.dockerenv"),
    "Podman": Path("/run/.containerenv"),
    "Singularity": Path("/singularity.d"),
    "Apptainer": Path("/.singularity.d"),
}
_LEAST_SHARE: Final = 0.95


def check_cores(subject: Subject) -> Iterator[Finding]:
    """Compare the cores that torch counts with the container's CPU quota."""
    counted, share = count_cores(), read_limits().cores
    if share is None or share >= counted * _LEAST_SHARE:
        yield ok("DS-LIM-006", f"{counted} cores may be used.", cores=counted)
        return
    threads = max(1, whole_cores(share) // subject.nproc)
    nproc = subject.config.nproc_per_node
    ranks = (
        ""
        if isinstance(nproc, int)
        else f"; nproc_per_node={nproc!r} would start one rank for each"
    )
    yield warning(
        "DS-LIM-006",
        f"The container's quota is {share:g} cores, but {counted} cores are visible, and "
        f"torch starts threads for all of them{ranks}.",
        cause="a quota (docker --cpus, limits.cpu of Kubernetes) limits CPU time but hides no cores.",
        fix=to_copy(
            "Set the number of threads per rank and the number of ranks:",
            f"export OMP_NUM_THREADS={threads}",
            f"--nproc-per-node {min(subject.nproc, whole_cores(share))}",
        ),
        quota_cores=share,
        cores=counted,
    )


def check_sharing(subject: Subject) -> Iterator[Finding]:
    """Report the kind of container, and warn if no init process reaps its dead processes."""
    kind = find_container(subject.env)
    if kind is None:
        yield ok("DS-LIM-007", "No container was detected.")
        return
    if os.getpid() == 1:
        yield warning(
            "DS-LIM-007",
            f"This process is PID 1 of its {kind} container: orphaned processes are never reaped, "
            "and signals without a handler do not reach it.",
            cause="the script is the container's command.",
            fix=to_copy("Run it under an init process:", "docker run --init …"),
        )
        return
    yield ok("DS-LIM-007", f"This is a {kind} container.", container=kind)


def find_container(env: Mapping[str, str]) -> str | None:
    """Return the kind of container that this process runs in, or None if none was detected."""
    if "KUBERNETES_SERVICE_HOST" in env:
        return "Kubernetes"
    for kind, mark in _MARKS.items():
        if mark.exists():
            return kind
    return None


CHECKS: Final[tuple[Check, ...]] = (
    check_shared_memory,
    check_open_files,
    check_locked_memory,
    check_processes,
    check_memory,
    check_cores,
    check_sharing,
)
