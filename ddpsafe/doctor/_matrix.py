"""Who reaches whom: the verdict of every probed direction between two hosts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Verdict = Literal[
    "open",
    "dropped",  # no answer before the deadline: packets vanish
    "refused",  # answered with a reset although somebody listens there
    "no-route",  # the network says that it cannot be reached
    "wrong-peer",  # somebody answered who does not know the nonce: a proxy, another job
    "large-lost",  # the connection opens and large packets vanish: an MTU hole
    "absent",  # the host never came, or died during the check
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Direction:
    """One probed direction.

    Attributes:
        source: Node rank of the host that dials.
        target: Node rank of the host that listens.
        verdict: What became of the connection.
        latency_s: Round trip of a small message, or None where nothing came through.
        bandwidth_bytes_per_s: Rough, of one short burst; None where it was not measured.
        said: What the operating system said, for a reader who knows it.
    """

    source: int
    target: int
    verdict: Verdict
    latency_s: float | None = None
    bandwidth_bytes_per_s: float | None = None
    said: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Matrix:
    """Who reaches whom.

    Attributes:
        hostnames: Names of the hosts, by node rank.
        addresses: The address each host listened on, by node rank; empty where it never came.
        directions: Every probed direction; beyond 64 hosts not every pair is probed.
    """

    hostnames: tuple[str, ...]
    addresses: tuple[str, ...]
    directions: tuple[Direction, ...]
