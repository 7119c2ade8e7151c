"""`Transport`: how the nodes of one examination exchange values under topics.

The one over a store of torch is here, both ends of the one over a socket are in `server`.
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
    from collections.abc import Callable, Collection, Iterator, Mapping


Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"
T = TypeVar("T")

RESULTS: Final = "results"
"""The topic of the last thing that node rank 0 writes."""

_FIRST_PAUSE_S: Final = 0.002
_LONGEST_PAUSE_S: Final = 0.05


class TransportLostError(Exception):
    """Nothing can be read or written any more: node rank 0 ended, or its host vanished."""


class TransportClosedError(TransportLostError):
    """The process of node rank 0 ended, and its host is there."""


class TransportGarbledError(TransportLostError):
    """What node rank 0 says is not what a doctor says."""


class Transport(Protocol):
    """Where one node writes and reads values, under topics."""

    async def put(self, topic: str, value: Json) -> None:
        """Write a value under a topic; writing again replaces it.

        Raises:
            TransportLostError: Node rank 0 cannot read it any more.
        """

    async def get(self, topic: str) -> Mapping[int, Json]:
        """Return the values under a topic, by node rank, as far as this node can read them.

        Raises:
            TransportLostError: Nothing can come any more.
        """

    def gone(self) -> Collection[int]:
        """Return the node ranks that will certainly write nothing more."""


async def wait_for(transport: Transport, topic: str, *, deadline: Deadline) -> Json:
    """Wait until node rank 0 has written under a topic; None if it has not by then.

    Raises:
        TransportLostError: It will not.
    """
    said = await gather(transport, topic, [0], deadline=deadline)
    return said.get(0)


async def gather(
    transport: Transport,
    topic: str,
    node_ranks: Collection[int],
    *,
    deadline: Deadline,
    on_change: Callable[[Collection[int]], None] = lambda _: None,
) -> dict[int, Json]:
    """Wait for what nodes write under a topic.

    Args:
        transport: Where.
        topic: Under which topic.
        node_ranks: Who is expected.
        deadline: When to stop waiting.
        on_change: Told which nodes are still expected, at the start and whenever that changes.

    Returns:
        What was written, by node rank, when all have, or when those who have not are gone, or when
        the deadline expired.

    Raises:
        TransportLostError: The transport itself is gone.
    """
    expected: set[int] | None = None
    pauses = _pauses()
    while True:
        said = {
            node: value
            for node, value in (await transport.get(topic)).items()
            if node in node_ranks
        }
        missing = set(node_ranks) - said.keys() - set(transport.gone())
        if missing != expected:
            expected, pauses = missing, _pauses()
            on_change(missing)
        if not missing or deadline.expired():
            return said
        await asyncio.sleep(min(next(pauses), deadline.remaining_s()))


async def bounded(function: Callable[[], T], *, deadline: Deadline, name: str) -> T:
    """Make a call that may hang, in a thread of its own.

    Raises:
        TimeoutError: It has not come back by then.
    """
    call = BoundedCall(function, name=name)
    for pause_s in _pauses():
        if call.wait(0):
            return call.result()
        if deadline.expired():
            break
        await asyncio.sleep(min(pause_s, deadline.remaining_s()))
    raise TimeoutError(f"{name}: no answer within {deadline.waited_s():.1f} s")


def _pauses() -> Iterator[float]:
    pause_s = _FIRST_PAUSE_S
    while True:
        yield pause_s
        pause_s = min(pause_s * 1.5, _LONGEST_PAUSE_S)


# A store whose host has vanished answers after its own timeout, a minute or more.
_ANSWER: Final = timedelta(seconds=10)


class Store(Protocol):
    """What is needed of ``torch.distributed.Store``; give it keys of its own (`PrefixStore`)."""

    def set(self, key: str, value: str) -> None:
        """Keep a value."""

    def get(self, key: str) -> bytes:
        """Return a value that is there."""

    def check(self, keys: list[str]) -> bool:
        """Tell whether all keys are there."""


class StoreTransport:
    """The transport of one node over a store of torch.

    Args:
        store: With keys that no other examination has used.
        node_rank: Of this node.
        nnodes: How many there are.
    """

    def __init__(self, store: Store, *, node_rank: int, nnodes: int) -> None:
        """Keep the connection."""
        self._store = store
        self._node_rank = node_rank
        self._readable = range(nnodes) if node_rank == 0 else range(1)
        self._read: dict[str, dict[int, Json]] = {}

    async def put(self, topic: str, value: Json) -> None:
        """Write a value under a topic."""
        key, text = f"{topic}/{self._node_rank}", json.dumps(value, default=str)
        await self._ask(lambda: self._store.set(key, text))

    async def get(self, topic: str) -> Mapping[int, Json]:
        """Return the values under a topic; once read, a value stays as it was."""
        known = self._read.setdefault(topic, {})
        for node in self._readable:
            if node not in known:
                text = await self._ask(functools.partial(self._find, f"{topic}/{node}"))
                if text is not None:
                    known[node] = None  # what is not JSON is not a message either
                    with contextlib.suppress(ValueError, RecursionError):
                        known[node] = json.loads(text)
        return known

    def gone(self) -> Collection[int]:
        """Return none: a store does not tell."""
        return ()

    def _find(self, key: str) -> bytes | None:
        return self._store.get(key) if self._store.check([key]) else None

    async def _ask(self, function: Callable[[], T]) -> T:
        try:
            return await bounded(
                function, deadline=Deadline.after(_ANSWER), name="ddpsafe-store-transport"
            )
        except TimeoutError as exc:
            raise TransportLostError("the store does not answer") from exc
        except RuntimeError as exc:  # torch's DistNetworkError and its like
            raise TransportLostError(str(exc).splitlines()[0]) from exc
