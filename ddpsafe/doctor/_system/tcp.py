"""What the kernel knows about connections, neighbours and addresses of other hosts."""

from __future__ import annotations

import ipaddress
import socket
import struct
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ddpsafe._clock import BoundedCall
from ddpsafe._config.endpoint import find_address, resolve_host


def addresses_of(host: str, port: int, *, limit_s: float) -> list[str]:
    """Resolve a host, waiting no longer than `limit_s`.

    Raises:
        OSError: When it does not resolve.
        TimeoutError: When the resolver has not answered by then.
    """
    if find_address(host) is not None:
        return [host]
    call = BoundedCall(lambda: resolve_host(host, port), name="ddpsafe-resolve")
    if not call.wait(limit_s):
        msg = f"no answer within {limit_s:.1f} s"
        raise TimeoutError(msg)
    return call.result()


_ARP: Final = Path("/proc/net/arp")
_COMPLETE: Final = 0x2
_TCP_INFO_BYTES: Final = 160
_WITH_DUPLICATES_BYTES: Final = 220  # since Linux 4.19
# Offsets in struct tcp_info of include/uapi/linux/tcp.h; fields are only ever appended to it.
_RETRANSMITS, _SND_MSS, _UNACKED, _PMTU, _NOT_SENT, _MIN_RTT = 2, 16, 24, 60, 144, 148
_TOTAL_RETRANS, _DATA_SEGS_OUT, _DSACK_DUPS = 100, 156, 216
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
        packets: Packets with data that it has sent, each counted once.
        resent: Packets that were lost: sent again, without those that the other side reports to have
            had already. A busy host answers late, and the kernel then sends again what did arrive.
    """

    retransmits: int
    unacknowledged: bool
    segment_bytes: int
    path_mtu_bytes: int
    round_trip_s: float | None
    packets: int
    resent: int


def find_tcp_state(connection: socket.socket) -> TcpState | None:
    """Return the state of a connection; None where the system does not tell."""
    option = getattr(socket, "TCP_INFO", None)
    if option is None:
        return None
    try:
        raw = connection.getsockopt(socket.IPPROTO_TCP, option, _WITH_DUPLICATES_BYTES)
    except OSError:
        return None
    if len(raw) < _TCP_INFO_BYTES:  # older than Linux 4.10
        return None

    def number_at(offset: int) -> int:
        return int(struct.unpack_from("=I", raw, offset)[0])

    resent = number_at(_TOTAL_RETRANS)
    knows_duplicates = len(raw) >= _WITH_DUPLICATES_BYTES
    lost = max(0, resent - number_at(_DSACK_DUPS)) if knows_duplicates else 0
    round_trip_us = number_at(_MIN_RTT)
    return TcpState(
        retransmits=raw[_RETRANSMITS],
        unacknowledged=number_at(_UNACKED) + number_at(_NOT_SENT) > 0,
        segment_bytes=number_at(_SND_MSS),
        path_mtu_bytes=number_at(_PMTU),
        round_trip_s=None if round_trip_us == _NO_RTT else round_trip_us / 1e6,
        packets=max(0, number_at(_DATA_SEGS_OUT) - resent),
        resent=lost,
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


# include/uapi/linux/netlink.h and rtnetlink.h
_GET_ROUTE, _NEW_ROUTE, _REQUEST = 26, 24, 1
_FIB_MATCH: Final = 0x2000
_DST, _OIF = 1, 4
_NLMSG, _RTMSG, _RTATTR = struct.Struct("=IHHII"), struct.Struct("=BBBBBBBBI"), struct.Struct("=HH")


def find_route(address: str) -> tuple[str, str] | None:
    """Return the interface by which packets to an address leave, and what the route is for.

    The kernel is asked as `ip route get fibmatch` does.

    Returns:
        Name of the interface and network in figures; None where the system does not tell.
    """
    version = 6 if ":" in address else 4
    family = socket.AF_INET6 if version == 6 else socket.AF_INET  # noqa: PLR2004 - IPv6
    packed = socket.inet_pton(family, address)
    attribute = _RTATTR.pack(_RTATTR.size + len(packed), _DST) + packed
    route = _RTMSG.pack(family, len(packed) * 8, 0, 0, 0, 0, 0, 0, _FIB_MATCH)
    length = _NLMSG.size + len(route) + len(attribute)
    request = _NLMSG.pack(length, _GET_ROUTE, _REQUEST, 1, 0) + route + attribute
    try:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0) as kernel:  # 0: NETLINK_ROUTE
            kernel.settimeout(1)
            kernel.send(request)
            return _read_route(kernel.recv(8192), version)
    except (OSError, AttributeError, struct.error):  # no such route, or no such system
        return None


def _read_route(answer: bytes, version: int) -> tuple[str, str] | None:
    _, kind, _, _, _ = _NLMSG.unpack_from(answer)
    if kind != _NEW_ROUTE:
        return None
    bits = _RTMSG.unpack_from(answer, _NLMSG.size)[1]
    place = _NLMSG.size + _RTMSG.size
    interface, start = "", bytes(4 if version == 4 else 16)  # noqa: PLR2004 - IPv4
    while place + _RTATTR.size <= len(answer):
        length, attribute = _RTATTR.unpack_from(answer, place)
        value = answer[place + _RTATTR.size : place + length]
        if attribute == _OIF:
            interface = socket.if_indextoname(int.from_bytes(value[:4], sys.byteorder))
        elif attribute == _DST:
            start = value
        if length < _RTATTR.size:
            break
        place += (length + 3) & ~3
    network = ipaddress.ip_network((start, bits), strict=False)
    return (interface, str(network)) if interface else None
