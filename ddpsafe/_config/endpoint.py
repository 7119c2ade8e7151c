"""The rendezvous endpoint: parsed and validated without the network."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from ddpsafe._config.problems import Problem, require_none, show
from ddpsafe._host import is_loopback, plain_host, show_endpoint

if TYPE_CHECKING:
    IPAddress = ipaddress.IPv4Address | ipaddress.IPv6Address

DEFAULT_PORT: Final = 29400
"""The default port of torchrun's c10d rendezvous; used only in advice."""

_FIRST_PORT, _LAST_PORT = 1024, 65535
_MAX_HOST_CHARS: Final = 253
_LABEL: Final = re.compile(r"[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?", re.ASCII | re.IGNORECASE)
_NUMERIC: Final = re.compile(
    r"(?:0x[0-9a-f]*|[0-9]+)(?:\.(?:0x[0-9a-f]*|[0-9]+))*\.?", re.ASCII | re.IGNORECASE
)
_EXAMPLE: Final = f'a host that all nodes can reach, and a port: "gpu-01:{DEFAULT_PORT}"'


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """The host and port through which the nodes of a job connect.

    Attributes:
        host: Name or address, IPv6 without brackets.
        port: TCP port; 0 lets the system choose a free one, which only works with a single node.
    """

    host: str
    port: int

    def __str__(self) -> str:
        return show_endpoint(self.host, self.port)

    @property
    def is_loopback(self) -> bool:
        """Whether the host, as written, always means the local machine."""
        return is_loopback(str(find_address(self.host) or self.host))


def find_address(host: str) -> IPAddress | None:
    """Return the IP address that `host` is, or None if it is a name."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address


def parse_endpoint(text: str) -> Endpoint:
    """Read ``host:port`` or ``[IPv6 address]:port``; as in torch, the brackets may be left out.

    Nothing is resolved: the network is not touched.

    Raises:
        ValidationError: With every problem found.
    """
    shape = _shape_problem(text)
    if shape is not None:
        require_none([shape], given=text)
    problems = []
    host, port = split_endpoint(text)
    address = find_address(host)
    host_problem = _name_problem(host) if address is None else _address_problem(host, address)
    if host_problem is not None:
        problems.append(host_problem)
    # A wrong host is not an example, and may hold what no terminal can show.
    good = host if host_problem is None else "gpu-01"
    usable = (
        f'a port from {_FIRST_PORT} to {_LAST_PORT}, e.g. "{show_endpoint(good, DEFAULT_PORT)}"'
    )
    if not re.fullmatch(r"[0-9]{1,5}", port, re.ASCII):
        problems.append(Problem(why=f"the port {show(port)} is not a port number", write=usable))
    elif int(port) != 0 and not _FIRST_PORT <= int(port) <= _LAST_PORT:
        low = "ports below 1024 need root" if int(port) < _FIRST_PORT else "ports end at 65535"
        problems.append(Problem(why=f"port {int(port)} cannot be used: {low}", write=usable))
    require_none(problems, given=text)
    # An IPv6 address as in RFC 5952, so that nodes can compare endpoints as strings; one that stands for an
    # IPv4 address as that.
    return Endpoint(host=host if address is None else str(address), port=int(port))


def parse_ports(text: str) -> str:
    """Read a range of ports, ``first-last``; return it without blanks.

    Raises:
        ValueError: It is none, or has fewer than two ports.
    """
    found = re.fullmatch(r"([0-9]{1,5})-([0-9]{1,5})", text.replace(" ", ""), re.ASCII)
    first, last = map(int, found.groups()) if found else (0, 0)
    if not _FIRST_PORT <= first < last <= _LAST_PORT:
        msg = f"it is not a range of at least two ports from {_FIRST_PORT} to {_LAST_PORT}"
        raise ValueError(msg)
    return f"{first}-{last}"


def complete_endpoint(text: str) -> str:
    """Add the default port to an endpoint that is a host alone; return others unchanged."""
    host, given = split_endpoint(text)
    return text if given or not host else show_endpoint(host, DEFAULT_PORT)


def split_endpoint(text: str) -> tuple[str, str]:
    """Return host and port of an endpoint as written, each empty where it is missing.

    The last colon separates the port, as in torch. But an IPv6 address is a host alone unless what
    stands before that colon is an address and what stands after it can be a port: ``fd77::1`` is a host
    alone, ``fd77::1:29500`` is not.
    """
    if text.endswith("]"):
        return plain_host(text), ""
    host, colon, port = text.rpartition(":")
    if not colon:
        return text, ""
    if "[" not in text and find_address(text) is not None:
        is_port = port.isdecimal() and (int(port) == 0 or int(port) >= _FIRST_PORT)
        if find_address(host) is None or not is_port:
            return text, ""
    return plain_host(host), port


def _shape_problem(text: str) -> Problem | None:
    bare = "".join(text.split())
    if bare != text:
        return Problem(
            why="it contains blanks or line breaks, which torch would take as part of the name",
            write=repr(bare) if bare.isprintable() and bare else _EXAMPLE,
        )
    if "://" in text or "/" in text:
        return Problem(why="it is a URL or a path, not a host with a port", write=_EXAMPLE)
    host, port = split_endpoint(text)
    if "[" in host or "]" in host or ("[" in text and ":" not in host):
        return Problem(
            why="brackets belong around an IPv6 address only",
            write=f'"[2001:db8::1]:{DEFAULT_PORT}"',
        )
    if not host or not port:
        missing = "port" if host or ":" not in text else "host"
        is_address = missing == "port" and find_address(host) is not None
        write = f'"{show_endpoint(host, DEFAULT_PORT)}"' if is_address else _EXAMPLE
        return Problem(why=f"the {missing} is missing", write=write)
    return None


def _name_problem(host: str) -> Problem | None:
    if _NUMERIC.fullmatch(host):
        return Problem(
            why=f"the host {show(host)} consists of numbers but is not an IPv4 address, "
            "and the system would read it as one (6841231 becomes 0.104.99.143)",
            write=f'a host name, or all four numbers without leading zeros: "10.0.0.7:{DEFAULT_PORT}"',
        )
    labels = host.removesuffix(".").split(".")
    if len(host) > _MAX_HOST_CHARS or not all(_LABEL.fullmatch(label) for label in labels):
        return Problem(
            why=f"{show(host)} is neither a host name nor an IP address (names have ASCII "
            "letters, digits, '-' and '.'; no part is empty or longer than 63)",
            write=_EXAMPLE,
        )
    return None


def _address_problem(host: str, address: IPAddress) -> Problem | None:
    if address.is_unspecified or (address.version == 4 and address.packed[0] == 0):  # noqa: PLR2004 - IPv4
        kind = 'means "this host" or "any address", to which no host can connect'
    elif address.is_link_local:
        kind = "is link-local (169.254.0.0/16, fe80::/10): the host gave it to itself because none was assigned, and routers do not forward it"
    elif address.is_multicast or str(address) == "255.255.255.255":
        kind = "addresses many hosts at once, but TCP needs a single one"
    else:
        kind = None
    if kind is not None:
        return Problem(why=f"{host} {kind}", write=_EXAMPLE)
    plain, percent, scope = host.partition("%")
    if not percent:
        return None
    return Problem(
        why=f"%{scope} names an interface of one host, and may be another one on other hosts",
        write=f'the address alone: "{show_endpoint(plain, DEFAULT_PORT)}"',
    )
