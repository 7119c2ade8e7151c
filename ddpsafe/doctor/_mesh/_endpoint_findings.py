"""What a node says that did not reach the endpoint; nobody else can tell."""

from __future__ import annotations

import shlex
import socket
from typing import TYPE_CHECKING, Final

from ddpsafe.doctor import _mesh_codes as _codes
from ddpsafe.doctor._finding import Finding, to_copy
from ddpsafe.doctor._mesh._roll_findings import late, no_secret

if TYPE_CHECKING:
    from collections.abc import Callable

    from ddpsafe.doctor._mesh._endpoint import Obstacle


def judge_obstacle(
    obstacle: Obstacle, *, host: str, port: int, node_rank: int, nnodes: int
) -> Finding:
    """Word what kept this node from node rank 0."""
    here = f"{socket.gethostname()} (node rank {node_rank} of {nnodes})"
    if obstacle.trouble == "late":
        return late(f"{here} came to {host}:{port}", waited="the others had stopped waiting")
    if obstacle.trouble == "secret":
        return no_secret(f"{here} came to {host}:{port}", hosts=(socket.gethostname(), host))
    code, word = _WORDS[obstacle.trouble]
    what, cause, fix = word(obstacle, host, port)
    waited = f" ({obstacle.waited_s:.1f} s)" if obstacle.waited_s else ""
    return Finding(
        code=code,
        severity="failed",
        fact=f"{here} {what}{waited}.",
        cause=cause,
        fix=fix,
        hosts=(socket.gethostname(), host),
        details={
            "endpoint": f"{host}:{port}",
            "addresses": list(obstacle.addresses),
            "trouble": obstacle.trouble,
            "said": obstacle.said,
            "waited_s": round(obstacle.waited_s, 1),
        },
    )


def describe_trouble(obstacle: Obstacle, *, host: str, port: int) -> str:
    """Say in a line, while it is still tried, what is in the way."""
    seconds = f"{obstacle.waited_s:.0f} s"
    return (
        f"waiting for node rank 0 at {host}:{port}: {obstacle.trouble} ({obstacle.said}), {seconds}"
    )


_Words = tuple[str, str, str]


def _dropped(obstacle: Obstacle, host: str, port: int) -> _Words:
    addresses = ", ".join(obstacle.addresses)
    return (
        f"gets no answer from {host}:{port} ({addresses}): packets vanish",
        f"a firewall or security group drops port {port} on {host} or on the way, or the host is off.",
        to_copy(
            f"Open the port on {host}, as root:",
            f"iptables -I INPUT -p tcp --dport {port} -j ACCEPT",
            f"firewall-cmd --permanent --add-port={port}/tcp && firewall-cmd --reload",
            f"# in a cloud: an inbound rule of the security group, TCP {port}",
        ),
    )


def _refused(obstacle: Obstacle, host: str, port: int) -> _Words:
    addresses = ", ".join(obstacle.addresses)
    return (
        f"is refused by {host}:{port} ({addresses})",
        f"the doctor does not run on {host} yet, its port is another one, or a firewall there rejects.",
        to_copy(
            f"Look on {host} whether it listens; if it does, open the port:",
            f"ss -ltn 'sport = :{port}'",
            f"iptables -I INPUT -p tcp --dport {port} -j ACCEPT",
        ),
    )


def _no_route(obstacle: Obstacle, host: str, port: int) -> _Words:
    addresses = ", ".join(obstacle.addresses)
    first = obstacle.addresses[0] if obstacle.addresses else host
    return (
        f"has no way to {host}:{port} ({addresses}): {obstacle.said}",
        'no route leads there, the host is off, or a firewall answers "prohibited".',
        to_copy(
            "Compare, and name an address of node rank 0 in a network of this host:",
            shlex.join(["ip", "route", "get", first]),
            f"ip -br address    # on {host}",
        ),
    )


def _unresolved(obstacle: Obstacle, host: str, _port: int) -> _Words:
    silent = obstacle.trouble == "silent-resolver"
    return (
        f"cannot resolve {host}: {obstacle.said}",
        "the name server of /etc/resolv.conf does not answer."
        if silent
        else "neither /etc/hosts nor DNS of this host knows the name.",
        to_copy(
            "Name the address of node rank 0 in --rdzv-endpoint, or add a line to /etc/hosts; look up:",
            shlex.join(["getent", "hosts", host]),
        ),
    )


def _loopback(obstacle: Obstacle, host: str, port: int) -> _Words:
    addresses = ", ".join(obstacle.addresses)
    return (
        f"is led to itself by {host}:{port} ({addresses})",
        f"the /etc/hosts of this host gives {host} a loopback address.",
        to_copy(
            "Correct that line, or name the address in --rdzv-endpoint; look up:",
            shlex.join(["getent", "hosts", host]),
        ),
    )


def _stranger(obstacle: Obstacle, host: str, port: int) -> _Words:
    return (
        f"is let in at {host}:{port}, but who answers is no doctor: {obstacle.said}",
        "another program has the port, or a proxy between the hosts accepts every connection.",
        to_copy(
            f"Choose another port, or look on {host} who listens:",
            f"ss -ltnp 'sport = :{port}'",
        ),
    )


def _other_job(obstacle: Obstacle, host: str, port: int) -> _Words:
    return (
        f"found another job at {host}:{port}, on {obstacle.holder}: {obstacle.said}",
        "another job uses this endpoint, or --nnodes differs from host to host.",
        "Give each job its own port, and the same --nnodes to all nodes of one.",
    )


def _doubled(obstacle: Obstacle, host: str, port: int) -> _Words:
    return (
        f"was sent away from {host}:{port}: its node rank is taken by {obstacle.holder}",
        "two hosts were started with the same --node-rank, or a former run goes on.",
        "Give each host its own --node-rank, counted from 0.",
    )


_WORDS: Final[dict[str, tuple[str, Callable[[Obstacle, str, int], _Words]]]] = {
    "dropped": (_codes.ENDPOINT_DROPPED, _dropped),
    "refused": (_codes.ENDPOINT_REFUSED, _refused),
    "no-route": (_codes.ENDPOINT_NO_ROUTE, _no_route),
    "unresolved": (_codes.ENDPOINT_UNRESOLVED, _unresolved),
    "silent-resolver": (_codes.ENDPOINT_UNRESOLVED, _unresolved),
    "loopback": (_codes.ENDPOINT_LOOPBACK, _loopback),
    "stranger": (_codes.STRANGER, _stranger),
    "other-job": (_codes.OTHER_JOB, _other_job),
    "doubled": (_codes.DOUBLED, _doubled),
}
