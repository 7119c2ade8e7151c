"""What a running launch tells another process of its user: both ends of it.

While an attempt runs, its launcher listens on a socket in the run directory, in the wait that it is
in anyway. Who connects and is its user gets one line of JSON. Nothing is written meanwhile, no
process is traced, and a launch that is not asked does nothing for it.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Facts = dict[str, Any]

SOCKET: Final = "status.sock"
WITH_STACKS: Final = b"stacks\n"
WITHOUT: Final = b"status\n"

_CREDENTIALS: Final = struct.Struct("3i")
_QUEUED: Final = 8
_ANSWER_S: Final = 10.0
_SEND_S: Final = 1.0
_MOST_BYTES: Final = 64 << 20


class StatusSocket:
    """The launcher's end.

    Args:
        run_dir: The run directory.
    """

    def __init__(self, run_dir: Path) -> None:
        """Listen, if the file system has sockets; else no launch fails for it."""
        self._path = run_dir / SOCKET
        self._listener: socket.socket | None = None
        self._connected: list[socket.socket] = []  # and has not asked yet
        self._asked_by: list[socket.socket] = []
        self._is_left = False
        with contextlib.suppress(OSError), contextlib.ExitStack() as failing:
            self._path.unlink(missing_ok=True)  # of an attempt before, or of a launcher that died
            # One that does not listen is always readable, so it is closed.
            listener = failing.enter_context(socket.socket(socket.AF_UNIX))
            with _short(self._path) as path:
                listener.bind(path)
            self._path.chmod(0o600)
            listener.listen(_QUEUED)
            listener.settimeout(0)
            failing.pop_all()
            self._listener = listener

    def handles(self) -> list[int]:
        """Return what becomes readable when another process asks."""
        waiting = [each.fileno() for each in self._connected]
        if self._listener is None or self._is_left:
            return waiting
        return [self._listener.fileno(), *waiting]

    @property
    def is_asked(self) -> bool:
        """Whether a process waits for an answer."""
        return bool(self._asked_by)

    def accept(self) -> bool | None:
        """Take the questions of this user that have come; tell whether one asks for stacks."""
        self._connect()
        wants_stacks: bool | None = None
        for connection in list(self._connected):
            try:
                said = connection.recv(len(WITH_STACKS))
            except BlockingIOError:
                continue
            except ConnectionError:
                said = b""
            self._connected.remove(connection)
            if said:
                connection.settimeout(_SEND_S)
                self._asked_by.append(connection)
                wants_stacks = bool(wants_stacks) or said == WITH_STACKS
            else:
                connection.close()
        return wants_stacks

    def _connect(self) -> None:
        """Take the next connection of this user, if there is one."""
        if self._listener is None:
            return
        self._is_left = False
        try:
            connection, _ = self._listener.accept()
        except (BlockingIOError, ConnectionError):
            return
        except OSError:
            # Out of descriptors: it stays readable, so nothing waits for it until the next look.
            self._is_left = True
            return
        connection.settimeout(0)
        # Where this is not known, not on Linux, the run directory's own mode keeps others out.
        option = getattr(socket, "SO_PEERCRED", None)
        uid = os.geteuid()
        if option is not None:
            said = connection.getsockopt(socket.SOL_SOCKET, option, _CREDENTIALS.size)
            _, uid, _ = _CREDENTIALS.unpack(said)
        if uid not in (0, os.geteuid()):
            connection.close()
            return
        self._connected.append(connection)
        if len(self._connected) > _QUEUED:
            self._connected.pop(0).close()

    def answer(self, facts: Facts) -> None:
        """Send the facts to all that have asked; one that does not read them is left."""
        # In ASCII: a path need not be UTF-8, nor what the user names a thread.
        line = json.dumps(facts).encode() + b"\n"
        for connection in self._asked_by:
            with contextlib.suppress(OSError), connection:
                connection.sendall(line)
        self._asked_by.clear()

    def close(self) -> None:
        """Listen no longer; who has asked meanwhile sees the end of its connection."""
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
        ConnectionRefusedError: There is a socket, but its launcher has died.
        OSError: It gave no answer.
    """
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(_ANSWER_S)
        with _short(run_dir / SOCKET) as path:
            connection.connect(path)
        connection.sendall(WITH_STACKS if stacks else WITHOUT)
        data = bytearray()
        while (part := connection.recv(1 << 16)) and len(data) < _MOST_BYTES:
            data += part
    try:
        facts: Facts = json.loads(data)
    except ValueError as exc:
        msg = "the launcher ended before it had answered"
        raise ConnectionResetError(msg) from exc
    return facts


@contextlib.contextmanager
def _short(path: Path) -> Iterator[str]:
    """Name a socket by the descriptor of its folder: a path of a socket has at most 107 bytes."""
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        has_proc = Path("/proc/self/fd").exists()
        yield f"/proc/self/fd/{folder}/{path.name}" if has_proc else str(path)
    finally:
        os.close(folder)


class Rates:
    """How many steps a second each rank makes, from what is looked at anyway."""

    _KEPT: Final = 16

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Know nothing yet."""
        self._clock = clock
        self._seen: list[tuple[float, dict[int, int]]] = []

    def note(self, steps: dict[int, int]) -> None:
        """Take note of how many steps the ranks have made by now."""
        self._seen = [*self._seen[-self._KEPT :], (self._clock(), steps)]

    def of(self, rank: int) -> float:
        """Return the rate over the last looks."""
        if len(self._seen) < 2:  # noqa: PLR2004 - it takes two
            return 0.0
        (first_s, first), (last_s, last) = self._seen[0], self._seen[-1]
        took_s = last_s - first_s
        return (last.get(rank, 0) - first.get(rank, 0)) / took_s if took_s > 0 else 0.0
