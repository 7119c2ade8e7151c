"""The status of a running launch, for other processes of the same user: both ends of the socket.

While an attempt runs, its launcher listens on a socket in the run directory, as part of its one wait
loop. A process of the same user that connects and sends a request gets one line of JSON. Nothing is
written to disk, no process is traced, and a launch without requests does no work for it.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
from typing import TYPE_CHECKING, Any, Final, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    Facts = dict[str, Any]

SOCKET: Final = "status.sock"
WITH_STACKS: Final = b"stacks\n"
WITHOUT_STACKS: Final = b"status\n"

_CREDENTIALS: Final = struct.Struct("3i")  # struct ucred: pid, uid, gid
_MOST_CONNECTIONS: Final = 8
_ANSWER_S: Final = 10.0
_SEND_S: Final = 1.0
_MOST_BYTES: Final = 64 << 20


class StatusRequests(Protocol):
    """Requests for the status, wherever they come from."""

    @property
    def is_asked(self) -> bool:
        """Whether a process waits for an answer."""

    def accept(self) -> bool | None:
        """Read new requests; return whether one asks for stacks, or ``None`` if there are none."""

    def answer(self, facts: Facts) -> None:
        """Send the facts to all that have asked."""


class StatusSocket:
    """The launcher's end; a file system without sockets does not make the launch fail."""

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / SOCKET
        self._listener: socket.socket | None = None
        self._connected: list[socket.socket] = []  # those that have not sent a request yet
        self._asked_by: list[socket.socket] = []
        self._is_listener_skipped = False
        with contextlib.suppress(OSError), contextlib.ExitStack() as failing:
            # An earlier attempt, or a launcher that died, may have left it.
            self._path.unlink(missing_ok=True)
            # On an error close the socket: one that does not listen is always readable.
            listener = failing.enter_context(socket.socket(socket.AF_UNIX))
            with _short(self._path) as path:
                listener.bind(path)
            self._path.chmod(0o600)
            listener.listen(_MOST_CONNECTIONS)
            listener.settimeout(0)
            failing.pop_all()
            self._listener = listener

    def handles(self) -> list[int]:
        """Return the descriptors that become readable when another process connects or asks."""
        waiting = [connection.fileno() for connection in self._connected]
        if self._listener is None or self._is_listener_skipped:
            return waiting
        return [self._listener.fileno(), *waiting]

    @property
    def is_asked(self) -> bool:
        """Whether a process waits for an answer."""
        return bool(self._asked_by)

    def accept(self) -> bool | None:
        """Read new requests; return whether one asks for stacks, or ``None`` if there are none."""
        self._connect()
        wants_stacks: bool | None = None
        for connection in list(self._connected):
            try:
                request = connection.recv(len(WITH_STACKS))
            except BlockingIOError:
                continue
            except ConnectionError:
                request = b""
            self._connected.remove(connection)
            if request:
                connection.settimeout(_SEND_S)
                self._asked_by.append(connection)
                wants_stacks = bool(wants_stacks) or request == WITH_STACKS
            else:
                connection.close()
        return wants_stacks

    def _connect(self) -> None:
        """Accept the next connection of this user, if there is one."""
        if self._listener is None:
            return
        self._is_listener_skipped = False
        try:
            connection, _ = self._listener.accept()
        except (BlockingIOError, ConnectionError):
            return
        except OSError:
            # Out of descriptors: the listener stays readable, and would keep the wait loop spinning.
            self._is_listener_skipped = True
            return
        connection.settimeout(0)
        credentials = connection.getsockopt(
            socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size
        )
        _, uid, _ = _CREDENTIALS.unpack(credentials)
        if uid not in (0, os.geteuid()):
            connection.close()
            return
        self._connected.append(connection)
        if len(self._connected) > _MOST_CONNECTIONS:
            self._connected.pop(0).close()

    def answer(self, facts: Facts) -> None:
        """Send the facts to all that have asked, and close their connections."""
        # As ASCII, json's default: neither a path nor the name of a thread need be valid UTF-8.
        line = json.dumps(facts).encode() + b"\n"
        for connection in self._asked_by:
            with contextlib.suppress(OSError), connection:
                connection.sendall(line)
        self._asked_by.clear()

    def close(self) -> None:
        """Stop listening, and close the connections of those that still wait for an answer."""
        for connection in (*self._connected, *self._asked_by):
            connection.close()
        self._connected.clear()
        self._asked_by.clear()
        if self._listener is not None:
            self._listener.close()
            self._listener = None
            with contextlib.suppress(OSError):
                self._path.unlink(missing_ok=True)


def ask(run_dir: Path, *, stacks: bool = False) -> Facts:
    """Ask the launcher of a run directory.

    Raises:
        FileNotFoundError: No launcher listens there: the launch has ended, or there was none.
        ConnectionRefusedError: The socket exists, but its launcher has died.
        OSError: The launcher did not answer.
    """
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(_ANSWER_S)
        with _short(run_dir / SOCKET) as path:
            connection.connect(path)
        connection.sendall(WITH_STACKS if stacks else WITHOUT_STACKS)
        data = bytearray()
        while (part := connection.recv(1 << 16)) and len(data) < _MOST_BYTES:
            data += part
    try:
        facts: Facts = json.loads(data)
    except ValueError as exc:
        msg = "the launcher ended before it answered"
        raise ConnectionResetError(msg) from exc
    return facts


@contextlib.contextmanager
def _short(path: Path) -> Iterator[str]:
    """Yield a short path of a socket, by a descriptor of its folder: Linux allows 107 bytes."""
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)
