"""Finds what a test left behind: processes, threads, listening sockets, files."""

from __future__ import annotations

import gc
import multiprocessing
import os
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import psutil

from ddpsafe._wire.spec import make_launch_id, semaphore_prefix

if TYPE_CHECKING:
    from collections.abc import Iterator

MARK: Final = "PYTEST_RUN_MARK"
"""Set in pytest's environment: who inherited it was started by this run, an orphan too."""

GRACE_S: Final = 3.0
"""How long a process may take to be gone; the product promises one second."""

HELPERS: Final = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")
"""Python's own servers: one of each for the life of the process that started them."""

THREADS: Final = ("pytest_timeout", "tqdm_monitor", "QueueFeederThread")
"""Threads of libraries that end with the process, by the start of their names."""

SHARED_MEMORY: Final = Path("/dev/shm")

SHARED: Final = ("torch_*", "psm_*", "ddpsafe*", "nccl-*")
"""What torch, multiprocessing and NCCL call their shared memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """What existed at one moment.

    Attributes:
        processes: Processes of this run except pytest: pid and description.
        threads: Threads of pytest.
        sockets: Listening sockets of pytest: port and description.
        files: Run directories in the temporary directory, and shared memory of the usual makers.
    """

    processes: dict[int, str]
    threads: frozenset[threading.Thread]
    sockets: dict[int, str]
    files: frozenset[Path]

    @classmethod
    def take(cls) -> Snapshot:
        """Look around now."""
        return cls(
            processes={process.pid: text for process, text in _processes_of_this_run()},
            threads=frozenset(_threads()),
            sockets=_listening_sockets(),
            files=frozenset(_files()),
        )

    def new_since(self, before: Snapshot) -> list[str]:
        """Describe what was not there before."""
        found = [text for pid, text in self.processes.items() if pid not in before.processes]
        found += [f"thread {thread.name}" for thread in self.threads - before.threads]
        found += [text for port, text in self.sockets.items() if port not in before.sockets]
        found += [f"file {path}" for path in sorted(self.files - before.files)]
        return found


def wait_until_gone(before: Snapshot, *, grace_s: float) -> list[str]:
    """Wait until everything newer than `before` is gone; return what is not."""
    remaining = _remaining(before)
    if not remaining:
        return []
    gc.collect()  # a store or a socket in a reference cycle is not a leak
    remaining -= _of_strangers()
    ends_s = time.monotonic() + grace_s
    while remaining and time.monotonic() < ends_s:
        threading.Event().wait(0.05)
        remaining = _still_there(remaining, before)
    strangers = _of_strangers()
    return sorted(_still_there(remaining, before) - strangers) if remaining else []


def _still_there(earlier: set[str], before: Snapshot) -> set[str]:
    """Look again; a file that is new at every look is another run's, which makes them all the time."""
    now = _remaining(before)
    return {each for each in now if each in earlier or not each.startswith("file ")}


def _of_strangers() -> set[str]:
    return {f"file {path}" for path in _files_held_by_strangers()}


def _remaining(before: Snapshot) -> set[str]:
    multiprocessing.active_children()  # reaps those that have ended
    return set(Snapshot.take().new_since(before))


def _processes_of_this_run() -> Iterator[tuple[psutil.Process, str]]:
    own_pid = os.getpid()
    children = {process.pid for process in psutil.Process().children()}
    for pid in sorted(children.union(_marked_pids()) - {own_pid}):
        try:
            process = psutil.Process(pid)
            command = " ".join(process.cmdline()) or process.name()
            is_child = process.ppid() == own_pid
            status = process.status()
        except psutil.NoSuchProcess:
            continue
        # A rank forked by the fork server has the server's command line, but not our pid above it.
        if not (is_child and any(helper in command for helper in HELPERS)):
            yield process, f"process {pid} ({status}): {command[:200]}"


def _marked_pids() -> Iterator[int]:
    mark = f"{MARK}={os.environ[MARK]}".encode()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and mark in _environment_of(entry):
            yield int(entry.name)


def _environment_of(process: Path) -> bytes:
    try:
        return (process / "environ").read_bytes()
    except OSError:  # it ended, or belongs to another user
        return b""


def _threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if not thread.name.startswith(THREADS)]


def _listening_sockets() -> dict[int, str]:
    connections = psutil.Process().net_connections(kind="tcp")
    listening = [each for each in connections if each.status == psutil.CONN_LISTEN]
    return {each.laddr.port: f"listening socket {each.laddr}" for each in listening}


def _files() -> Iterator[Path]:
    yield from Path(tempfile.gettempdir()).glob("ddpsafe*")
    yield from shared_memory()


def shared_memory() -> Iterator[Path]:
    """Find shared memory that may be ours; other programs keep files there too."""
    for pattern in SHARED:
        yield from SHARED_MEMORY.glob(pattern)
    yield from own_semaphores()


def own_semaphores() -> Iterator[Path]:
    """Find the semaphores of launches of this run: their ids begin with that of its `TMPDIR`."""
    prefix = semaphore_prefix(make_launch_id()).rpartition("-")[0]
    yield from SHARED_MEMORY.glob(f"sem.{prefix.removeprefix('/')}-*")


def _files_held_by_strangers() -> set[Path]:
    """Find the shared memory that processes of other runs on this machine have mapped or open."""
    ours = {process.pid for process, _ in _processes_of_this_run()} | {os.getpid()}
    held = {number for pid in psutil.pids() if pid not in ours for number in _held_by(pid)}
    return {path for path in shared_memory() if _number_of(path) in held}


def _held_by(pid: int) -> Iterator[int]:
    """Find the inodes of the shared memory that a process holds.

    Not its paths: who makes a semaphore maps it before it is given its name.
    """
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
