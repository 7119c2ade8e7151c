"""One-way pipe from a rank to its launcher, which can never block the launcher.

`multiprocessing.Connection.recv` waits for the whole message, so a rank that is stopped in the
middle of a large result would stop its launcher too. Here the launcher reads what is there.
"""

from __future__ import annotations

import errno
import os
import pickle
import struct
import threading
from dataclasses import dataclass
from multiprocessing import reduction
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from ddpsafe._wire.outcome import Message

_HEADER: Final = struct.Struct("<Q")
_CHUNK: Final = 1 << 20
# The launcher has gone, or the script has closed all descriptors.
_GONE: Final = (errno.EPIPE, errno.EBADF)

ASK_POSITION: Final = b"?"
ASK_STACKS: Final = b"#"
ASK_STOP: Final = b"!"
STOP_AT: Final = b"="
END_NOW: Final = b"."
"""What the launcher may say to a rank, on the pipe that otherwise only ends with it."""

CALL_NUMBER: Final = struct.Struct("<Q")
"""Follows `STOP_AT`: the call of `stop_requested` from which on the answer is yes."""


class InheritedFd:
    """A file descriptor on its way into a process that is being started."""

    def __init__(self, fd: int) -> None:
        """Name the descriptor; its owner closes it."""
        self.fd = fd

    def __reduce__(self) -> tuple[object, ...]:
        """Hand a duplicate to the process being started; works only then."""
        return (_adopt, (reduction.DupFd(self.fd),))


def _adopt(duplicate: Any) -> InheritedFd:
    return InheritedFd(duplicate.detach())


@dataclass(frozen=True, slots=True, kw_only=True)
class Inheritance:
    """What a rank inherits beside its `RankSpec`.

    Attributes:
        report: Where it writes to the launcher.
        lifeline: Ends with the launcher; carries words such as `ASK_POSITION`.
        call: A file with the pickled call.
        steps: A file that holds the rank's `StepCounter`.
        handles: What the call needs beside its bytes.
    """

    report: InheritedFd
    lifeline: InheritedFd
    call: InheritedFd
    steps: InheritedFd
    handles: tuple[object, ...]


class Sender:
    """The rank's end. Threads may share it."""

    def __init__(self, fd: int) -> None:
        """Own the descriptor."""
        self._fd = fd
        self._lock = threading.Lock()
        self._is_cut = False

    def send(self, message: Message) -> None:
        """Write one message.

        A launcher that is gone is no error here: the lifeline ends the rank. Nothing can follow a
        message that was cut short: it would be taken for the missing part.
        """
        body = pickle.dumps(message)
        with self._lock:
            if self._is_cut:
                return
            self._is_cut = True  # a signal handler of the user's may raise in the middle of it
            try:
                self._write(_HEADER.pack(len(body)) + body)
            except OSError as exc:
                if exc.errno not in _GONE:  # a handler's own, such as TimeoutError
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
        while (body := self._next_body()) is not None:
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

    def _next_body(self) -> bytes | None:
        if len(self._buffer) < _HEADER.size:
            return None
        (size,) = _HEADER.unpack_from(self._buffer)
        end = _HEADER.size + size
        if len(self._buffer) < end:
            return None
        body = bytes(memoryview(self._buffer)[_HEADER.size : end])
        del self._buffer[:end]
        return body
