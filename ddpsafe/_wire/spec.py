"""What the launcher passes to a rank when it starts its process, and the log files that both use."""

from __future__ import annotations

import errno
import hashlib
import os
import secrets
import signal
import stat
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

if TYPE_CHECKING:
    from datetime import timedelta

    from ddpsafe._world import World

# A real-time signal: SIGUSR1 and SIGUSR2 belong to schedulers and to the user's own handlers.
STACKS_SIGNAL: Final = int(signal.SIGRTMIN + 7 if hasattr(signal, "SIGRTMIN") else signal.SIGUSR2)

_READ_BYTES: Final = 1 << 20

MARKER: Final = "DDPSAFE_LAUNCH_ID"
"""The environment variable by which a rank's processes are found."""

HELPER: Final = "ddpsafe-helper"
"""Marks what a rank has started through `multiprocessing`, except the ranks of a launch of its own."""

SAFE_PATH: Final = ("PYTHONSAFEPATH", "ddpsafe")
"""A variable that makes Python 3.11 and later import nothing from the current directory, with a value of
ddpsafe's own. A rank removes it, so that programs that the script starts do not inherit it."""


def make_launch_id() -> str:
    """Return the id of a new launch: a digest of its temporary directory, and a random part."""
    try:
        folder = tempfile.gettempdir()
    except OSError:
        # No directory, or no free descriptor to test one: reported before anything starts.
        folder = ""
    place = hashlib.sha256(folder.encode(errors="surrogateescape")).hexdigest()
    # By the digest, the launches of one test run are distinguished from those of another on the
    # same host.
    return f"{place[:8]}{secrets.token_hex(12)}"


def semaphore_prefix(launch_id: str) -> str:
    """Return the prefix of the names of a launch's semaphores."""
    # Every user of the host can read these names, so they must not show the random part of the id.
    digest = hashlib.sha256(launch_id.encode()).hexdigest()
    return f"/ddpsafe-{launch_id[:8]}-{digest[:8]}"


CallStyle = Literal["launch", "spawn", "run"]
"""``launch`` calls ``fn(ctx, *args)`` after it has made the process group. ``spawn`` calls
``fn(local_rank, *args)``, and the script makes its group itself. ``run`` does the same with a whole script,
as torchrun does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTimeouts:
    """The timeouts that a rank enforces itself; the launcher enforces the others.

    Attributes:
        start: For each step of joining: reaching the store, waiting for the others, making the group.
        node_loss: How long the store of the launcher on another host may be out of reach.
        chosen: Names of the timeouts that the user has set. If a script makes its group itself, its own
            timeouts and torch's defaults take precedence over the others.
    """

    start: timedelta
    collective: timedelta
    barrier: timedelta
    node_loss: timedelta
    chosen: frozenset[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class LogFiles:
    """The files for one rank's output, its stack dumps and what NCCL_DEBUG shows.

    Attributes:
        owner_uid: The owner of their directory: the user of the launcher, unless the file system gives
            all files another owner.
        drawn: The file descriptors, of 1 and 2, that it shows on a terminal, where the rank may redraw lines.
        tag_columns: How many columns of that terminal it uses for what stands in front of the rank's lines.
    """

    stdout: str
    stderr: str
    stacks: str
    nccl: str
    owner_uid: int
    is_shown: bool
    drawn: tuple[int, ...] = ()
    tag_columns: int = 0


def unreported_mark(stderr: Path | str) -> Path:
    """Return the file that a rank creates beside its log if it could not send its last report."""
    return Path(stderr).with_suffix(".unreported")


def open_log(path: Path | str, flags: int, *, owner_uid: int | None = None) -> int:
    """Open a file in an attempt's directory, private if it is new; return the file descriptor.

    No link is followed.

    Args:
        path: The file.
        flags: As for `os.open`.
        owner_uid: The required owner of the directory; ``None`` for any user.

    Raises:
        OSError: It cannot be opened, is a link, or its directory is a link or another user's.
    """
    parent, name = os.path.split(path)
    # A user who may write to a directory above could replace the attempt's directory by a link, and
    # so make a rank overwrite, or the launcher show, any file of the user.
    folder = os.open(parent, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if owner_uid is not None and os.fstat(folder).st_uid != owner_uid:
            raise PermissionError(errno.EPERM, "another user owns it", parent)
        # Without O_NONBLOCK, opening would block if a named pipe is in the file's place.
        flags |= os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
        file = os.open(name, flags, 0o600, dir_fd=folder)
    finally:
        os.close(folder)
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise OSError(errno.EINVAL, "it is not a regular file", os.fspath(path))
    os.set_blocking(file, True)
    return file


def read_log(path: Path | str, most_bytes: int = _READ_BYTES) -> str:
    """Return the end of a rank's file as text, a megabyte by default; empty if it cannot be read."""
    # A rank may have written gigabytes; what it wrote about its end is in the last megabyte.
    try:
        with open(open_log(path, os.O_RDONLY), "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - most_bytes))
            return file.read(most_bytes).decode("utf-8", "replace").replace("\r\n", "\n")
    except OSError:
        return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class StorePlace:
    """The store at which the ranks of several nodes meet; node 0's launcher serves it.

    Attributes:
        key: The random prefix of this attempt's keys.
    """

    host: str
    port: int
    key: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSpec:
    """Everything that the launcher passes to one rank, complete before its process starts.

    Attributes:
        world: The rank, its local rank and its node, with their totals.
        attempt: This attempt, counted from 1.
        launch_id: Marks the processes of this launch.
        launcher_pid: The process whose death ends this one.
        store_dir: The private folder in which the ranks of this attempt meet.
        groups_file: A file for the store of their process groups.
        store_place: The store at which they meet instead, if they are on several nodes.
        memory: The launcher's descriptors of the files in which a `Checkpointer` keeps states; see
            `checkpoint._slots`.
        backend: Backend of the process group, e.g. ``gloo`` or ``cpu:gloo,cuda:nccl``.
        asked_backend: The configured backend: ``auto``, or a backend for scripts that name none.
        device: The rank's device, e.g. ``cuda:0``.
        inherited_env: The caller's whole environment, if the start method does not pass it on.
        seed: Base seed; ``None`` leaves the generators alone.
        child_start_method: The default start method for processes that the rank starts through
            `multiprocessing`; ``None`` for Python's default.
        num_threads: Intra-op threads of the rank; ``None`` leaves the choice to the user.
    """

    world: World
    attempt: int
    launch_id: str
    launcher_pid: int
    store_dir: str
    groups_file: str
    backend: str
    asked_backend: str
    device: str
    timeouts: RankTimeouts
    style: CallStyle
    env: dict[str, str]
    inherited_env: dict[str, str] | None
    cwd: str
    seed: int | None
    child_start_method: str | None
    num_threads: int | None
    logs: LogFiles
    run_dir: str
    store_place: StorePlace | None = None
    memory: tuple[int, ...] = ()
