"""The one-way pipe from a rank to its launcher, which can never block the launcher, and shared memory."""

from __future__ import annotations

import errno
import mmap
import os
import pickle
import struct
import tempfile
import threading
import time
from dataclasses import dataclass, field
from multiprocessing import reduction
from typing import IO, TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from ddpsafe._wire.messages import Message


_NUMBERS: Final = struct.Struct("<QQqQQQQ")
_WAITS: Final = struct.Struct("<Q")
_RESUMED: Final = struct.Struct("<Q?")  # a step, plus 1
_RESUMED_AT: Final = _NUMBERS.size + _WAITS.size
_NO_CHECKPOINT: Final = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """The steps and checkpoints of a rank in one attempt.

    Attributes:
        checkpoint: Step number of the last checkpoint restored or saved; ``None`` if there is none.
        steps_at_checkpoint: What `steps` was at that checkpoint.
        last_ns: When it made its last step (monotonic); 0 before the first.
        longest_ns: The longest time between two steps so far.
        saving: Whether it has begun to save with a `Checkpointer`, and has made no step since.
        waits_ns: Since when its main thread is in a wait of ddpsafe for other ranks, on its own host's
            clock (monotonic), which makes it different for each wait; 0 outside of one.
        resumed_from: What it has restored, such as ``step 5 in memory``; empty for nothing.
    """

    steps: int = 0
    saves: int = 0
    checkpoint: int | None = None
    steps_at_checkpoint: int = 0
    last_ns: int = 0
    longest_ns: int = 0
    saving: bool = False
    waits_ns: int = field(default=0, compare=False)  # no progress of its own
    resumed_from: str = ""

    @property
    def longest_s(self) -> float:
        """The longest time between two steps so far, in seconds."""
        return self.longest_ns / 1e9

    @property
    def steps_since_checkpoint(self) -> int:
        """Optimizer steps since the last checkpoint."""
        return self.steps - self.steps_at_checkpoint


class StepCounter:
    """The progress of one rank, in memory that both processes map.

    Args:
        fd: The rank's shared memory, which begins with `EMPTY`; its owner closes it.
    """

    EMPTY: Final = _NUMBERS.pack(0, 0, _NO_CHECKPOINT, 0, 0, 0, 0) + bytes(
        _WAITS.size + _RESUMED.size
    )
    """The bytes that a new file must begin with."""

    def __init__(self, fd: int) -> None:
        self._memory = mmap.mmap(fd, len(self.EMPTY))

    def count(self) -> None:
        """Count one optimizer step; this takes a fraction of a microsecond."""
        steps, saves, checkpoint, at_checkpoint, last_ns, longest_ns, _ = _NUMBERS.unpack_from(
            self._memory
        )
        now_ns = time.monotonic_ns()
        if last_ns and now_ns - last_ns > longest_ns:
            longest_ns = now_ns - last_ns
        _NUMBERS.pack_into(
            self._memory, 0, steps + 1, saves, checkpoint, at_checkpoint, now_ns, longest_ns, 0
        )

    def note_saving(self) -> None:
        """Note that the rank has begun to save a checkpoint."""
        *numbers, _ = _NUMBERS.unpack_from(self._memory)
        _NUMBERS.pack_into(self._memory, 0, *numbers, 1)

    def note_checkpoint(self, step: int, *, is_new: bool, in_memory: bool = False) -> None:
        """Note that the rank continues from a checkpoint that it has restored, or saved if `is_new`."""
        if not is_new:
            _RESUMED.pack_into(self._memory, _RESUMED_AT, step + 1, in_memory)
        steps, saves, _, _, *times, _ = _NUMBERS.unpack_from(self._memory)
        _NUMBERS.pack_into(self._memory, 0, steps, saves + is_new, step, steps, *times, 0)

    def note_waiting(self, since_ns: int) -> None:
        """Note since when the main thread waits for other ranks in the store; 0 once that has ended."""
        _WAITS.pack_into(self._memory, _NUMBERS.size, since_ns)

    def read(self) -> Progress:
        """Return the rank's progress."""
        numbers = _NUMBERS.unpack_from(self._memory)
        steps, saves, checkpoint, steps_at_checkpoint, last_ns, longest_ns, saving = numbers
        resumed, in_memory = _RESUMED.unpack_from(self._memory, _RESUMED_AT)
        resumed_from = f"step {resumed - 1} {'in memory' if in_memory else 'on disk'}"
        return Progress(
            steps=steps,
            saves=saves,
            checkpoint=None if checkpoint == _NO_CHECKPOINT else checkpoint,
            steps_at_checkpoint=steps_at_checkpoint,
            last_ns=last_ns,
            longest_ns=longest_ns,
            saving=bool(saving),
            waits_ns=_WAITS.unpack_from(self._memory, _NUMBERS.size)[0],
            resumed_from=resumed_from if resumed else "",
        )

    def close(self) -> None:
        """Unmap the memory."""
        self._memory.close()


