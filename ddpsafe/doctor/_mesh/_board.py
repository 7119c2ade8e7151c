"""The board: what the nodes of one examination tell each other, and how long they wait for it.

Node rank 0 reads what every node says; the others read what node rank 0 says. That is all a roll-call
and a verdict need, and it is the same over a server of our own and over a store of torch.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final, Protocol, TypeAlias, TypeVar

from ddpsafe._clock import BoundedCall

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping

    from ddpsafe._clock import Deadline

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
            BoardLostError: Nobody can read it any more.
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
