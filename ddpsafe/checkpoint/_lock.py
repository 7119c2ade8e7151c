"""One job writes into a directory: the lock, its owner, and what becomes of it when they die.

Two signs say that an owner lives. A POSIX record lock on ``.lock`` ends with its process, however
that ends, is not inherited by forks, and reaches over hosts on file systems that carry locks (NFSv4,
Lustre with ``flock``, GPFS). Where it does not reach, the owner's heartbeat does: the file's
modification time, which a thread renews. It is compared with itself, never with a clock of ours.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
import threading
import time
import uuid
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Final

from ddpsafe._errors import Explanation
from ddpsafe._machine import boot_id
from ddpsafe.checkpoint.errors import DirectoryLockedError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

NAME: Final = ".lock"
BEAT_S: Final = 5.0
"""How often the owner renews the heartbeat."""
SILENCE_S: Final = 30.0
"""An owner on another host whose heartbeat does not change for so long is dead."""
DYING_S: Final = 5.0
"""How long to wait for an owner on this host that may be on its way out."""

_JOB_VARIABLES: Final = ("SLURM_JOB_ID", "TORCHELASTIC_RUN_ID", "PBS_JOBID", "LSB_JOBID")
_BUSY: Final = (errno.EACCES, errno.EAGAIN)
_PAUSE_S: Final = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """Who writes into the directory.

    Attributes:
        host: Its host name.
        boot: Identifies the kernel it runs on.
        pid: Its process id there.
        job: What the scheduler or the launcher calls the job; empty where nobody does.
        since: When it began, in UTC, as ISO 8601.
        id: Tells two owners apart.
    """

    host: str
    boot: str
    pid: int
    job: str
    since: str
    id: str

    @classmethod
    def myself(cls, env: Mapping[str, str]) -> Owner:
        """Describe this process."""
        names = [f"{name}={env[name]}" for name in _JOB_VARIABLES if name in env]
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


# A process may lock a record as often as it likes, so two checkpointers in one would both have it.
_mine: dict[str, int] = {}


class DirectoryLock:
    """The right to write into a directory.

    Args:
        directory: It exists.
        owner: This process.

    Raises:
        DirectoryLockedError: Another living process has it.
        OSError: The directory cannot be written to.
    """

    def __init__(self, directory: Path, owner: Owner) -> None:
        self.owner = owner
        self._path = directory / NAME
        self._key = str(directory.resolve())
        if _mine.get(self._key) == os.getpid():
            raise _locked_by_us(directory, owner)
        self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            self._reaches = self._take_record(directory)
            self._outwait(directory)
            self._write()
        except BaseException:
            os.close(self._fd)
            raise
        _mine[self._key] = os.getpid()
        self._stop = threading.Event()
        self._beat = threading.Thread(target=self._beat_on, name="ddpsafe-lock", daemon=True)
        self._beat.start()

    def _take_record(self, directory: Path) -> bool:
        """Take the record lock; tell whether this file system has such locks."""
        ends_s = time.monotonic() + DYING_S
        while (refusal := self._try_record()) in _BUSY:
            if time.monotonic() > ends_s:
                raise _locked(directory, self._read(), "it holds the lock")
            time.sleep(_PAUSE_S)
        return refusal is None

    def _try_record(self) -> int | None:
        try:
            fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as exc:
            return exc.errno
        return None

    def _outwait(self, directory: Path) -> None:
        """Make sure that the owner in the file is dead where the record lock does not say so."""
        former = self._read()
        if former is None or (self._reaches and former.boot == self.owner.boot):
            return
        last = self._beat_time()
        ends_s = time.monotonic() + SILENCE_S
        while time.monotonic() < ends_s:
            if self._beat_time() != last:
                raise _locked(directory, former, "its heartbeat goes on")
            if self._read() is None:
                return
            time.sleep(1.0)

    def _beat_time(self) -> int:
        # Through the path: NFS renews what it knows of a file when it is opened.
        with contextlib.suppress(OSError):
            fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
            beat = os.fstat(fd).st_mtime_ns
            self._close_quietly(fd)
            return beat
        return 0

    def _close_quietly(self, fd: int) -> None:
        """Close a second descriptor, which drops the record lock, and take that again."""
        os.close(fd)
        if self._reaches:
            fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def _read(self) -> Owner | None:
        return _parse_owner(os.pread(self._fd, 4096, 0))

    def _write(self) -> None:
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, json.dumps(asdict(self.owner)).encode(), 0)
        os.fsync(self._fd)

    def _beat_on(self) -> None:
        while not self._stop.wait(BEAT_S):
            with contextlib.suppress(OSError):  # shows in the next save
                os.utime(self._fd)

    def is_held(self) -> bool:
        """Tell whether the directory is there and nobody has taken the lock over meanwhile."""
        try:
            ours, theirs = os.fstat(self._fd), self._path.stat()
        except OSError:
            return False
        same_file = (ours.st_dev, ours.st_ino) == (theirs.st_dev, theirs.st_ino)
        found = self._read() if same_file else None
        return found is not None and found.id == self.owner.id

    def release(self) -> None:
        """Let others write, if it was not done before: the file stays, without an owner."""
        if self._stop.is_set() or os.getpid() != self.owner.pid:
            return
        self._stop.set()
        self._beat.join()
        _mine.pop(self._key, None)
        with contextlib.suppress(OSError):
            if self.is_held():
                os.ftruncate(self._fd, 0)
        os.close(self._fd)


def _parse_owner(data: bytes) -> Owner | None:
    try:
        return Owner(**json.loads(data))
    except (ValueError, TypeError):
        return None


def read_owner(directory: Path) -> Owner | None:
    """Return who writes into a directory, as far as this rank sees it.

    Only for processes that do not own it: closing the file would drop the owner's record lock.
    """
    try:
        return _parse_owner((directory / NAME).read_bytes())
    except OSError:
        return None


def _locked_by_us(directory: Path, owner: Owner) -> DirectoryLockedError:
    return DirectoryLockedError(
        Explanation(
            f"Another Checkpointer of this very process writes into {directory} ({owner}).",
            cause="it was made before, by a cell of a notebook that ran twice for example, and was "
            "not closed.",
            fix="call close() on the former one, or use it in a with block.",
        ),
        owner=asdict(owner),
    )


def _locked(directory: Path, owner: Owner | None, sign: str) -> DirectoryLockedError:
    who = "a process that has not said who it is" if owner is None else str(owner)
    return DirectoryLockedError(
        Explanation(
            f"Another job writes checkpoints into {directory}: {who} ({sign}).",
            cause="two jobs were given one directory, or the job before this one still ends.",
            fix="give each job a directory of its own, or end the other job; to read only, "
            "make Checkpointer(..., access='read').",
        ),
        owner=None if owner is None else asdict(owner),
    )
