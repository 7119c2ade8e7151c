"""Where the ranks of one attempt meet: a store in this process, on a socket nobody can take."""

from __future__ import annotations

import contextlib
import socket
from typing import TYPE_CHECKING

from ddpsafe._launcher.plan import LOOPBACK

if TYPE_CHECKING:
    from collections.abc import Iterator
    from datetime import timedelta

    from torch.distributed import TCPStore


class Meeting:
    """The store of one attempt and the ports around it.

    Attributes:
        host: Address the store listens on.
        port: Its port.
        master_port: A reserved port for code that opens MASTER_PORT itself.
        store: The store; it outlives every rank.
    """

    def __init__(self, store: TCPStore, *, port: int, master_port: int) -> None:
        """Keep what the ranks need to know."""
        self.host = LOOPBACK
        self.port = port
        self.master_port = master_port
        self.store = store


@contextlib.contextmanager
def open_meeting(*, timeout: timedelta) -> Iterator[Meeting]:
    """Listen on loopback and serve a fresh store there, until the attempt is over.

    The bound socket goes into the store, so no port is ever chosen and released; left to itself
    the store would listen on every interface (measured with torch 2.13).
    """
    import torch.distributed as dist

    listener = socket.create_server((LOOPBACK, 0), backlog=1024)
    port = listener.getsockname()[1]
    with _reserved_port() as master_port:
        store = dist.TCPStore(
            LOOPBACK,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=timeout,
            master_listen_fd=listener.detach(),
        )
        meeting = Meeting(store, port=port, master_port=master_port)
        del store
        try:
            yield meeting
        finally:
            # The traceback of an error keeps these frames, and would keep the socket listening.
            del meeting.store


@contextlib.contextmanager
def _reserved_port() -> Iterator[int]:
    """Hold a port that only a program that names it can take.

    The kernel gives a bound port to nobody who asks for any; as it does not listen, and both sides
    set SO_REUSEADDR (torch's store does), a rank can still bind it.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind((LOOPBACK, 0))
        yield holder.getsockname()[1]
