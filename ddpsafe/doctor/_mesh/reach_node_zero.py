"""Reach node rank 0: dial the endpoint until a ddpsafe doctor answers, or explain why none does."""

from __future__ import annotations

import asyncio
import errno
import socket
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Annotated, Final, Literal

from pydantic import Field

from ddpsafe._clock import Deadline
from ddpsafe._host import is_loopback
from ddpsafe.doctor._mesh.link import (
    VERSION,
    BadSignatureError,
    Link,
    NotADoctorError,
    keep_packets_small,
    notice_loss,
)
from ddpsafe.doctor._mesh.protocol import Answer, Rate, Text
from ddpsafe.doctor._mesh.socket_transport import Client
from ddpsafe.doctor._mesh.transport import bounded

if TYPE_CHECKING:
    from collections.abc import Callable

    from ddpsafe.doctor._mesh.protocol import Greeting

Trouble = Literal[
    "dropped",
    "refused",
    "no-route",
    "unresolved",
    "silent-resolver",
    "loopback",
    "other-program",
    "other-job",
    "duplicate",
    "late",
    "secret",
    "version",
]

_CONNECT_LIMIT_S: Final = 2.5
_RESOLVE_LIMIT_S: Final = 2.5
_ANSWER_LIMIT_S: Final = 3.0
# A step with less time than this would fail because of the deadline, not because of the network.
_LEAST_LIMIT_S: Final = 1.0
_LONGEST_PAUSE_S: Final = 1.0
_GIVE_UP_AFTER: Final[dict[Trouble, timedelta]] = {
    # If /etc/hosts has 127.0.1.1, nothing will ever listen there; two nodes on one host need a moment.
    "loopback": timedelta(seconds=2),
    # An earlier run may be about to exit; a service stays, and node rank 0 cannot use the port.
    "other-program": timedelta(seconds=5),
}
"""Troubles that rarely go away, with how long to retry while they last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Obstacle:
    """Why node rank 0 was not reached.

    Attributes:
        trouble: The kind of trouble.
        said: What the system or the other side reported.
        addresses: What the endpoint's name resolves to here.
        waited_s: How long it was tried.
        holder: The host that has this node's rank, or whose job answers.
    """

    trouble: Trouble
    said: Text
    addresses: Annotated[tuple[Text, ...], Field(max_length=64)] = ()
    waited_s: Rate = 0.0
    holder: Text = ""


@dataclass(frozen=True, slots=True)
class Refused:
    """Node rank 0 was reached and refused this node, but still sends it the results."""

    obstacle: Obstacle
    client: Client


class _Unreached(Exception):  # noqa: N818 - caught in this module, never raised to a user
    def __init__(self, trouble: Trouble, said: str, holder: str = "") -> None:
        super().__init__(trouble)
        self.trouble: Trouble = trouble
        self.said, self.holder = said, holder


async def reach_coordinator(
    host: str,
    port: int,
    greeting: Greeting,
    *,
    secret: str = "",
    deadline: Deadline,
    on_trouble: Callable[[Obstacle], None],
) -> Client | Refused | Obstacle:
    """Introduce this node to node rank 0, which may start later than this node.

    Args:
        host: The endpoint's host.
        port: The endpoint's port.
        greeting: The greeting of this node.
        secret: The secret of all nodes; empty if there is none.
        deadline: When to give up.
        on_trouble: Called with the obstacle of each failed try.

    Returns:
        The transport (within `Refused` if this node is refused), or the last obstacle.
    """
    pause_s = 0.05
    give_up = {each: Deadline.after(_GIVE_UP_AFTER[each]) for each in _GIVE_UP_AFTER}
    while True:
        addresses: tuple[str, ...] = ()
        try:
            addresses = await resolve(host, port, deadline=deadline)
            link, answer = await greet(addresses, port, greeting, secret=secret, deadline=deadline)
        except _Unreached as exc:
            trouble = exc.trouble
            leads_here = bool(addresses) and all(map(is_loopback, addresses))
            if leads_here and trouble == "refused":
                trouble = "loopback"
            found = Obstacle(
                trouble=trouble,
                said=exc.said,
                addresses=addresses,
                waited_s=deadline.waited_s(),
                holder=exc.holder,
            )
        else:
            client = Client(link, coordinator_hostname=answer.hostname)
            if not answer.refusal:
                return client
            said: str = answer.refusal
            holder = answer.hostname
            if answer.refusal == "duplicate":
                holder = f"{answer.holder} (pid {answer.holder_pid})"
            elif answer.refusal == "other-job":
                said = f"nnodes={answer.nnodes}, job {answer.job or 'without a name'}"
            elif answer.refusal == "version":
                said = f"its doctor has protocol version {answer.version}, this one {VERSION}"
            found = Obstacle(trouble=answer.refusal, said=said, addresses=addresses, holder=holder)
            return Refused(found, client)
        if found.trouble not in ("loopback", "other-program"):
            give_up = {each: Deadline.after(_GIVE_UP_AFTER[each]) for each in _GIVE_UP_AFTER}
        is_hopeless = found.trouble == "secret" or (
            found.trouble in give_up and give_up[found.trouble].expired()
        )
        if is_hopeless or deadline.expired():
            return found
        on_trouble(found)
        await asyncio.sleep(min(pause_s, deadline.remaining_s()))
        pause_s = min(pause_s * 2, _LONGEST_PAUSE_S)


def _limit_s(usual_s: float, deadline: Deadline) -> float:
    return max(_LEAST_LIMIT_S, min(usual_s, deadline.remaining_s()))


async def resolve(host: str, port: int, *, deadline: Deadline) -> tuple[str, ...]:
    """Return the addresses of the endpoint's host; the resolver may hang if no server answers.

    Raises:
        _Unreached: It has none, or the resolver does not answer.
    """
    try:
        found = await bounded(
            lambda: socket.getaddrinfo(host, port, type=socket.SOCK_STREAM),
            deadline=Deadline.after(timedelta(seconds=_limit_s(_RESOLVE_LIMIT_S, deadline))),
            name="ddpsafe-resolve",
        )
    except TimeoutError as exc:
        raise _Unreached("silent-resolver", str(exc)) from exc
    except (OSError, UnicodeError) as exc:
        # EAI_AGAIN is not a "no such name": no server answers, or there is none.
        silent = getattr(exc, "errno", None) == socket.EAI_AGAIN
        said = getattr(exc, "strerror", None) or str(exc)
        raise _Unreached("silent-resolver" if silent else "unresolved", said) from exc
    return tuple(dict.fromkeys(str(entry[4][0]) for entry in found))


async def greet(
    addresses: tuple[str, ...],
    port: int,
    greeting: Greeting,
    *,
    secret: str,
    deadline: Deadline,
) -> tuple[Link, Answer]:
    """Introduce this node at the first address that accepts the connection.

    Raises:
        _Unreached: None does, or what answers is not ddpsafe doctor.
    """
    last = _Unreached("unresolved", "the name has no address")
    for address in addresses:
        try:
            streams = await _connect(address, port, deadline)
            break
        except _Unreached as exc:
            last = exc
    else:
        raise last
    link = Link(*streams, secret)
    try:
        return link, await _introduce(link, greeting, deadline)
    except BaseException:
        link.close()
        raise


async def _connect(
    address: str, port: int, deadline: Deadline
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    limit_s = _limit_s(_CONNECT_LIMIT_S, deadline)
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    connection = socket.socket(family, socket.SOCK_STREAM)
    connection.settimeout(0)
    keep_packets_small(connection)
    notice_loss(connection)
    loop = asyncio.get_running_loop()
    try:
        await asyncio.wait_for(loop.sock_connect(connection, (address, port)), limit_s)
        return await asyncio.open_connection(sock=connection)
    except (asyncio.TimeoutError, TimeoutError) as exc:
        connection.close()
        raise _Unreached("dropped", f"no answer within {limit_s:.1f} s") from exc
    except OSError as exc:
        connection.close()
        refused = exc.errno in (errno.ECONNREFUSED, errno.ECONNRESET)
        said = errno.errorcode.get(exc.errno or 0, str(exc))
        raise _Unreached("refused" if refused else "no-route", said) from exc


async def _introduce(link: Link, greeting: Greeting, deadline: Deadline) -> Answer:
    limit_s = _limit_s(_ANSWER_LIMIT_S, deadline)
    try:
        link.send_greeting(greeting)
        receiving = link.receive_greeting(Answer, context=greeting.challenge)
        answer = await asyncio.wait_for(receiving, limit_s)
    except (asyncio.TimeoutError, TimeoutError) as exc:
        raise _Unreached("other-program", f"it sent nothing for {limit_s:.1f} s") from exc
    except BadSignatureError as exc:
        raise _Unreached("secret", str(exc)) from exc
    except (OSError, NotADoctorError) as exc:
        raise _Unreached("other-program", str(exc)) from exc
    link.begin_session(greeting.challenge + answer.session, is_node=True)
    return answer


async def find_answer(
    host: str, port: int, greeting: Greeting, *, secret: str, deadline: Deadline
) -> Answer | Obstacle:
    """Return, for node rank 0, what answers at the endpoint."""
    addresses: tuple[str, ...] = ()
    try:
        addresses = await resolve(host, port, deadline=deadline)
        link, answer = await greet(addresses, port, greeting, secret=secret, deadline=deadline)
    except _Unreached as exc:
        return Obstacle(trouble=exc.trouble, said=exc.said, addresses=addresses, holder=exc.holder)
    link.close()
    return answer


async def find_addresses(host: str, port: int, *, deadline: Deadline) -> tuple[str, ...]:
    """Return the addresses of the endpoint's host; none if it cannot be resolved."""
    try:
        return await resolve(host, port, deadline=deadline)
    except _Unreached:
        return ()
