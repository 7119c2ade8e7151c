"""Finding what ranks have left behind, and nothing else."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

import psutil

from ddpsafe._wire.spec import MARKER

if TYPE_CHECKING:
    from collections.abc import Iterable

_FEWEST_LOOKS: Final = 3
_START_FIELD: Final = 19  # of /proc/PID/stat, counted after the name: field 22 of proc(5)


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """A process as it can be recognised after its pid is used again.

    Attributes:
        pid: Its process id.
        started: When it started, to be compared only: see `_start_of`.
    """

    pid: int
    started: float

    def is_alive(self) -> bool:
        """Tell whether its pid is that of the same process, be it one that waits to be reaped."""
        with contextlib.suppress(psutil.Error, OSError):
            return _start_of(self.pid) == self.started
        return False


@dataclass(frozen=True, slots=True)
class RankIdentity(ProcessIdentity):
    """A rank's process, which leads a session of its own, and what it has left there.

    The kernel gives a number to no new process while a session of that number has members, but at
    any time after. So once a rank has ended, its session is known by what was in it at its end.

    Attributes:
        left: What was in its session when it ended; ``None`` while it runs.
    """

    left: tuple[ProcessIdentity, ...] | None = None

    @classmethod
    def of(cls, pid: int) -> RankIdentity | None:
        """Describe a live process; ``None`` if it has gone."""
        try:
            return cls(pid, _start_of(pid))
        except (psutil.Error, OSError):
            return None

    def ended(self) -> RankIdentity:
        """Describe it after its end, with what is left in its session."""
        left = []
        for pid in psutil.pids():
            if pid != self.pid and _session_of(pid) == self.pid:
                with contextlib.suppress(psutil.Error, OSError):
                    left.append(ProcessIdentity(pid, _start_of(pid)))
        return replace(self, left=tuple(left))

    def owns_session(self) -> bool | None:
        """Tell whether a session of its number is its own, and not another process's; ``None`` if unknown.

        A process comes into a session by its birth alone. So all that is in one whose leader is the
        rank, or which one that the rank has left is still in, descends from the rank.
        """
        if psutil.pid_exists(self.pid):
            return self.is_alive()
        if self.left is None:
            return None
        return any(each.is_alive() for each in self.left)


def find_members(ranks: Iterable[RankIdentity], launch_id: str) -> list[psutil.Process]:
    """Find live processes of a launch: the ranks, their sessions, and what carries its mark.

    A rank leads a session of its own, so whatever it starts belongs to that session, unless it
    made another one; then its environment still carries the launch's id. What a rank forks off into
    a session of its own, without starting a program there, carries neither, and is not found.

    Args:
        ranks: The ranks.
        launch_id: What `MARKER` says in the environment of this launch's processes.

    Returns:
        What descends from the ranks, also where root's ranks have become another user; beyond what
        is certain only processes of this user. Never the caller.
    """
    owned = {rank.pid: rank.owns_session() for rank in ranks}
    certain = {pid for pid, is_own in owned.items() if is_own}
    likely = {pid for pid, is_own in owned.items() if is_own is None}
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.pid == os.getpid() or process.status() == psutil.STATUS_ZOMBIE:
                continue
            places = {process.pid, _session_of(process.pid)}
            if places & certain:
                found.append(process)
                continue
            # Of an ended rank's session it is not known whose it is by now, and a mark can be
            # forged. Root may end all other users' processes too, and must not.
            is_likely = places & likely or process.environ().get(MARKER) == launch_id
            if is_likely and {os.getuid(), os.geteuid()} & set(process.uids()):
                found.append(process)
    return found


def kill_members(
    ranks: Iterable[RankIdentity], launch_id: str, *, within_s: float
) -> list[psutil.Process]:
    """Kill what is left of a launch.

    Args:
        ranks: The ranks.
        launch_id: See `find_members`.
        within_s: How long to look for new ones, in seconds; a few times at least.

    Returns:
        What was killed, this process's children first reaped by their owner.
    """
    known = [rank for rank in ranks if rank.owns_session() is not False]
    killed: list[psutil.Process] = []
    ends = time.monotonic() + within_s
    for look in itertools.count():
        members = find_members(known, launch_id)
        # Whatever the time: on a busy machine one look takes a second, and what it finds is killed.
        if not members or (look >= _FEWEST_LOOKS and time.monotonic() > ends):
            break
        known = [rank.ended() if rank.owns_session() else rank for rank in known]
        if all(member in killed and is_in_kernel(member.pid) for member in members):
            break  # they go when the disk answers
        for member in members:
            _kill(member)
        killed += [member for member in members if member not in killed]
        psutil.wait_procs(members, timeout=0.05)
        # What was being killed may have forked, and then nothing that was there before is left.
        known = [rank if rank.owns_session() else replace(rank, left=None) for rank in known]
    return killed


def _kill(process: psutil.Process) -> None:
    """Kill a process that was found, and never another one that has its pid since."""
    with contextlib.suppress(psutil.Error, OSError):
        pidfd = open_pidfd(process.pid)
        if pidfd is None:
            process.kill()  # psutil looks again whether it is the same one
            return
        try:
            if process.is_running():  # the same process, and the descriptor is its own
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        finally:
            os.close(pidfd)


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


def _start_of(pid: int) -> float:
    """Return when a process started: in ticks since the boot on Linux.

    psutil's seconds since the epoch change with every step of the wall clock.
    """
    if sys.platform != "linux":
        return float(psutil.Process(pid).create_time())
    _, _, fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")
    return float(fields.split()[_START_FIELD])


def _session_of(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except OSError:  # it has ended
        return None
