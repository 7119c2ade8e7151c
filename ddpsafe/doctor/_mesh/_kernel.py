"""What the kernel knows about a connection and about the neighbours on the wire."""

from __future__ import annotations

import socket
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_ARP: Final = Path("/proc/net/arp")
_COMPLETE: Final = 0x2
_TCP_INFO_BYTES: Final = 152
# Offsets in struct tcp_info of include/uapi/linux/tcp.h; fields are only ever appended to it.
_RETRANSMITS, _SND_MSS, _UNACKED, _PMTU, _NOT_SENT, _MIN_RTT = 2, 16, 24, 60, 144, 148
_NO_RTT: Final = 0xFFFFFFFF


@dataclass(frozen=True, slots=True, kw_only=True)
class TcpState:
    """One connection, as the kernel sees it.

    Attributes:
        retransmits: How often in a row it has sent the same data without an acknowledgement.
        unacknowledged: Whether something is on its way, or waits to be.
        segment_bytes: The most it puts into one packet.
        path_mtu_bytes: What it takes the path's MTU for.
        round_trip_s: The shortest round trip seen; None where it is not known.
    """

    retransmits: int
    unacknowledged: bool
    segment_bytes: int
    path_mtu_bytes: int
    round_trip_s: float | None


def find_tcp_state(connection: socket.socket) -> TcpState | None:
    """Return the state of a connection; None where the system does not tell."""
    option = getattr(socket, "TCP_INFO", None)
    if option is None:
        return None
    try:
        raw = connection.getsockopt(socket.IPPROTO_TCP, option, _TCP_INFO_BYTES)
    except OSError:
        return None
    if len(raw) < _TCP_INFO_BYTES:  # older than Linux 4.9
        return None

    def number_at(offset: int) -> int:
        return int(struct.unpack_from("=I", raw, offset)[0])

    round_trip_us = number_at(_MIN_RTT)
    return TcpState(
        retransmits=raw[_RETRANSMITS],
        unacknowledged=number_at(_UNACKED) + number_at(_NOT_SENT) > 0,
        segment_bytes=number_at(_SND_MSS),
        path_mtu_bytes=number_at(_PMTU),
        round_trip_s=None if round_trip_us == _NO_RTT else round_trip_us / 1e6,
    )


def is_silent_neighbour(address: str) -> bool:
    """Tell whether an address of this host's own network does not even answer to ARP.

    No firewall does that: the host is off, its cable is out, or it is in another network.
    """
    try:
        lines = _ARP.read_text().splitlines()[1:]
    except OSError:
        return False
    for line in lines:
        fields = line.split()
        if len(fields) > 2 and fields[0] == address:  # noqa: PLR2004 - address, type, flags
            return not int(fields[2], 16) & _COMPLETE
    return False
