"""Finds processes, threads, listening sockets and files that a test left behind."""

from __future__ import annotations

import contextlib
import gc
import itertools
import multiprocessing
import os
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil
from warm_python import FORK_SERVERS
from warm_server import MARK

from ddpsafe._wire.spec import make_launch_id, semaphore_prefix

GRACE_S: Final = 3.0
"""How long a process may take to end; ddpsafe promises one second."""

HELPERS: Final = (
    "multiprocessing.resource_tracker",
    "multiprocessing.forkserver",
    "warm_server.py",
)
"""Servers of Python and of the tests, which live as long as the process that started them."""

THREADS: Final = ("pytest_timeout", "tqdm_monitor", "QueueFeederThread")
"""Name prefixes of library threads that end with the process."""

_LISTEN: Final = "0A"
"""The state of a listening socket in /proc/net/tcp."""

SHARED_MEMORY: Final = Path("/dev/shm")

SHARED: Final = ("torch_*", "ddpsafe*", "nccl-*")
"""Names of shared memory of torch, ddpsafe and NCCL.

multiprocessing's ``psm_*`` is not included: only other programs make it.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """What existed at one moment; it is taken twice for each test and costs about a millisecond."""

    pids: frozenset[int]
    threads: frozenset[threading.Thread]
    sockets: frozenset[str]
    files: frozenset[Path]

    @classmethod
    def take(cls) -> Snapshot:
        """Take a snapshot now."""
        return cls(
            pids=frozenset(_pids()),
            threads=frozenset(_threads()),
            sockets=frozenset(_sockets()),
            files=frozenset(_files()),
        )

    def new_since(self, before: Snapshot) -> list[str]:
        """Describe everything that is new."""
        found = list(_processes_of_this_run(self.pids - before.pids).values())
        found += [f"thread {thread.name}" for thread in self.threads - before.threads]
        found += _listening(self.sockets - before.sockets)
        found += [f"file {path}" for path in sorted(self.files - before.files)]
        return found


def wait_until_gone(before: Snapshot, *, grace_s: float) -> list[str]:
    """Wait until everything newer than `before` has ended or been removed; return what has not."""
    remaining = _remaining(before)
    if not remaining:
        return []
    gc.collect()  # a store or a socket in a reference cycle is not a leak
    remaining = _without_strangers(remaining)
    ends_s = time.monotonic() + grace_s
    while remaining and time.monotonic() < ends_s:
        threading.Event().wait(0.05)
        remaining = _still_there(remaining, before)
    return sorted(_without_strangers(_still_there(remaining, before))) if remaining else []


def _still_there(earlier: set[str], before: Snapshot) -> set[str]:
    """Look again; a file that is new at every look belongs to another run, which keeps making them."""
    now = _remaining(before)
    return {each for each in now if each in earlier or not each.startswith("file ")}


def _without_strangers(found: set[str]) -> set[str]:
    """Exclude the shared memory of other runs, whose holders are looked up if there is any."""
    if not any(each.startswith(f"file {SHARED_MEMORY}/") for each in found):
        return found
    return found - {f"file {path}" for path in _files_held_by_strangers()}


def _remaining(before: Snapshot) -> set[str]:
    multiprocessing.active_children()  # reaps those that have ended
    return set(Snapshot.take().new_since(before))


def _pids() -> Iterator[int]:
    with os.scandir("/proc") as entries:
        yield from (int(entry.name) for entry in entries if entry.name.isdigit())


def _processes_of_this_run(pids: Iterable[int]) -> dict[int, str]:
    """Describe those of `pids` that this run has started, by pid; pytest is not one of them."""
    mark = f"{MARK}={os.environ[MARK]}".encode()
    own_pid = os.getpid()
    found = {}
    for pid in sorted(set(pids) - {own_pid}):
        try:
            process = psutil.Process(pid)
            is_child = process.ppid() == own_pid
            if not is_child and mark not in _environment_of(pid):
                continue
            command = " ".join(process.cmdline()) or process.name()
            status = process.status()
        except psutil.NoSuchProcess:
            continue
        # A fork of a server has the server's command line, but not this process as its parent.
        is_helper = is_child and any(helper in command for helper in HELPERS)
        if not is_helper and pid not in FORK_SERVERS:
            found[pid] = f"process {pid} ({status}): {command[:200]}"
    return found


def _environment_of(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:  # it ended, or belongs to another user
        return b""


def _threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if not thread.name.startswith(THREADS)]


def _sockets() -> Iterator[str]:
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the one that lists the directory
            target = str(link.readlink())
            if target.startswith("socket:["):
                yield target.removeprefix("socket:[").removesuffix("]")


def _listening(inodes: frozenset[str]) -> Iterator[str]:
    tables = [Path("/proc/net/tcp"), Path("/proc/net/tcp6")] if inodes else []
    rows = [table.read_text().splitlines()[1:] for table in tables if table.exists()]
    for line in itertools.chain(*rows):
        _, local, _, state, *rest = line.split()
        if state == _LISTEN and rest[5] in inodes:
            yield f"listening socket at port {int(local.rpartition(':')[2], 16)}"


def _files() -> Iterator[Path]:
    yield from Path(tempfile.gettempdir()).glob("ddpsafe*")
    yield from _shared_memory()


def _shared_memory() -> Iterator[Path]:
    """Find shared memory that may belong to this run; other programs keep files there, too."""
    for pattern in SHARED:
        for path in filter(_is_visible, SHARED_MEMORY.glob(pattern)):
            # The store of a launch has the pid of its launcher. What a launcher that was killed with all that
            # could clean up has left, the next launch removes, and it may be another test's.
            is_store = path.name.startswith("ddpsafe-store-")
            if not is_store or path.name.startswith(f"ddpsafe-store-{os.getpid()}-"):
                yield path
    yield from own_semaphores()


def _is_visible(path: Path) -> bool:
    """Return whether this user can see which process holds a file: not if it is another user's."""
    try:
        return os.geteuid() in (0, path.stat().st_uid)
    except FileNotFoundError:
        return False


