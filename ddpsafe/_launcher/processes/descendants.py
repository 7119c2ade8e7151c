"""Finds and kills what ranks have left behind, and never another process."""

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

from ddpsafe._host import read_stat
from ddpsafe._wire.exception_facts import clip
from ddpsafe._wire.spec import MARKER

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Mapping

_MAX_COMMAND: Final = 80
_FEWEST_LOOKS: Final = 3

CLEAN_UP_S: Final = {"torch_shm_manager": 5.0}
"""Programs that remove what other processes have left, once those have ended; and how long that may take, in seconds.

torch starts one in each process that shares tensors as files in /dev/shm (``set_sharing_strategy("file_system")``).
It removes them when the processes that use them have ended, and ends itself 2 s after the last one, with its
folder: ``SHUTDOWN_TIMEOUT`` in torch/lib/libshm/manager.cpp, 2.1 s measured with torch 2.13.
"""
_CLEAN_UP_LOOK_S: Final = 0.05


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """Identifies a process even after its pid has been reused.

    Attributes:
        started: When it started; only to compare, see `_start_of`.
    """

    pid: int
    started: float

    def is_alive(self) -> bool:
        """Return whether the pid still belongs to the same process; a zombie counts as alive."""
        with contextlib.suppress(psutil.Error, OSError):
            return _start_of(self.pid) == self.started
        return False


@dataclass(frozen=True, slots=True)
class RankIdentity(ProcessIdentity):
    """A rank's process, which leads a session of its own, and what it has left there.

    The kernel reuses the number of a session once it has no members. So once a rank has ended, its
    session is identified by the processes that were in it at that time.

    Attributes:
        left: The processes in its session when it ended; ``None`` while it runs.
    """

    left: tuple[ProcessIdentity, ...] | None = None

    @classmethod
    def of(cls, pid: int) -> RankIdentity | None:
        """Return the identity of a live process; ``None`` if it has ended."""
        try:
            return cls(pid, _start_of(pid))
        except (psutil.Error, OSError):
            return None

    def ended(self) -> RankIdentity:
        """Return the identity after its end, with the processes left in its session."""
        left = []
        for pid in psutil.pids():
            if pid != self.pid and _session_of(pid) == self.pid:
                with contextlib.suppress(psutil.Error, OSError):
                    left.append(ProcessIdentity(pid, _start_of(pid)))
        return replace(self, left=tuple(left))

    def owns_session(self) -> bool | None:
        """Return whether the session of its number still belongs to it; ``None`` if unknown.

        A process enters another one's session only by being born there. So if the rank, or a process
        that it has left behind, is in the session, all of the session descends from the rank.
        """
        if psutil.pid_exists(self.pid):
            return self.is_alive()
        if self.left is None:
            return None
        return any(process.is_alive() for process in self.left)


def find_members(ranks: Iterable[RankIdentity], launch_id: str) -> list[psutil.Process]:
    """Find the live processes of a launch: by the sessions of its ranks, and by its `MARKER`.

    What a rank starts is in the rank's session, or, if it has made another session, has the launch's
    id in its environment. A process that a rank forks, and that makes another session without
    starting a program there, has neither and is not found.

    Returns processes that surely descend from the ranks, even those of another user, which root's ranks may
    have become; and of those that probably do, the ones of this user. Never the caller.
    """
    owned = {rank.pid: rank.owns_session() for rank in ranks}
    certain = {pid for pid, is_own in owned.items() if is_own}
    likely = {pid for pid, is_own in owned.items() if is_own is None}
    descendants = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.pid == os.getpid() or process.status() == psutil.STATUS_ZOMBIE:
                continue
            places = {process.pid, _session_of(process.pid)}
            if places & certain:
                descendants.append(process)
                continue
            # An ended rank's session may belong to another process by now, and any user can set MARKER.
            # Root has the permission to kill other users' processes, and must not.
            is_likely = places & likely or process.environ().get(MARKER) == launch_id
            if is_likely and {os.getuid(), os.geteuid()} & set(process.uids()):
                descendants.append(process)
    return descendants


def kill_members(
    ranks: Iterable[RankIdentity], launch_id: str, *, within_s: float
) -> dict[psutil.Process, str]:
    """Kill what is left of a launch; return the processes, with the command line of each, empty if unknown.

    The programs of `CLEAN_UP_S` are killed last, once they have had time to do their work.
    It looks for new processes for `within_s` seconds, and a few times at least. This process's children are
    still to be reaped by their owner.
    """
    known = [rank for rank in ranks if rank.owns_session() is not False]
    killed: dict[psutil.Process, str] = {}
    known, cleaning = _kill_until_gone(known, launch_id, within_s, killed, CLEAN_UP_S)
    if cleaning:  # all that they clean up after has ended
        ends = time.monotonic() + max(CLEAN_UP_S.values())
        while any(map(_is_running, cleaning)) and time.monotonic() < ends:
            time.sleep(_CLEAN_UP_LOOK_S)
        _kill_until_gone(known, launch_id, within_s, killed, ())
    return killed


