"""What one node tells about itself, as it travels and as it is read."""

from __future__ import annotations

import os
import secrets
import socket
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ddpsafe.doctor._mesh._announce import Announced

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ddpsafe.doctor._mesh._board import Json

_PORTS: Final = Path("/proc/sys/net/ipv4/ip_local_port_range")
_USUAL_PORTS: Final = (32768, 60999)


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One node of the examination.

    Attributes:
        node_rank: Its rank.
        hostname: Its name.
        machine: The same for two nodes that share one network, loopback included.
        announced: The address its ranks would listen at, and why that one.
        port: Where it listens now, on that address; 0 where it cannot.
        token: Who can answer with it is this node.
        mtu_bytes: Of the interface.
        interfaces: Name, and the networks it leads to, of every running interface but loopback.
        port_range: First and last of the ports that its system gives to those who ask for any.
        has_torch: Whether torch is installed there.
        facts: Its fingerprint; compared with the others'.
    """

    node_rank: int
    hostname: str
    machine: str
    announced: Announced
    port: int
    token: str
    mtu_bytes: int
    interfaces: Mapping[str, Mapping[str, str]]
    port_range: tuple[int, int]
    has_torch: bool
    facts: Mapping[str, Json] = field(default_factory=dict)

    def to_json(self) -> dict[str, Json]:
        """Return it as a message."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: Json) -> Node:
        """Read it from a message.

        Raises:
            ValueError: It is not what a node says.
        """
        try:
            known = _require_table(value)
            announced = Announced(**_require_table(known["announced"]))  # type: ignore[arg-type]
            interfaces = {
                name: {str(a): str(n) for a, n in _require_table(each).items()}
                for name, each in _require_table(known["interfaces"]).items()
            }
            first, last = known["port_range"]  # type: ignore[misc]
            return cls(
                node_rank=int(str(known["node_rank"])),
                hostname=str(known["hostname"]),
                machine=str(known["machine"]),
                announced=announced,
                port=int(str(known["port"])),
                token=str(known["token"]),
                mtu_bytes=int(str(known["mtu_bytes"])),
                interfaces=interfaces,
                port_range=(int(str(first)), int(str(last))),
                has_torch=bool(known["has_torch"]),
                facts=_require_table(known["facts"]),
            )
        except (KeyError, TypeError) as exc:
            raise ValueError(f"a node's message lacks something: {exc}") from exc

    @property
    def network(self) -> str:
        """The network of its address, e.g. ``10.77.0.0/24``; empty where it has none."""
        networks = self.interfaces.get(self.announced.interface, {})
        return networks.get(self.announced.address, "")

    def __str__(self) -> str:
        """Name it as messages do."""
        return f"{self.hostname} (node rank {self.node_rank})"


def _require_table(value: Json) -> dict[str, Json]:
    if not isinstance(value, dict):
        raise TypeError(f"{value!r} is no table")
    return value


def make_token() -> str:
    """Return a secret that nobody guesses."""
    return secrets.token_hex(16)


def find_port_range() -> tuple[int, int]:
    """Return the ports that this system hands out to who asks for any."""
    try:
        first, last = _PORTS.read_text().split()
        return int(first), int(last)
    except (OSError, ValueError):
        return _USUAL_PORTS


def machine_id() -> str:
    """Return what two nodes share if they are on one host and in one network namespace."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/net').stat().st_ino}"
    except OSError:
        return f"{socket.gethostname()} {os.getppid()}"
