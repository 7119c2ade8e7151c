"""One-way pipe from a rank to its launcher, which can never block the launcher.

`multiprocessing.Connection.recv` waits for the whole message, so a rank that is stopped in the
middle of a large result would stop its launcher too. Here the launcher reads what is there.
"""

from __future__ import annotations

import errno
import mmap
import os
import pickle
import struct
import tempfile
import threading
import time
from dataclasses import dataclass
from multiprocessing import reduction
from typing import IO, TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from ddpsafe._wire.messages import Message


_NUMBERS: Final = struct.Struct("<QQqQQQQ")
_NO_CHECKPOINT: Final = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a rank has come in one attempt.

    Attributes:
        steps: Optimizer steps of this attempt.
        saves: Checkpoints that it has saved in this attempt.
        checkpoint: Step number of the last one that it has restored or saved; ``None`` without one.
        steps_at_checkpoint: What `steps` was by then.
        last_ns: When it made the last step (monotonic); 0 before the first.
        longest_ns: The longest time between two steps so far.
        saving: Whether it is in a save of a `Checkpointer`, and has made no step since that began.
    """

    steps: int = 0
    saves: int = 0
    checkpoint: int | None = None
    steps_at_checkpoint: int = 0
    last_ns: int = 0
    longest_ns: int = 0
    saving: bool = False

    @property
    def longest_s(self) -> float:
        """The longest time between two steps so far, in seconds."""
        return self.longest_ns / 1e9

    @property
    def steps_since_checkpoint(self) -> int:
        """Optimizer steps behind the last checkpoint."""
        return self.steps - self.steps_at_checkpoint


class StepCounter:
    """The progress of one rank, in memory that both processes map.

    Args:
        fd: The rank's shared memory, which begins with `EMPTY`; mapped here, closed by its owner.
    """

    EMPTY: Final = _NUMBERS.pack(0, 0, _NO_CHECKPOINT, 0, 0, 0, 0)
    """What a new file has to contain."""

    def __init__(self, fd: int) -> None:
        """Map the file."""
        self._memory = mmap.mmap(fd, _NUMBERS.size)

    def count(self) -> None:
        """Count one optimizer step; costs a fraction of a microsecond."""
        steps, saves, checkpoint, at, last_ns, longest_ns, _ = _NUMBERS.unpack_from(self._memory)
        now_ns = time.monotonic_ns()
        if last_ns and now_ns - last_ns > longest_ns:
            longest_ns = now_ns - last_ns
        _NUMBERS.pack_into(self._memory, 0, steps + 1, saves, checkpoint, at, now_ns, longest_ns, 0)

    def note_saving(self) -> None:
        """Note that the rank has begun to save a checkpoint."""
        *numbers, _ = _NUMBERS.unpack_from(self._memory)
        _NUMBERS.pack_into(self._memory, 0, *numbers, 1)

    def note_checkpoint(self, step: int, *, is_new: bool) -> None:
        """Note that the rank goes on from a checkpoint: it has restored it, or saved a new one."""
        steps, saves, _, _, *times, _ = _NUMBERS.unpack_from(self._memory)
        _NUMBERS.pack_into(self._memory, 0, steps, saves + is_new, step, steps, *times, 0)

    def read(self) -> Progress:
        """Return how far the rank has come."""
        numbers = _NUMBERS.unpack_from(self._memory)
        steps, saves, checkpoint, steps_at_checkpoint, last_ns, longest_ns, saving = numbers
        return Progress(
            steps=steps,
            saves=saves,
            checkpoint=None if checkpoint == _NO_CHECKPOINT else checkpoint,
            steps_at_checkpoint=steps_at_checkpoint,
            last_ns=last_ns,
            longest_ns=longest_ns,
            saving=bool(saving),
        )

    def close(self) -> None:
        """Unmap."""
        self._memory.close()


RESULT_OFFSET: Final = mmap.ALLOCATIONGRANULARITY
"""Where the result begins in a rank's shared memory: the first place that can be mapped by itself."""


def open_memory() -> IO[bytes]:
    """Open memory that processes can inherit and map, as a file without a name.

    Writing 1 GB to a temporary file takes four times as long, and a slow disk decides.
    """
    if hasattr(os, "memfd_create"):
        return open(os.memfd_create("ddpsafe"), "w+b")  # noqa: PTH123 - a file descriptor
    return tempfile.TemporaryFile(prefix="ddpsafe-")


_HEADER: Final = struct.Struct("<Q")
_CHUNK: Final = 1 << 20

ASK_POSITION: Final = b"?"
ASK_WHEREABOUTS: Final = b"@"
ASK_STACKS: Final = b"#"
ASK_THREADS: Final = b"&"
ASK_STOP: Final = b"!"
STOP_AT: Final = b"="
END_NOW: Final = b"."
ALL_STARTED: Final = b"+"
"""What the launcher may say to a rank, on the pipe that otherwise only ends with it."""