def own_semaphores() -> Iterator[Path]:
    """Find the semaphores of launches of this run: their ids begin with that of its `TMPDIR`."""
    prefix = semaphore_prefix(make_launch_id()).rpartition("-")[0]
    yield from SHARED_MEMORY.glob(f"sem.{prefix.removeprefix('/')}-*")


def _files_held_by_strangers() -> set[Path]:
    """Find the shared memory that processes of other runs on this machine have mapped or open."""
    ours = {*_processes_of_this_run(_pids()), os.getpid()}
    strangers = [pid for pid in psutil.pids() if pid not in ours]
    held = {number for pid in strangers for number in _held_by(pid)}
    # No process holds a tensor on its way from a DataLoader's worker, or of a rank that has ended.
    patterns = SHARED[:1] if any(map(_removes_tensors, strangers)) else ()
    waiting = {path for pattern in patterns for path in SHARED_MEMORY.glob(pattern)}
    return waiting | {path for path in _shared_memory() if _number_of(path) in held}


def _removes_tensors(pid: int) -> bool:
    """Return whether a process is the one of torch that removes shared tensors later."""
    try:
        return bool(psutil.Process(pid).name() == "torch_shm_manager")
    except psutil.Error:  # it ended
        return False


def _held_by(pid: int) -> Iterator[int]:
    """Find the inodes of the shared memory that a process holds; a semaphore is mapped before it has a path."""
    process = Path("/proc") / str(pid)
    try:
        mapped = [line.split(maxsplit=5) for line in (process / "maps").read_text().splitlines()]
        opened = [_number_of(link) for link in (process / "fd").iterdir() if _is_shared(link)]
    except OSError:  # it ended, or belongs to another user
        return
    yield from (number for number in opened if number is not None)
    for _address, _access, _offset, _device, number, *path in mapped:
        if path and path[0].startswith(f"{SHARED_MEMORY}/"):
            yield int(number)


def _is_shared(link: Path) -> bool:
    return str(link.readlink()).startswith(f"{SHARED_MEMORY}/")


def _number_of(path: Path) -> int | None:
    try:
        return path.stat().st_ino
    except OSError:  # it was closed or removed meanwhile
        return None
