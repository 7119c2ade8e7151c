"""Channels between launchers, and a way between two of them that can be cut."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from datetime import timedelta
from typing import Any, Final

from ddpsafe._clock import Deadline
from ddpsafe._job.channel import Channel, Hello
from ddpsafe._launcher.nodes.node_messages import CODEC

HERE: Final = "127.0.0.1"
HELLO: Final = Hello(mono_ns=1, wall_ns=1)
COMMON: Final[dict[str, Any]] = {
    "secret": b"secret",
    "scope": "round",
    "codec": CODEC,
    "node_loss": timedelta(minutes=2),
}


def listen(**fields: Any) -> Channel:
    """Open node 0's end, by default of three nodes."""
    return Channel.listen(HERE, **{**COMMON, "nnodes": 3, **fields})


def dial(port: int, **fields: Any) -> Channel:
    """Connect to a port as a node, by default as node 1."""
    own = {"node": 1, "hello": lambda: HELLO, "deadline": Deadline.after(timedelta(seconds=10))}
    return Channel.dial((HERE, port), **{**COMMON, **own, **fields})


class Wire:
    """A way between two launchers that can be cut, and closes the next `drops` connections at once."""

    def __init__(self, port: int, *, drops: float = 0) -> None:
        self.leads_to = port
        self._listening = socket.create_server((HERE, 0))
        self._ends: dict[socket.socket, None] = {}
        self.drops = drops
        self._threads = [threading.Thread(target=self._serve)]
        self._threads[0].start()

    @property
    def port(self) -> int:
        """Where to dial."""
        return int(self._listening.getsockname()[1])

    def cut(self) -> None:
        """Reset all connections; what is on its way is lost, a half of a message too."""
        for end in [*self._ends]:
            with contextlib.suppress(KeyError):  # a thread resets it just now
                self._reset(end)

    def close(self) -> None:
        """End for good."""
        self._listening.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._threads[0].join()
        self._listening.close()
        self.cut()
        for thread in self._threads:
            thread.join()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listening.accept()
                if self.drops:
                    self.drops -= 1
                    near.close()
                    continue
                far = socket.create_connection((HERE, self.leads_to))
                self._ends |= {near: None, far: None}
                for one, other in ((near, far), (far, near)):
                    self._threads.append(threading.Thread(target=self._pass_on, args=(one, other)))
                    self._threads[-1].start()

    def _reset(self, end: socket.socket) -> None:
        self._ends.pop(end)
        with contextlib.suppress(OSError):  # the other side has ended
            end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            end.shutdown(socket.SHUT_RD)  # wakes the thread that reads it
        end.close()

    def _pass_on(self, one: socket.socket, other: socket.socket) -> None:
        try:
            while data := one.recv(37):  # so that messages are cut in pieces
                other.sendall(data)
            if one in self._ends:  # it has ended, and was not cut
                other.shutdown(socket.SHUT_WR)
        except OSError:  # one of them was reset, so the other one is
            with contextlib.suppress(KeyError):  # both were: the wire was cut
                self._reset(other)