CALL_NUMBER: Final = struct.Struct("<Q")
"""Follows `STOP_AT`: the call of `stop_requested` from which on the answer is yes."""


class Claim:
    """Tells whether a descriptor is still the same: a script may close all, and then reuse the number.

    Writing to the number by then would be writing to the script's own file.
    """

    def __init__(self, fd: int) -> None:
        """Remember what the number stands for now."""
        self._fd = fd
        self._identity = _identity_of(fd)

    def holds(self) -> bool:
        """Tell whether the number still stands for the same pipe or file."""
        try:
            return _identity_of(self._fd) == self._identity
        except OSError:
            return False


def _identity_of(fd: int) -> tuple[int, int]:
    status = os.fstat(fd)
    return status.st_dev, status.st_ino


class InheritedFd:
    """A file descriptor on its way into a process that is being started."""

    def __init__(self, fd: int) -> None:
        """Name the descriptor; its owner closes it."""
        self.fd = fd

    def __reduce__(self) -> tuple[object, ...]:
        """Hand a duplicate to the process being started; works only then."""
        return (_adopt, (reduction.DupFd(self.fd),))


def _adopt(duplicate: Any) -> InheritedFd:
    fd = duplicate.detach()
    # It has come as inheritable. Programs that the rank starts, or becomes, have no use for it,
    # and the launcher sees the end of the rank's reports.
    os.set_inheritable(fd, False)  # noqa: FBT003 - its signature
    return InheritedFd(fd)


@dataclass(frozen=True, slots=True, kw_only=True)
class Inheritance:
    """What a rank inherits beside its `RankSpec`.

    Attributes:
        report: Where it writes to the launcher.
        lifeline: Ends with the launcher; carries words such as `ASK_POSITION`.
        call: A file with the pickled call.
        shared: Memory without a name that the launcher maps too: the rank's `StepCounter`, and from
            `RESULT_OFFSET` on its result, where that is large.
        handles: What the call needs beside its bytes.
    """

    report: InheritedFd
    lifeline: InheritedFd
    call: InheritedFd
    shared: InheritedFd
    handles: tuple[object, ...]


class Sender:
    """The rank's end. Threads may share it; what the rank forks has no part in it.

    A fork inherits the pipe and everything that writes to it. What became of a helper, or what it
    does, is not what became of the rank.

    Attributes:
        is_lost: Whether the script has closed the pipe, so that a message could not be sent.
    """

    def __init__(self, fd: int) -> None:
        """Own the descriptor."""
        self._fd = fd
        self._claim = Claim(fd)
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._is_cut = False
        self.is_lost = False

    def is_here(self) -> bool:
        """Tell whether this process is the rank, and not a fork of it."""
        return os.getpid() == self._pid

    def send(self, message: Message) -> None:
        """Write one message.

        A launcher that has gone does not raise here: the lifeline ends the rank. Nothing can follow a
        message that was cut short: it would be taken for the missing part.
        """
        if not self.is_here():  # before the lock, which another thread may have held at the fork
            return
        body = pickle.dumps(message)
        with self._lock:
            self.is_lost = self.is_lost or not self._claim.holds()
            if self._is_cut or self.is_lost:
                return
            self._is_cut = True  # a signal handler of the user's may raise in the middle of it
            try:
                self._write(_HEADER.pack(len(body)) + body)
            except OSError as exc:
                self.is_lost = exc.errno == errno.EBADF  # closed just now
                if exc.errno not in (errno.EPIPE, errno.EBADF):  # a handler's own: TimeoutError
                    raise
            else:
                self._is_cut = False

    def _write(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[os.write(self._fd, view) :]


class Receiver:
    """The launcher's end; `fileno` makes it usable in a wait."""

    def __init__(self, fd: int) -> None:
        """Own the descriptor and make it non-blocking."""
        os.set_blocking(fd, False)
        self._fd = fd
        self._buffer = bytearray()
        self.closed = False

    def fileno(self) -> int:
        """Return the descriptor to wait on."""
        return self._fd

    def receive(self) -> list[Message]:
        """Read what has arrived, without waiting.

        Returns:
            The messages that are complete; the rest is kept for the next call.
        """
        self._fill()
        messages: list[Message] = []
        while len(self._buffer) >= _HEADER.size:
            (size,) = _HEADER.unpack_from(self._buffer)
            end = _HEADER.size + size
            if len(self._buffer) < end:
                break
            body = bytes(memoryview(self._buffer)[_HEADER.size : end])
            del self._buffer[:end]
            # The peer is our own child on an anonymous pipe, not a network peer.
            messages.append(pickle.loads(body))  # noqa: S301 - see above
        return messages

    def close(self) -> None:
        """Close the descriptor; a second call does nothing."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        self.closed = True

    def _fill(self) -> None:
        while self._fd >= 0:
            try:
                chunk = os.read(self._fd, _CHUNK)
            except BlockingIOError:
                return
            if not chunk:
                self.close()
                return
            self._buffer += chunk