def _kill_until_gone(
    known: list[RankIdentity],
    launch_id: str,
    within_s: float,
    killed: dict[psutil.Process, str],
    spared_names: Container[str],
) -> tuple[list[RankIdentity], list[psutil.Process]]:
    """Kill the members of a launch until no new ones appear, and add them to `killed`.

    Returns:
        The ranks, as they are identified now, and the members that were spared for their names.
    """
    ends = time.monotonic() + within_s
    spared: list[psutil.Process] = []
    for look in itertools.count():
        found = find_members(known, launch_id)
        spared = [member for member in found if _name_of(member) in spared_names]
        members = [member for member in found if member not in spared]
        # On a busy machine one look may take longer than `within_s`, and still has to have an effect.
        if not members or (look >= _FEWEST_LOOKS and time.monotonic() > ends):
            break
        known = [rank.ended() if rank.owns_session() else rank for rank in known]
        if all(member in killed and is_in_kernel(member.pid) for member in members):
            break  # they end once the disk or the device responds
        for member in members:
            if member not in killed:
                killed[member] = command_of(member)
            _kill(member)
        psutil.wait_procs(members, timeout=0.05)
        # A process may have forked while it was killed; then no process known in the session is left.
        known = [rank if rank.owns_session() else replace(rank, left=None) for rank in known]
    return known, spared


def _name_of(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.Error, OSError):
        return str(process.name())
    return ""


def _is_running(process: psutil.Process) -> bool:
    """Return whether a process runs; not if it has ended and its parent does not care, as in some containers."""
    with contextlib.suppress(psutil.Error, OSError):
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    return False


def command_of(process: psutil.Process) -> str:
    """Return the command line of a process, in one line; empty if it is unknown."""
    with contextlib.suppress(psutil.Error, OSError):
        return " ".join(" ".join(process.cmdline()).split())
    return ""


def describe_program(pid: int, command: str) -> str:
    """Return a process with the beginning of its command line, for a message."""
    return f"process {pid} ({clip(command, _MAX_COMMAND)})"


class Orphans:
    """Tells the children that a process has inherited from those that it has started itself.

    The latter's exit status belongs to the code that has started them. A child that was not there at the
    last look, but is older than that, was another process's child then.
    """

    def __init__(self) -> None:
        """Take all children of the first look for its own, except those with a mark."""
        self._is_own: dict[ProcessIdentity, bool] = {}
        self._looked_at = 0.0

    def look(self, children: Mapping[ProcessIdentity, bool], now: float) -> list[ProcessIdentity]:
        """Return those of all children that were inherited.

        Zombies are children, too; the values say whether each has the mark of what ranks start. `now` is when
        the look at them began, as `ProcessIdentity.started`.
        """
        self._is_own = {
            child: not is_marked and self._is_own.get(child, child.started >= self._looked_at)
            for child, is_marked in children.items()
        }
        self._looked_at = now
        return [child for child, is_own in self._is_own.items() if not is_own]


_orphans: Final = Orphans()


def reap_orphans() -> None:
    """Reap what ranks have left behind and this process has inherited, as the first of a container."""
    if os.getpid() != 1:
        return
    # In whole ticks, as the start of a process: what starts from now on is not older.
    now = float(int(time.clock_gettime(time.CLOCK_BOOTTIME) * os.sysconf("SC_CLK_TCK")))
    children: dict[ProcessIdentity, bool] = {}
    # Another thread's children become the first one's when it ends, so all are looked at.
    for tasks in Path("/proc/1/task").glob("*/children"):
        with contextlib.suppress(OSError):  # the thread has ended
            for pid in map(int, tasks.read_text(encoding="ascii").split()):
                with contextlib.suppress(OSError):
                    children[ProcessIdentity(pid, _start_of(pid))] = _is_marked(pid)
    inherited = {child.pid for child in _orphans.look(children, now)}
    for child in children:
        # What it starts itself is in its session, or leads its own.
        if child.pid in inherited or _session_of(child.pid) not in (os.getsid(0), child.pid):
            with contextlib.suppress(OSError):
                os.waitpid(child.pid, os.WNOHANG)


def _is_marked(pid: int) -> bool:
    """Return whether a child runs with a `MARKER` that it does not have from this process."""
    if MARKER in os.environ:
        return False
    with contextlib.suppress(OSError):
        return f"\0{MARKER}=".encode() in b"\0" + Path(f"/proc/{pid}/environ").read_bytes()
    return False


def _kill(process: psutil.Process) -> None:
    """Kill a process that was found, and never another one that has got its pid since."""
    with contextlib.suppress(psutil.Error, OSError):
        pidfd = open_pidfd(process.pid)
        if pidfd is None:
            process.kill()  # psutil checks again that it is the same process
            return
        try:
            if process.is_running():  # it is the same process, so the descriptor is its own
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        finally:
            os.close(pidfd)


def open_pidfd(pid: int | None) -> int | None:
    """Return a descriptor that becomes readable when a process ends, if the system has pidfds."""
    if pid is None or not hasattr(os, "pidfd_open"):
        return None
    with contextlib.suppress(OSError):
        return os.pidfd_open(pid)
    return None


def is_in_kernel(pid: int | None) -> bool:
    """Return whether a process waits for a disk or a device, where not even SIGKILL ends it."""
    with contextlib.suppress(psutil.Error):
        return pid is not None and bool(psutil.Process(pid).status() == psutil.STATUS_DISK_SLEEP)
    return False


def _start_of(pid: int) -> float:
    """Return when a process started: on Linux in clock ticks since boot.

    psutil's seconds since the epoch change whenever the wall clock is set.
    """
    if sys.platform != "linux":
        return float(psutil.Process(pid).create_time())
    return float(read_stat(pid).started)


def _session_of(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except OSError:  # the process has ended
        return None
