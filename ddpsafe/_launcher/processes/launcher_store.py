"""Where the ranks of one attempt meet: files in a private folder, which only this user can reach.

The kernel guards it: another user of the host can neither list, read nor write what lies below a
folder of mode 0700. A socket on loopback takes every user of the host, and since torch 2.10 its
`TCPStore` lists all keys to whoever connects, so no secret prefix keeps other users out.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import socket
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ddpsafe._errors import Explanation, PreflightError
from ddpsafe._launcher.plan import LOOPBACK

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ddpsafe._launcher.processes.reaper import Reaper


@dataclass(frozen=True, slots=True, kw_only=True)
class LauncherStore:
    """The store of one attempt, which outlives every rank, and the port beside it.

    Attributes:
        folder: Where the ranks' stores keep their files.
        master_port: A reserved port for code that opens MASTER_PORT itself.
    """

    folder: Path
    master_port: int


@contextlib.contextmanager
def open_store(parent: Path | None, reaper: Reaper) -> Iterator[LauncherStore]:
    """Make the folder of a fresh store, until the attempt is over.

    Args:
        parent: A private folder on a local disk; ``None`` for the system's temporary directory. A
            run directory that the user chose may be on a network mount, where each look at a key
            would be a question to a server.
        reaper: Removes the folder should this process be killed.

    Raises:
        PreflightError: It cannot be made.
    """
    with contextlib.ExitStack() as stack:
        try:
            folder = Path(tempfile.mkdtemp(prefix="ddpsafe-store-", dir=parent))
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
            reaper.remove_later(folder)
            stack.enter_context(_kept_from_cleaners(folder))
            master_port = stack.enter_context(reserved_port())
        except OSError as exc:
            what = f"the folder in which the ranks meet cannot be made: {exc}."
            cause = f"{tempfile.gettempdir()} is not writable or full, or a limit (ulimit -n) is reached."
            fix = "set TMPDIR to a directory on a local disk that you can write to, or make room."
            raise PreflightError(Explanation(what, cause=cause, fix=fix)) from exc
        yield LauncherStore(folder=folder, master_port=master_port)


@contextlib.contextmanager
def _kept_from_cleaners(folder: Path) -> Iterator[None]:
    """Hold a lock that keeps systemd-tmpfiles from ageing the files out of a run of many days."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(fd)


@contextlib.contextmanager
def reserved_port(address: str = LOOPBACK) -> Iterator[int]:
    """Hold a port of an address that only a program that names it can take.

    The kernel gives a bound port to no program that asks for any free one; as it does not listen,
    and both sides set SO_REUSEADDR (torch's store does), a rank can still bind it. So can a program
    of any other user that names it: ddpsafe itself and torch's own rendezvous, which ddpsafe sends
    to its store, never use it.
    """
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind((address, 0))
        yield holder.getsockname()[1]
