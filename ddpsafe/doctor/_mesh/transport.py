"""What the nodes of one examination tell each other, over a socket or over a store of torch."""

from __future__ import annotations

import asyncio
import functools
import json
from datetime import timedelta
from typing import TYPE_CHECKING, Final, Protocol, TypeAlias, TypeVar

from ddpsafe._clock import BoundedCall, Deadline

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping


Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"
T = TypeVar("T")

_FIRST_PAUSE_S: Final = 0.002
_LONGEST_PAUSE_S: Final = 0.05


class BoardLostError(Exception):
    """The board went away: node rank 0 ended, or its host vanished."""


class BoardGarbledError(BoardLostError):
    """What node rank 0 says is not what a doctor says."""


class Board(Protocol):
    """Where one node says and reads things, under topics."""

    async def put(self, topic: str, value: Json) -> None:
        """Say something under a topic; saying it again replaces it.

        Raises:
            BoardLostError: It can no longer be read.
        """

    async def get(self, topic: str) -> Mapping[int, Json]:
        """Return what has been said under a topic, by node rank, as far as this node can read it.

        Raises:
            BoardLostError: Nothing can come any more.
        """

    def gone(self) -> Collection[int]:
        """Return the node ranks that will certainly say nothing more."""


async def wait_for(board: Board, topic: str, *, deadline: Deadline) -> Json:
    """Wait until node rank 0 has said something under a topic; None if it has not by then.

    Raises:
        BoardLostError: It will not.
    """
    said = await gather(board, topic, [0], deadline=deadline)
    return said.get(0)


async def gather(
    board: Board,
    topic: str,
    node_ranks: Collection[int],
    *,
    deadline: Deadline,
    on_change: Callable[[Collection[int]], None] = lambda _: None,
) -> dict[int, Json]:
    """Wait for what nodes say under a topic.

    Args:
        board: Where.
        topic: Under which topic.
        node_ranks: Who is expected.
        deadline: When to stop waiting.
        on_change: Told which nodes are still expected, at the start and whenever that changes.

    Returns:
        What was said, by node rank, when all have, or when those who have not are gone, or when
        the deadline expired.

    Raises:
        BoardLostError: The board itself went.
    """
    expected: set[int] | None = None
    pauses = _pauses()
    while True:
        said = {
            node: value for node, value in (await board.get(topic)).items() if node in node_ranks
        }
        missing = set(node_ranks) - said.keys() - set(board.gone())
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


class StoreBoard:
    """The board as one node sees it through a store.

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
        self._heard: dict[str, dict[int, Json]] = {}

    async def put(self, topic: str, value: Json) -> None:
        """Say something under a topic."""
        key, text = f"{topic}/{self._node_rank}", json.dumps(value, default=str)
        await self._ask(lambda: self._store.set(key, text))

    async def get(self, topic: str) -> Mapping[int, Json]:
        """Return what has been said under a topic; once heard, a saying stays as it was."""
        heard = self._heard.setdefault(topic, {})
        for node in self._readable:
            if node not in heard:
                text = await self._ask(functools.partial(self._find, f"{topic}/{node}"))
                if text is not None:
                    heard[node] = _parse(text)
        return heard

    def gone(self) -> Collection[int]:
        """Return nothing: a store does not tell."""
        return ()

    def _find(self, key: str) -> bytes | None:
        return self._store.get(key) if self._store.check([key]) else None

    async def _ask(self, function: Callable[[], T]) -> T:
        try:
            return await bounded(
                function, deadline=Deadline.after(_ANSWER), name="ddpsafe-store-board"
            )
        except TimeoutError as exc:
            raise BoardLostError("the store does not answer") from exc
        except RuntimeError as exc:  # torch's DistNetworkError and its like
            raise BoardLostError(str(exc).splitlines()[0]) from exc


def _parse(text: bytes) -> Json:
    """Return what was said; what is not JSON is not a message of any kind."""
    try:
        said: Json = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return said