RESULT_OFFSET: Final = mmap.ALLOCATIONGRANULARITY
"""Where the result begins in a rank's shared memory: the first offset that can be mapped by itself."""


def open_memory() -> IO[bytes]:
    """Open memory that processes can inherit and map, as a file without a name."""
    # Writing 1 GB to a temporary file takes four times as long, and longer on a slow disk.
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
LOGS_FULL: Final = b"~"
ALL_STARTED: Final = b"+"
"""Requests of the launcher to a rank, on the lifeline."""

CALL_NUMBER: Final = struct.Struct("<Q")
"""Follows `STOP_AT`: the call of `stop_requested` from which on the answer is True."""


class Claim:
    """Checks that a descriptor number still refers to the same pipe or file.

    A script may close all descriptors and open a file that gets the same number. Writing to it would then
    write into the script's own file.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._identity = _identity_of(fd)

    def holds(self) -> bool:
        """Return whether the number still refers to the same pipe or file."""
        try:
            return _identity_of(self._fd) == self._identity
        except OSError:
            return False


def _identity_of(fd: int) -> tuple[int, int]:
    status = os.fstat(fd)
    return status.st_dev, status.st_ino


class InheritedFd:
    """A file descriptor that a process being started inherits; its owner closes it."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __reduce__(self) -> tuple[object, ...]:
        """Pass a duplicate; works only while a process is being started."""
        return (_adopt, (reduction.DupFd(self.fd),))


def _adopt(duplicate: Any) -> InheritedFd:
    fd = duplicate.detach()
    # It arrives inheritable. A program that the rank starts or becomes must not keep it open, or the
    # launcher would not see the end of the rank's reports.
    os.set_inheritable(fd, False)  # noqa: FBT003 - its signature
    return InheritedFd(fd)


@dataclass(frozen=True, slots=True, kw_only=True)
class Inheritance:
    """What a rank inherits besides its `RankSpec`.

    Attributes:
        report: The pipe on which it sends messages to the launcher.
        lifeline: The pipe that ends with the launcher; it carries requests such as `ASK_POSITION`.
        shared: Memory that the launcher maps too: the rank's `StepCounter`, and from `RESULT_OFFSET` on
            its result, if that is large.
        handles: Objects that the pickled call refers to and that must be inherited.
    """

    report: InheritedFd
    lifeline: InheritedFd
    call: InheritedFd
    shared: InheritedFd
    handles: tuple[object, ...]


class Sender:
    """The rank's end of the pipe. Threads may share it; a fork of the rank sends nothing.

    Attributes:
        is_lost: Whether a message could not be sent because the script has closed the pipe.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._claim = Claim(fd)
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._is_cut = False
        self.is_lost = False

    def is_rank_process(self) -> bool:
        """Return whether this process is the rank and not a fork of it."""
        return os.getpid() == self._pid

    def send(self, message: Message) -> None:
        """Write one message; this does not raise if the launcher has exited."""
        # A fork inherits the pipe and all code that sends on it, but what happens to a helper
        # process must not be taken for what happened to the rank. Before the lock, which another
        # thread may have held at the fork.
        if not self.is_rank_process():
            return
        body = pickle.dumps(message)
        with self._lock:
            self.is_lost = self.is_lost or not self._claim.holds()
            if self._is_cut or self.is_lost:
                return
            # The user's signal handler may raise in the middle of the write. Nothing may follow a message
            # that was cut short: it would be read as the missing part.
            self._is_cut = True
            try:
                self._write(_HEADER.pack(len(body)) + body)
            except OSError as exc:
                self.is_lost = exc.errno == errno.EBADF  # closed since the check above
                # If the launcher has exited, the lifeline ends the rank. Any other error is a
                # signal handler's, such as TimeoutError.
                if exc.errno not in (errno.EPIPE, errno.EBADF):
                    raise
            else:
                self._is_cut = False

    def _write(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[os.write(self._fd, view) :]


class Receiver:
    """The launcher's end of the pipe; `fileno` makes it usable in `multiprocessing.connection.wait`."""

    def __init__(self, fd: int) -> None:
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
            The complete messages; the rest is kept for the next call.
        """
        self._fill()
        messages: list[Message] = []
        while len(self._buffer) >= _HEADER.size:
            (size,) = _HEADER.unpack_from(self._buffer)
            end = _HEADER.size + size
            # `multiprocessing.Connection.recv` would wait for the rest: a rank that is stopped in
            # the middle of a large result would stop its launcher too.
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
