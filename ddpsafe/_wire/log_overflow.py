"""Where a rank's output goes once its log takes no more: into memory, from which the launcher shows it.

A full disk, a quota or a limit of file sizes must not end a training because it prints.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import io
import os
import threading
from typing import IO, TYPE_CHECKING, Final, Literal

from ddpsafe._wire.messages import LogFull
from ddpsafe._wire.rank_pipe import Claim, open_memory

if TYPE_CHECKING:
    from collections.abc import Callable

    from typing_extensions import Buffer

    from ddpsafe._wire.spec import LogFiles

# What the launcher has not shown yet. A stopped reader of the console must not use up the memory.
_MOST_BYTES: Final = 8 << 20
_BLOCK_BYTES: Final = 512
# The descriptor itself refuses: the script's own business.
_NOT_OF_THE_FILE: Final = frozenset({errno.EBADF, errno.EPIPE, errno.EAGAIN, errno.EINTR})
# From <linux/falloc.h>.
_KEEP_SIZE: Final = 1
_PUNCH_HOLE: Final = 2


# ---- in the rank ----


class LogOverflow:
    """Replaces the log behind a file descriptor once a write to it has failed.

    Args:
        tell: Sends a message to the launcher; a fork of the rank sends none.
    """

    def __init__(self, logs: LogFiles, tell: Callable[[LogFull], None]) -> None:
        self._logs = logs
        self._tell = tell
        self._pid = os.getpid()
        self._lock = threading.RLock()  # a signal handler may print in it
        self._logs_of: dict[int, Claim] = {}
        self._memory_of: dict[int, Claim] = {}
        self._files: list[IO[bytes]] = []  # open as long as the rank lives: the launcher reads them

    def guard(self) -> None:
        """Claim file descriptors 1 and 2, which refer to the logs now."""
        self._logs_of = {1: Claim(1), 2: Claim(2)}

    def begin(self, fd: int, exc: OSError) -> bool:
        """Return whether the write can be tried again, since memory has taken the place of the log."""
        if exc.errno in _NOT_OF_THE_FILE:
            return False
        self.replace_logs(exc.strerror or str(exc))
        memory = self._memory_of.get(fd)  # none where the script has put a file of its own
        return memory is not None and memory.holds()

    def replace_logs(self, reason: str) -> None:
        """Put memory in the place of both logs: what the rank starts from now on can write, too."""
        with self._lock:
            for fd, log in self._logs_of.items():
                if fd in self._memory_of or not log.holds():
                    continue
                # What is not shown on the console has no reader, and a fork cannot tell the launcher.
                is_read = self._logs.is_shown and os.getpid() == self._pid
                file = open_memory() if is_read else open(os.devnull, "wb")  # noqa: PTH123, SIM115 - see `_files`
                number = file.fileno()
                # Processes that the rank starts share the file, but each has a position of its own.
                flags = fcntl.fcntl(number, fcntl.F_GETFL)
                fcntl.fcntl(number, fcntl.F_SETFL, flags | os.O_APPEND)
                os.dup2(number, fd)
                self._memory_of[fd] = Claim(fd)
                self._files.append(file)
                name: Literal["stdout", "stderr"] = "stdout" if fd == 1 else "stderr"
                self._tell(LogFull(name=name, fd=number if is_read else None, reason=reason))

    def has_room(self, fd: int) -> bool:
        """Return whether the launcher keeps up with what is in memory."""
        memory = self._memory_of.get(fd)
        if memory is None or not memory.holds():
            return True
        return os.fstat(fd).st_blocks * _BLOCK_BYTES < _MOST_BYTES


class LogStream(io.FileIO):
    """File descriptor 1 or 2, as the lowest layer of ``sys.stdout`` or ``sys.stderr``."""

    def __init__(self, fd: int, overflow: LogOverflow) -> None:
        super().__init__(fd, "w", closefd=False)
        self._overflow = overflow

    def write(self, data: Buffer, /) -> int:
        """Write all of it to the log, else to memory; what memory has no room for is lost."""
        fd = self.fileno()
        rest = memoryview(data).cast("B")
        failures = 0
        while rest and failures <= 1 and self._overflow.has_room(fd):
            try:
                rest = rest[super().write(rest) :]  # as much as the disk has room for
            except OSError as exc:  # noqa: PERF203 - at most twice
                if not self._overflow.begin(fd, exc):
                    raise
                failures += 1
        return memoryview(data).nbytes


# ---- in the launcher ----


class OverflowReader:
    """Reads what a rank writes to memory in place of its log, and frees that memory.

    Raises:
        OSError: The process has ended.
    """

    def __init__(self, pid: int, fd: int) -> None:
        self._file = io.FileIO(f"/proc/{pid}/fd/{fd}", "r+")
        self._offset = 0

    def read(self, most_bytes: int) -> bytes:
        """Return what is new, at most so many bytes."""
        data = self._file.read(most_bytes)
        if data:
            libc = ctypes.CDLL(None, use_errno=True)
            flags, size = _KEEP_SIZE | _PUNCH_HOLE, len(data)
            libc.fallocate64(
                self._file.fileno(), flags, ctypes.c_int64(self._offset), ctypes.c_int64(size)
            )
            self._offset += size
        return data

    def close(self) -> None:
        """Close the memory."""
        self._file.close()
