"""`Transport`: how the nodes of one examination exchange values under topics.

The one over a torch store is in this module; both ends of the one over a channel are in `channel_transport`.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
from datetime import timedelta
from typing import TYPE_CHECKING, Final, Protocol, TypeAlias, TypeVar

from ddpsafe._clock import BoundedCall, Deadline

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from ddpsafe._job.store_keys import Keys


Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"
T = TypeVar("T")

RESULTS: Final = "results"
"""The topic of the last value that node rank 0 sends."""


class TransportLostError(Exception):
    """Nothing more can be sent or received: node rank 0 exited, or its host was lost."""


class TransportClosedError(TransportLostError):
    """The process of node rank 0 exited, but its host is up."""


class TransportGarbledError(TransportLostError):
    """Node rank 0 sent what a doctor never sends."""


class Transport(Protocol):
    """Sends and receives the values of one node, under topics."""

    async def put(self, topic: str, value: Json) -> None:
        """Send a value under a topic, replacing an earlier one.

        Raises:
            TransportLostError: Node rank 0 can no longer receive it.
        """

    async def get(self, topic: str) -> Mapping[int, Json]:
        """Return the values under a topic, by node rank, as far as this node receives them.

        Raises:
            TransportLostError: No more values can arrive.
        """

    def disconnected(self) -> Collection[int]:
        """Return the node ranks that are known to be unable to send more."""
        # A store does not report lost clients, and of node rank 0 the loss is an error instead.
        return ()


async def wait_for(transport: Transport, topic: str, *, deadline: Deadline) -> Json:
    """Wait for a value of node rank 0 under a topic; None if the deadline expires.

    Raises:
        TransportLostError: It cannot arrive any more.
    """
    return (await gather(transport, topic, [0], deadline=deadline)).get(0)


async def gather(
    transport: Transport,
    topic: str,
    node_ranks: Collection[int],
    *,
    deadline: Deadline,
    on_change: Callable[[Collection[int]], None] = lambda _: None,
) -> dict[int, Json]:
    """Wait for the values of several nodes under a topic, and return them by node rank.

    The wait ends once all have arrived, all missing nodes have disconnected, or the deadline has expired.
    `on_change` is called with the missing nodes, at the start and whenever they change.

    Raises:
        TransportLostError: The transport itself was lost.
    """
    last_missing: set[int] | None = None
    pauses = deadline.pauses_s()
    while True:
        values = {
            node: value
            for node, value in (await transport.get(topic)).items()
            if node in node_ranks
        }
        missing = set(node_ranks) - values.keys() - set(transport.disconnected())
        if missing != last_missing:
            # One has just arrived, so the others may be about to: the pauses are short again.
            last_missing, pauses = missing, deadline.pauses_s()
            on_change(missing)
        if not missing or deadline.expired():
            return values
        await asyncio.sleep(next(pauses))


async def bounded(
    function: Callable[[], T],
    *,
    deadline: Deadline,
    name: str,
    dispose: Callable[[T], None] = lambda _: None,
) -> T:
    """Make a call that may hang, in a separate thread; its result goes to `dispose` if it comes too late.

    Raises:
        TimeoutError: It has not returned by the deadline.
    """
    call = BoundedCall(function, name=name)
    try:
        for pause_s in deadline.pauses_s():
            if call.wait(0):
                return call.result()
            await asyncio.sleep(pause_s)
    except asyncio.CancelledError:
        call.abandon(dispose)
        raise
    call.abandon(dispose)
    raise TimeoutError(f"{name}: no answer within {deadline.waited_s():.1f} s")


# A store whose host was lost fails only after its own timeout, a minute or more.
_STORE_LIMIT: Final = timedelta(seconds=10)


class StoreTransport(Transport):
    """The transport of one node over a torch store.

    The store has a key prefix that no other examination has used.
    """

    def __init__(self, store: Keys, *, node_rank: int, nnodes: int) -> None:
        self._store = store
        self._node_rank = node_rank
        self._readable = range(nnodes) if node_rank == 0 else range(1)
        self._read: dict[str, dict[int, Json]] = {}

    async def put(self, topic: str, value: Json) -> None:
        """Send a value under a topic."""
        key, text = f"{topic}/{self._node_rank}", json.dumps(value, default=str)
        await self._bounded(lambda: self._store.set(key, text))

    async def get(self, topic: str) -> Mapping[int, Json]:
        """Return the values under a topic. A value that was read is not read again."""
        known = self._read.setdefault(topic, {})
        for node in self._readable:
            if node not in known:
                text = await self._bounded(functools.partial(self._find, f"{topic}/{node}"))
                if text is not None:
                    known[node] = None  # not JSON, so not a valid message
                    with contextlib.suppress(ValueError, RecursionError):
                        known[node] = json.loads(text)
        return known

    def _find(self, key: str) -> bytes | None:
        return self._store.get(key) if self._store.check([key]) else None

    async def _bounded(self, function: Callable[[], T]) -> T:
        try:
            return await bounded(
                function, deadline=Deadline.after(_STORE_LIMIT), name="ddpsafe-store-transport"
            )
        except TimeoutError as exc:
            raise TransportLostError("the store does not answer") from exc
        except RuntimeError as exc:  # torch's DistNetworkError and similar errors
            raise TransportLostError(str(exc).splitlines()[0]) from exc
