"""What the kernel knows about connections, neighbours and routes to other hosts."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import struct
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from ddpsafe._clock import BoundedCall
from ddpsafe._config.endpoint import find_address
from ddpsafe._host import family_of, look_up

if TYPE_CHECKING:
    from collections.abc import Iterator


def addresses_of(host: str, port: int, *, limit_s: float) -> list[str]:
    """Resolve a host within `limit_s`.

    Raises:
        OSError: It does not resolve.
        TimeoutError: The resolver has not answered in time.
    """
    if find_address(host) is not None:
        return [host]
    call = BoundedCall(lambda: look_up(host, port), name="ddpsafe-resolve")
    if not call.wait(limit_s):
        raise TimeoutError(f"no answer within {limit_s:.1f} s")
    return call.result()


_TCP_INFO_BYTES: Final = 160
_WITH_DUPLICATES_BYTES: Final = 220  # since Linux 4.19
# Offsets in struct tcp_info of include/uapi/linux/tcp.h; fields are only ever appended to it.
_RETRANSMITS, _SND_MSS, _UNACKED, _PMTU, _NOT_SENT, _MIN_RTT = 2, 16, 24, 60, 144, 148
_TOTAL_RETRANS, _BYTES_ACKED, _DATA_SEGS_OUT, _DELIVERY_RATE, _DSACK_DUPS = 100, 120, 156, 160, 216
_NO_RTT: Final = 0xFFFFFFFF


@dataclass(frozen=True, slots=True, kw_only=True)
class TcpState:
    """One connection, as the kernel sees it.

    Attributes:
        retransmits: Consecutive retransmissions of the same unacknowledged data.
        unacknowledged: Whether data is in flight or waits to be sent.
        segment_bytes: The most data it puts into one packet.
        path_mtu_bytes: Its estimate of the path's MTU.
        round_trip_s: The shortest round trip seen; None if unknown.
        packets: Packets with data that it has sent, without retransmissions.
        resent: Lost packets: retransmissions, except those that the other side reported as
            duplicates.
        acknowledged_bytes: Data that has arrived.
        rate_bytes_per_s: The delivery rate, from the acknowledgements; None if unknown.
    """

    retransmits: int
    unacknowledged: bool
    segment_bytes: int
    path_mtu_bytes: int
    round_trip_s: float | None
    packets: int
    resent: int
    acknowledged_bytes: int
    rate_bytes_per_s: int | None


def find_tcp_state(connection: socket.socket) -> TcpState | None:
    """Return the state of a connection, or None if the system does not report it."""
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

    # A busy host acknowledges late, and the kernel then resends what did arrive: the other side
    # reports such packets as duplicates. A kernel that does not count them reports no loss here.
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
        acknowledged_bytes=int(struct.unpack_from("=Q", raw, _BYTES_ACKED)[0]),
        rate_bytes_per_s=struct.unpack_from("=Q", raw, _DELIVERY_RATE)[0] or None
        if len(raw) >= _DELIVERY_RATE + 8
        else None,
    )


# include/uapi/linux/netlink.h, rtnetlink.h and neighbour.h
_ERROR, _DONE, _NEW_ROUTE, _GET_ROUTE, _NEW_NEIGHBOUR, _GET_NEIGHBOUR = 2, 3, 24, 26, 28, 30
_REQUEST, _DUMP = 1, 0x300
_LOOKUP_TABLE, _FIB_MATCH = 0x1000, 0x2000
_DST, _SRC, _OIF, _TABLE = 1, 2, 4, 15
_NEIGHBOUR_DST: Final = 1
_INCOMPLETE, _FAILED = 0x01, 0x20
MAIN_TABLE: Final = 254
_NLMSG, _RTMSG, _RTATTR = struct.Struct("=IHHII"), struct.Struct("=BBBBBBBBI"), struct.Struct("=HH")
_NDMSG: Final = struct.Struct("=BBHiHBB")
_IPV4_ROUTES: Final = Path("/proc/net/route")


def is_silent_neighbour(address: str) -> bool:
    """Return whether an address in a network of this host does not even answer ARP or NDP."""
    family = family_of(address)
    wanted = socket.inet_pton(family, address)
    request = _NDMSG.pack(family, 0, 0, 0, 0, 0, 0)
    for kind, body in _query_kernel(_GET_NEIGHBOUR, request, flags=_DUMP):
        if kind == _NEW_NEIGHBOUR:
            state = _NDMSG.unpack_from(body)[4]
            if _attributes(body[_NDMSG.size :]).get(_NEIGHBOUR_DST) == wanted:
                # A firewall does not cause that: the host is off, unplugged, or in another network.
                return bool(state & (_INCOMPLETE | _FAILED))
    return False


class FoundRoute(NamedTuple):
    """What the kernel does with packets to an address.

    Attributes:
        interface: Where they leave; empty if a route or rule rejects them.
        prefix: The destination of the route; empty if the kernel does not report it.
    """

    interface: str
    prefix: str
    table: int = MAIN_TABLE


def find_route(address: str, source: str = "") -> FoundRoute | None:
    """Return what the kernel does with packets to an address, like `ip route get fibmatch`.

    The source address is given because routing rules may depend on it. Returns None if the system does not
    report the route.
    """
    family = family_of(address)
    ends = [(_DST, address)] + ([(_SRC, source)] if (":" in source) is (":" in address) else [])
    packed = [(kind, socket.inet_pton(family, end)) for kind, end in ends if end]
    attributes = b"".join(_RTATTR.pack(_RTATTR.size + len(raw), kind) + raw for kind, raw in packed)
    # Without FIB_MATCH the reply has this one address as its prefix, not that of the route; without
    # LOOKUP_TABLE it names the main table for every route.
    bits = [len(raw) * 8 for _, raw in packed]
    of_source, flags = bits[1] if len(bits) > 1 else 0, _LOOKUP_TABLE | _FIB_MATCH
    route = _RTMSG.pack(family, bits[0], of_source, 0, 0, 0, 0, 0, flags)
    for kind, body in _query_kernel(_GET_ROUTE, route + attributes):
        # For a route that rejects packets (blackhole, prohibit) the reply is an error, not the route.
        if kind == _ERROR:
            return FoundRoute("", _find_rejecting_network(address))
        if kind == _NEW_ROUTE:
            length, table = _RTMSG.unpack_from(body)[1], _RTMSG.unpack_from(body)[4]
            values = _attributes(body[_RTMSG.size :])
            start = values.get(_DST, bytes(len(packed[0][1])))
            index = int.from_bytes(values.get(_OIF, b""), sys.byteorder)
            prefix = str(ipaddress.ip_network((start, length), strict=False))
            # The header has 8 bits for the number of the table; the attribute has all of it.
            table = int.from_bytes(values.get(_TABLE, bytes([table])), sys.byteorder)
            try:
                return FoundRoute(socket.if_indextoname(index), prefix, table)
            except OSError:
                return FoundRoute("", prefix, table)
    return None


def _find_rejecting_network(address: str) -> str:
    """Return the smallest network around an address that a route of the main table rejects."""
    rejected = []
    try:
        lines = _IPV4_ROUTES.read_text().splitlines()[1:]
    except OSError:
        return ""
    for line in lines:
        interface, start, _, _, _, _, _, mask, *_ = line.split()
        if interface == "*":  # blackhole, unreachable, prohibit
            raw = bytes.fromhex(start)[:: -1 if sys.byteorder == "little" else 1]
            rejected.append(ipaddress.IPv4Network((raw, int(mask, 16).bit_count())))
    fitting = [network for network in rejected if ipaddress.ip_address(address) in network]
    return str(max(fitting, key=lambda network: network.prefixlen)) if fitting else ""


def _query_kernel(kind: int, body: bytes, *, flags: int = 0) -> Iterator[tuple[int, bytes]]:
    """Yield the replies to one netlink request about routes or neighbours; none on any error."""
    request = _NLMSG.pack(_NLMSG.size + len(body), kind, _REQUEST | flags, 1, 0) + body
    with (
        contextlib.suppress(OSError, AttributeError, struct.error),
        socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0) as kernel,  # 0: NETLINK_ROUTE
    ):
        kernel.settimeout(1)
        kernel.send(request)
        while True:
            answer = kernel.recv(1 << 16)
            while len(answer) >= _NLMSG.size:
                length, reply_kind, _, _, _ = _NLMSG.unpack_from(answer)
                if reply_kind == _DONE or length < _NLMSG.size:
                    return
                yield reply_kind, answer[_NLMSG.size : length]
                answer = answer[(length + 3) & ~3 :]  # messages start at multiples of 4
            if not flags & _DUMP:
                return


def _attributes(raw: bytes) -> dict[int, bytes]:
    values = {}
    while len(raw) >= _RTATTR.size:
        length, kind = _RTATTR.unpack_from(raw)
        if length < _RTATTR.size:
            break
        values[kind] = raw[_RTATTR.size : length]
        raw = raw[(length + 3) & ~3 :]  # attributes, too
    return values
