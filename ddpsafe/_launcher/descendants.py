"""Finding what ranks have left behind, and nothing else."""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import psutil

from ddpsafe._wire.spec import MARKER

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


@dataclass(frozen=True, slots=True)
class RankProcess:
    """A rank's process as it can be recognised after its pid is used again.

    Attributes:
        pid: Its process id; also its session id, once it runs.
        created_s: When it started, in seconds since the epoch, as psutil reports it.
    """

    pid: int
    created_s: float

    @classmethod
    def of(cls, pid: int) -> RankProcess | None:
        """Describe a live process; ``None`` if it has gone."""
        try:
            return cls(pid, psutil.Process(pid).create_time())
        except psutil.Error:
            return None


def find_members(ranks: Iterable[RankProcess], launch_id: str) -> list[psutil.Process]:
    """Find live processes of a launch: the ranks, their sessions, and what carries its mark.

    A rank leads a session of its own, so whatever it starts belongs to that session, unless it
    made another one; then its environment still carries the launch's id. What a rank forks off into
    a session of its own, without starting a program there, carries neither, and is not found.

    Args:
        ranks: The ranks.
        launch_id: What `MARKER` says in the environment of this launch's processes.

    Returns:
        Processes of ours, the caller excepted.
    """
    by_pid = {rank.pid: rank for rank in ranks}
    return [
        process
        for process in _processes()
        if _is_member(process, by_pid, launch_id) and process.pid != os.getpid()
    ]


def kill_members(
    ranks: Iterable[RankProcess], launch_id: str, *, within_s: float
) -> list[psutil.Process]:
    """Kill what is left of a launch.

    Args:
        ranks: The ranks.
        launch_id: See `find_members`.
        within_s: How long to look for new ones, in seconds: what is being killed may fork.

    Returns:
        What was killed, children of ours first reaped by their owner.
    """
    known = list(ranks)
    killed: list[psutil.Process] = []
    ends = time.monotonic() + within_s
    while (members := find_members(known, launch_id)) and time.monotonic() < ends:
        if all(member in killed and is_in_kernel(member.pid) for member in members):
            break  # they go when the disk answers
        for member in members:
            with contextlib.suppress(psutil.Error):
                member.kill()
        killed += [member for member in members if member not in killed]
        psutil.wait_procs(members, timeout=0.05)
    return killed


def open_pidfd(pid: int | None) -> int | None:
    """Return a descriptor that becomes readable when a process ends, where the system has such."""
    if pid is None or not hasattr(os, "pidfd_open"):
        return None
    with contextlib.suppress(OSError):
        return os.pidfd_open(pid)
    return None


def is_in_kernel(pid: int | None) -> bool:
    """Tell whether a process waits for a disk or a device, where not even SIGKILL reaches it."""
    with contextlib.suppress(psutil.Error):
        return pid is not None and bool(psutil.Process(pid).status() == psutil.STATUS_DISK_SLEEP)
    return False


def _processes() -> Iterator[psutil.Process]:
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.status() != psutil.STATUS_ZOMBIE:
                yield process


def _is_member(process: psutil.Process, by_pid: dict[int, RankProcess], launch_id: str) -> bool:
    with contextlib.suppress(psutil.Error, OSError):
        rank = by_pid.get(process.pid)
        if rank is not None:
            return bool(process.create_time() == rank.created_s)
        leader = by_pid.get(os.getsid(process.pid))
        if leader is not None and process.create_time() >= leader.created_s:
            return True
        return bool(process.environ().get(MARKER) == launch_id)
    return False
