"""The store of one attempt: files in memory, which only this user can reach.

The kernel protects it: other users of the host cannot list, read or write anything in a folder of
mode 0700, or the open files of this process. A socket on loopback accepts every user of the host, and
since torch 2.10 a `TCPStore` lists all keys to any client, so no secret prefix keeps other users out.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import socket
import stat
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ddpsafe._errors import Explanation, PreflightError
from ddpsafe._host import bind_in, family_of, is_locked
from ddpsafe._launcher.plan import LOOPBACK
from ddpsafe._wire.rank_pipe import open_memory

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ddpsafe._launcher.processes.reaper import Reaper

_MEMORY: Final = "/dev/shm"  # noqa: S108 - the folder in it is private
_PREFIX: Final = "ddpsafe-store-"
_NEW_S: Final = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LauncherStore:
    """The store of one attempt, which outlives every rank, and a port.

    Attributes:
        folder: The folder for the keys of ddpsafe, and for sockets of the ranks.
        groups: A file for the keys of torch's process groups.
        master_port: A reserved port, for code that opens MASTER_PORT itself.
    """

    folder: Path
    groups: str
    master_port: int


@contextlib.contextmanager
def open_store(reaper: Reaper) -> Iterator[LauncherStore]:
    """Make the folder of a fresh store, and remove it when the context is left, or by the reaper.

    Raises:
        PreflightError: The folder cannot be made.
    """
    with contextlib.ExitStack() as stack:
        try:
            folder = _make_folder()
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
            reaper.remove_later(folder)
            stack.enter_context(_kept_from_cleaners(folder))
            # Without a name, nothing can remove it while the ranks need it.
            groups = stack.enter_context(open_memory()).fileno()
            master_port = stack.enter_context(reserved_port())
        except OSError as exc:
            what = f"the folder for the store of the ranks cannot be made: {exc}."
            cause = f"{tempfile.gettempdir()} is not writable or full, or a limit (ulimit -n) is reached."
            fix = "set TMPDIR to a directory on a local disk that you can write to, or free some space."
            raise PreflightError(Explanation(what, cause=cause, fix=fix)) from exc
        path = f"/proc/{os.getpid()}/fd/{groups}"
        yield LauncherStore(folder=folder, groups=path, master_port=master_port)


def _make_folder() -> Path:
    """Make a folder in memory or, where that is not possible, in the system's temporary directory."""
    # The logs of a long job may fill the temporary directory, and its ranks still have to meet. Not in a run
    # directory that the user chose: on a network mount, each read of a key would be a request to a server.
    prefix = f"{_PREFIX}{os.getpid()}-"
    with contextlib.suppress(OSError):
        _remove_abandoned()
        folder = Path(tempfile.mkdtemp(prefix=prefix, dir=_MEMORY))
        try:
            (folder / "probe").write_bytes(b"1")
            (folder / "probe").unlink()
        except OSError:  # it is full
            folder.rmdir()
        else:
            return folder
    return Path(tempfile.mkdtemp(prefix=prefix))


def _remove_abandoned() -> None:
    """Remove the folders of this user's launchers that were killed together with their reaper."""
    now_s = time.time()
    for folder in Path(_MEMORY).glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):  # another launch removes it, or it is another user's
            status = folder.lstat()
            is_own = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
            # A new one is not locked yet, nor is one that its ranks have made again.
            pid = folder.name.removeprefix(_PREFIX).partition("-")[0]
            is_alive = pid.isdecimal() and Path(f"/proc/{pid}").exists()
            is_old = now_s - status.st_mtime > _NEW_S
            if is_own and is_old and not is_alive and not is_locked(folder):
                shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _kept_from_cleaners(folder: Path) -> Iterator[None]:
    """Hold a lock that keeps systemd-tmpfiles from removing the files of a run of many days."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with contextlib.suppress(OSError):  # the file system has no locks
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(fd)


@contextlib.contextmanager
def reserved_port(address: str = LOOPBACK, ports: str | None = None) -> Iterator[int]:
    """Reserve a port, of a range if one is given: only programs that ask for this very port can get it.

    The kernel does not give a bound port to programs that ask for any free one. A rank can still bind
    it, since this socket does not listen and both sides set SO_REUSEADDR (torch's store does). So can
    a program of another user that asks for it: ddpsafe never uses it, nor does torch's rendezvous,
    which ddpsafe redirects to its own store.
    """

    def bind(port: int) -> socket.socket:
        holder = socket.socket(family_of(address))
        try:
            holder.bind((address, port))
        except BaseException:
            holder.close()
            raise
        return holder

    with bind_in(ports, bind) as holder:
        # Only now: else it could be bound to a port that another job has reserved.
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        yield holder.getsockname()[1]
