"""Reach node rank 0: dial the endpoint until a ddpsafe doctor answers, or explain why none does."""

from __future__ import annotations

import asyncio
import socket
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Annotated, Final, Literal

from pydantic import Field

from ddpsafe._clock import Deadline
from ddpsafe._host import is_loopback, look_up
from ddpsafe._job.channel import RefusedError, from_json
from ddpsafe._job.endpoint import Unreached, trouble_of
from ddpsafe.doctor._mesh.channel_transport import ANSWER, Client
from ddpsafe.doctor._mesh.protocol import VERSION, Answer, Rate
from ddpsafe.doctor._mesh.transport import TransportLostError, bounded, wait_for
from ddpsafe.doctor._subject import Text  # noqa: TC001 - pydantic reads it

if TYPE_CHECKING:
    from collections.abc import Callable

    from ddpsafe.doctor._mesh.protocol import Greeting, Rejected

Trouble = Unreached | Literal["loopback", "other-job", "duplicate", "late"]

# Longer than the 3 s in which a kernel finds that no host has an address.
_CONNECT_LIMIT_S: Final = 4.0
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
        said: What the system or the other side reported.
        addresses: What the endpoint's name resolves to here.
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

    `on_trouble` is called with the obstacle of each failed try. Returns the transport (within `Refused` if
    this node is refused), or the last obstacle.
    """
    pause_s = 0.05
    give_up = _deadlines_to_give_up()
    while True:
        reached = await _try(host, port, greeting, secret=secret, deadline=deadline)
        if not isinstance(reached, Obstacle):
            client, answer, addresses = reached
            if answer.rejected is None:
                return client
            return Refused(_refusal_of(answer, answer.rejected, addresses), client)
        obstacle = replace(reached, waited_s=deadline.waited_s())
        if obstacle.trouble not in _GIVE_UP_AFTER:
            give_up = _deadlines_to_give_up()
        is_hopeless = obstacle.trouble in ("secret", "version") or (
            obstacle.trouble in give_up and give_up[obstacle.trouble].expired()
        )
        if is_hopeless or deadline.expired():
            return obstacle
        on_trouble(obstacle)
        await asyncio.sleep(min(pause_s, deadline.remaining_s()))
        pause_s = min(pause_s * 2, _LONGEST_PAUSE_S)


def _deadlines_to_give_up() -> dict[Trouble, Deadline]:
    return {trouble: Deadline.after(limit) for trouble, limit in _GIVE_UP_AFTER.items()}


async def _try(
    host: str, port: int, greeting: Greeting, *, secret: str, deadline: Deadline
) -> tuple[Client, Answer, tuple[str, ...]] | Obstacle:
    """Reach node rank 0 once; return also the addresses of the endpoint."""
    addresses: tuple[str, ...] = ()
    try:
        addresses = await resolve(host, port, deadline=deadline)
        client, answer = await greet(addresses, port, greeting, secret=secret, deadline=deadline)
    except (OSError, UnicodeError, RefusedError) as exc:
        reason, said = trouble_of(exc)
        is_own = reason == "refused" and addresses and all(map(is_loopback, addresses))
        return Obstacle(trouble="loopback" if is_own else reason, said=said, addresses=addresses)
    return client, answer, addresses


def _refusal_of(answer: Answer, rejected: Rejected, addresses: tuple[str, ...]) -> Obstacle:
    own, holder, said = answer.greeting, answer.greeting.hostname, str(rejected.reason)
    if rejected.reason == "duplicate":
        holder = f"{rejected.holder} (pid {rejected.holder_pid})"
    elif rejected.reason == "other-job":
        said = f"nnodes={own.nnodes}, job {own.job or 'without a name'}"
    elif rejected.reason == "version":
        said = f"its doctor has protocol version {own.version}, this one {VERSION}"
    return Obstacle(trouble=rejected.reason, said=said, addresses=addresses, holder=holder)


async def resolve(host: str, port: int, *, deadline: Deadline) -> tuple[str, ...]:
    """Return the addresses of the endpoint's host; the resolver may hang if no server answers.

    Raises:
        OSError: It has none, or the resolver does not answer.
        UnicodeError: It cannot be a name.
    """
    limit = _limit(_RESOLVE_LIMIT_S, deadline)
    try:
        addresses = await bounded(
            lambda: look_up(host, port), deadline=limit, name="ddpsafe-resolve"
        )
    except TimeoutError as exc:
        raise socket.gaierror(socket.EAI_AGAIN, str(exc)) from exc
    return tuple(addresses)


async def greet(
    addresses: tuple[str, ...], port: int, greeting: Greeting, *, secret: str, deadline: Deadline
) -> tuple[Client, Answer]:
    """Introduce this node at the first address that accepts the connection.

    Raises:
        OSError: None does.
        RefusedError: What answers is not ddpsafe doctor.
    """
    failed: OSError = socket.gaierror(socket.EAI_NONAME, "the name has no address")
    for address in addresses:
        limit = _limit(_CONNECT_LIMIT_S, deadline)
        try:
            client = await Client.dial(address, port, greeting, secret=secret, deadline=limit)
        except OSError as exc:
            failed = exc
            continue
        try:
            answer = await _require_answer(client, _limit(_ANSWER_LIMIT_S, deadline))
        except BaseException:
            await client.close()
            raise
        client.coordinator_hostname = answer.greeting.hostname
        return client, answer
    raise failed


async def _require_answer(client: Client, limit: Deadline) -> Answer:
    try:
        value = await wait_for(client, ANSWER, deadline=limit)
        if value is not None:
            return from_json(Answer, value)
        why = f"it sent nothing for {limit.waited_s():.1f} s"
    except TransportLostError as exc:
        why = str(exc)
    except ValueError:
        why = "what it sent is not a message of this version"
    raise RefusedError("other-program", why)


def _limit(usual_s: float, deadline: Deadline) -> Deadline:
    limit_s = max(_LEAST_LIMIT_S, min(usual_s, deadline.remaining_s()))
    return Deadline.after(timedelta(seconds=limit_s))


async def find_answer(
    host: str, port: int, greeting: Greeting, *, secret: str, deadline: Deadline
) -> Answer | Obstacle:
    """Return, for node rank 0, what answers at the endpoint."""
    reached = await _try(host, port, greeting, secret=secret, deadline=deadline)
    if isinstance(reached, Obstacle):
        return reached
    client, answer, _ = reached
    await client.close()
    return answer


async def find_addresses(host: str, port: int) -> tuple[str, ...]:
    """Return the addresses of the endpoint's host; none if it cannot be resolved within 2 s."""
    try:
        return await resolve(host, port, deadline=Deadline.after(timedelta(seconds=2)))
    except (OSError, UnicodeError):
        return ()
