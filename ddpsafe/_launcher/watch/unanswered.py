"""Connections of the ranks to which the other host has stopped replying, as the kernel sees them.

A rank that waits in a collective over a broken network looks like one that waits for a slow rank, until
a timeout or the kernel ends the wait, many minutes later. But the kernel sends the same packet again
and again meanwhile, and shows that for each connection. A process that is stopped or does not read is no
reason: its kernel still replies.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ddpsafe._host import is_loopback
from ddpsafe._wire.messages import Unanswered

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

_TABLES: Final = ("/proc/self/net/tcp", "/proc/self/net/tcp6")
_ESTABLISHED: Final = "01"
_RESENDS: Final = "01"
"""Of the timers of a connection: not that of a peer that reads too slowly."""

_RETRIES: Final = 5
"""The kernel sends a packet again after 0.2, 0.6, 1.4, 3.0 and 6.2 s. Where one packet of ten is lost, so
many in a row are lost once in 100,000 times."""


def read_unanswered(pids: Iterable[int]) -> dict[int, tuple[Unanswered, ...]]:
    """Return the connections of some processes that have got no reply for 6 s or longer, by process.

    Nothing where the system does not show that, or shows it to the owner of the process only.
    """
    suspects: dict[str, Unanswered] = {}
    for table in _TABLES:
        with contextlib.suppress(OSError, ValueError):
            suspects |= find_unanswered(Path(table).read_text(encoding="ascii"))
    unanswered: dict[int, tuple[Unanswered, ...]] = {}
    for pid in pids if suspects else ():
        files = f"/proc/{pid}/fd"
        with contextlib.suppress(OSError):
            for fd in os.listdir(files):  # noqa: PTH208 - names only
                with contextlib.suppress(OSError):  # it was closed a moment ago
                    if connection := suspects.get(os.readlink(f"{files}/{fd}")):  # noqa: PTH115
                        unanswered[pid] = (*unanswered.get(pid, ()), connection)
    return unanswered


def find_unanswered(table: str) -> Mapping[str, Unanswered]:
    """Return the connections without a reply in a table of the kernel, by their names as open files."""
    connections = {}
    for line in table.splitlines()[1:]:
        if (
            f" {_RESENDS}:" not in line
        ):  # most lines of a large job, and splitting them takes longer
            continue
        _, own, peer, state, _, timer, retries, _, _, inode, *_ = line.split()
        if state != _ESTABLISHED or timer[:2] != _RESENDS or int(retries, 16) < _RETRIES:
            continue
        connection = Unanswered(_address_of(own), _address_of(peer))
        if not is_loopback(connection.peer):
            connections[f"socket:[{inode}]"] = connection
    return connections


def _address_of(field: str) -> str:
    """Return the address of an entry: words of the machine's byte order, in hexadecimal, and the port."""
    digits = field.partition(":")[0]
    words = [int(digits[start : start + 8], 16) for start in range(0, len(digits), 8)]
    address = ipaddress.ip_address(struct.pack(f"={len(words)}I", *words))
    mapped = getattr(address, "ipv4_mapped", None)
    return str(mapped or address)
