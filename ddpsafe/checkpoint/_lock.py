"""The lock that lets only one job write into a directory, and how a dead owner loses it.

There are two signs that an owner is alive:

- A record lock on ``.lock``. The kernel releases it when the owner's process ends, however it ends, and
  file systems that support locks across hosts (NFSv4, Lustre with ``flock``, GPFS) extend it to them.
- A heartbeat, where record locks do not work: a thread renews the file's modification time.

A file that ddpsafe did not write is left untouched.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
import stat
import struct
import threading
import time
import uuid
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Final

from ddpsafe._clock import BoundedCall
from ddpsafe._errors import Explanation
from ddpsafe._host import boot_id
from ddpsafe._limits import BEAT_S, DYING_S, SILENCE_S
from ddpsafe._world import job_variables, queue_variables
from ddpsafe.checkpoint.errors import DirectoryError, DirectoryLockedError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

NAME: Final = ".lock"

_BUSY: Final = (errno.EACCES, errno.EAGAIN)
_POLL_S: Final = 0.05
_MAX_BYTES: Final = 4096
_RELEASE_S: Final = 5.0
"""How long the end of a job waits for storage that does not respond."""
# Other users may write into the directory too: a link could lead to any file, and opening a pipe
# would block.
_READ_FLAGS: Final = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """The process that writes into the directory.

    Attributes:
        boot: Boot id of the kernel it runs on.
        pid: Its process id there.
        job: The job's name from the scheduler or the launcher; empty if there is none.
        since: When it took the lock, in UTC, as ISO 8601.
        lock: Which kind of record lock it holds: of its open file, of its process, or none.
    """

    host: str
    boot: str
    pid: int
    job: str
    since: str
    id: str
    lock: str = ""

    @classmethod
    def myself(cls, env: Mapping[str, str]) -> Owner:
        """Describe this process."""
        identifiers = {**job_variables(env), **queue_variables(env)}
        names = [f"{name}={value}" for name, value in identifiers.items()]
        return cls(
            host=socket.gethostname(),
            boot=boot_id(),
            pid=os.getpid(),
            job=names[0] if names else "",
            since=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            id=uuid.uuid4().hex,
        )

    def __str__(self) -> str:
        job = f" of {self.job}" if self.job else ""
        return f"process {self.pid}{job} on {self.host}, since {self.since}"


# A lock of an open file description, where the kernel has those. A process drops its own record locks
# when it closes any descriptor of the file, as a backup of the directory does.
_FILE_LOCK: Final = "open file"
_PROCESS_LOCK: Final = "process"
_NO_LOCK: Final = "none"

# Directories that this process has locked. A record lock of the process would let a second
# Checkpointer of the same process in.
_mine: dict[str, int] = {}
# Descriptors to close in a forked child, which would otherwise keep the lock after this process ends.
_held: set[int] = set()


def _close_in_child() -> None:
    for fd in _held:
        with contextlib.suppress(OSError):
            os.close(fd)
    _held.clear()


os.register_at_fork(after_in_child=_close_in_child)


class DirectoryLock:
    """This process's lock on a directory that exists.

    Raises:
        DirectoryLockedError: Another living process holds the lock.
        DirectoryError: The lock file was not made by ddpsafe.
        OSError: The directory cannot be written to.
    """

    def __init__(self, directory: Path, owner: Owner) -> None:
        self.owner = owner
        self._path = directory / NAME
        self._key = str(directory.resolve())
        # With the pid: a forked child inherits the entry, but not the lock.
        if _mine.get(self._key) == os.getpid():
            raise DirectoryLockedError(
                Explanation(
                    f"Another Checkpointer of this process writes into {directory} ({owner}).",
                    cause="it was created earlier and not closed, for example by a notebook cell that "
                    "ran twice.",
                    fix="call close() on the earlier one, or use it in a with block.",
                ),
                owner=asdict(owner),
            )
        self._fd = _open(directory)
        try:
            self.owner = replace(owner, lock=self._take_record_lock(directory))
            self._wait_out_former_owner(directory)
            self._write()
        except BaseException:
            os.close(self._fd)
            raise
        _mine[self._key] = os.getpid()
        _held.add(self._fd)
        self._stop = threading.Event()
        self._beat = threading.Thread(target=self._keep_beating, name="ddpsafe-lock", daemon=True)
        self._beat.start()

    def _take_record_lock(self, directory: Path) -> str:
        """Take the record lock; return its kind, which depends on the file system."""
        # A scheduler may start the next job while the previous one is still ending.
        ends_s = time.monotonic() + DYING_S
        while (kind := self._try_record_lock()) is None:
            if time.monotonic() > ends_s:
                raise _locked(directory, self._read(), "it holds the lock")
            time.sleep(_POLL_S)
        return kind

    def _try_record_lock(self) -> str | None:
        """Try to take the record lock; return its kind, or ``None`` if another process holds it."""
        command = getattr(fcntl, "F_OFD_SETLK", None)
        # struct flock: type, whence, start, length (0: to the end), pid (0 for these locks)
        lock = struct.pack("@hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        try:
            if command is not None:
                fcntl.fcntl(self._fd, command, lock)
                return _FILE_LOCK
        except OSError as exc:  # another process holds it, or this file system has no such locks
            if exc.errno in _BUSY:
                return None
        try:
            fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as exc:
            return None if exc.errno in _BUSY else _NO_LOCK
        return _PROCESS_LOCK

    def _wait_out_former_owner(self, directory: Path) -> None:
        """Wait until the heartbeat of the owner named in the file has been silent for long enough.

        Raises:
            DirectoryLockedError: Its heartbeat continues.
        """
        former = self._read()
        if former is None:
            return
        # On one kernel, taking the lock of the open file proves that the former owner has ended.
        # The lock of a process does not: the owner may have dropped it and live on.
        if {former.lock, self.owner.lock} == {_FILE_LOCK} and former.boot == self.owner.boot:
            return
        # Compared only with its own earlier value: the clock of another host may differ.
        last = self._beat_time()
        ends_s = time.monotonic() + SILENCE_S
        while time.monotonic() < ends_s:
            if self._beat_time() != last:
                raise _locked(directory, former, "its heartbeat continues")
            # The owner has released it, which empties the file.
            if self._read() is None:
                return
            time.sleep(min(1.0, SILENCE_S / 10))

    def _beat_time(self) -> int:
        # By the path: NFS refreshes a file's attributes when the file is opened.
        with contextlib.suppress(OSError):
            fd = os.open(self._path, _READ_FLAGS)
            beat = os.fstat(fd).st_mtime_ns
            os.close(fd)
            if self.owner.lock == _PROCESS_LOCK:  # the close has just dropped it
                fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return beat
        return 0

    def _read(self) -> Owner | None:
        return _parse_owner(os.pread(self._fd, _MAX_BYTES, 0))

    def _write(self) -> None:
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, json.dumps(asdict(self.owner)).encode(), 0)
        os.fsync(self._fd)

    def _keep_beating(self) -> None:
        while not self._stop.wait(BEAT_S):
            with contextlib.suppress(OSError):  # the next save reports it
                os.utime(self._fd)
            # A descriptor of the file that was closed elsewhere in this process may have dropped it.
            if self.owner.lock == _PROCESS_LOCK:
                with contextlib.suppress(OSError):
                    fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def find_loss(self) -> str | None:
        """Return how the lock was lost; ``None`` if this process still holds it."""
        try:
            ours, theirs = os.fstat(self._fd), self._path.stat(follow_symlinks=False)
        except OSError:
            return "the directory, or the lock in it, was removed, or is no longer mounted."
        if (ours.st_dev, ours.st_ino) != (theirs.st_dev, theirs.st_ino):
            return "the lock file was replaced: the directory was removed and created again."
        current = self._read()
        if current is None or current.id != self.owner.id:
            who = "another process" if current is None else str(current)
            return (
                f"{who} has taken it over, because this process was suspended for so long that it "
                "counted as dead."
            )
        return None

    def release(self) -> None:
        """Unlock the directory. The file stays, without an owner; a second call does nothing."""
        # A forked child inherits this object; it must not unlock its parent's directory.
        if self._stop.is_set() or os.getpid() != self.owner.pid:
            return
        self._stop.set()
        try:
            releasing = BoundedCall(self._release, name="ddpsafe-unlock")
        except RuntimeError:  # the interpreter ends, and starts no thread any more
            self._release()
        else:
            releasing.wait(_RELEASE_S)

    def _release(self) -> None:
        self._beat.join()
        _mine.pop(self._key, None)
        with contextlib.suppress(OSError):
            # Another job that has taken the lock over keeps its name in the file.
            if self.find_loss() is None:
                os.ftruncate(self._fd, 0)
        _held.discard(self._fd)
        os.close(self._fd)


def _open(directory: Path) -> int:
    """Open the lock file, or create it, and refuse one that ddpsafe did not write.

    Raises:
        DirectoryError: It is a link, a pipe, another user's, or holds something else.
        OSError: The directory cannot be written to.
    """
    path = directory / NAME
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        fd = os.open(path, flags, 0o644)
    except OSError as exc:
        if exc.errno in (errno.ELOOP, errno.EMLINK, errno.ENXIO, errno.EISDIR):
            raise _foreign(path, "it is a link, a pipe or a directory") from exc
        raise
    try:
        facts = os.fstat(fd)
        problem = ""
        if not stat.S_ISREG(facts.st_mode):
            problem = "it is not a regular file"
        elif facts.st_nlink > 1:
            problem = "it has another hard link, so that another file would be overwritten"
        elif facts.st_uid not in (os.geteuid(), directory.stat().st_uid):
            problem = f"it belongs to another user (uid {facts.st_uid})"
        # A host that lost power may have left zeros.
        elif (data := os.pread(fd, _MAX_BYTES, 0)).strip(b"\0") and _parse_owner(data) is None:
            problem = "its content was not written by ddpsafe"
    except BaseException:
        os.close(fd)
        raise
    if problem:
        os.close(fd)
        raise _foreign(path, problem)
    return fd


def _foreign(path: Path, problem: str) -> DirectoryError:
    return DirectoryError(
        Explanation(
            f"{path} cannot be used as the lock of the directory: {problem}.",
            cause="it was not made by ddpsafe; another user of the directory may have put it there.",
            fix="inspect it, and remove it if none of your jobs needs it.",
        ),
        rank=0,
    )


def _parse_owner(data: bytes) -> Owner | None:
    try:
        owner = Owner(**json.loads(data))
    except (ValueError, TypeError, RecursionError):
        return None
    values = asdict(owner)
    pid: object = values.pop("pid")
    is_right = all(isinstance(text, str) and text.isprintable() for text in values.values())
    return owner if is_right and isinstance(pid, int) else None


def read_owner(directory: Path) -> Owner | None:
    """Return the owner of a directory's lock, if this rank can read one."""
    try:
        fd = os.open(directory / NAME, _READ_FLAGS)
    except OSError:
        return None
    try:
        is_file = stat.S_ISREG(os.fstat(fd).st_mode)
        return _parse_owner(os.pread(fd, _MAX_BYTES, 0)) if is_file else None
    except OSError:
        return None
    finally:
        os.close(fd)


def _locked(directory: Path, owner: Owner | None, sign: str) -> DirectoryLockedError:
    who = "an unknown process" if owner is None else str(owner)
    return DirectoryLockedError(
        Explanation(
            f"Another job writes checkpoints into {directory}: {who} ({sign}).",
            cause="two jobs were given the same directory, or the previous job has not ended yet.",
            fix="give each job its own directory, or end the other job; to read only, use "
            "Checkpointer(..., access='read').",
        ),
        owner={} if owner is None else asdict(owner),
    )
