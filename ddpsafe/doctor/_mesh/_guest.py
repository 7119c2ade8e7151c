"""Every other node's end of the board: a connection to node rank 0."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final, get_args

from ddpsafe.doctor._mesh import _lines
from ddpsafe.doctor._mesh._board import BoardGarbledError, BoardLostError
from ddpsafe.doctor._mesh._messages import Topic

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from ddpsafe.doctor._mesh._board import Json

_TOPICS: Final = frozenset(get_args(Topic))


class Guest:
    """The board as a node other than node rank 0 sees it.

    Args:
        link: A connection on which node rank 0 has welcomed this node.
        hub_hostname: What the host of node rank 0 calls itself.
    """

    def __init__(self, link: _lines.Link, *, hub_hostname: str) -> None:
        """Start to listen."""
        self.hub_hostname = hub_hostname
        self.hub_address = link.peer.removeprefix("::ffff:")
        self._link = link
        self._heard: dict[str, Json] = {}
        self._lost: BoardLostError | None = None
        self._listening = asyncio.ensure_future(self._listen())

    async def put(self, topic: str, value: Json) -> None:
        """Say something to node rank 0."""
        if self._lost is not None:
            raise self._lost
        self._link.send({"topic": topic, "value": value})

    async def get(self, topic: str) -> Mapping[int, Json]:
        """Return what node rank 0 has said."""
        if topic in self._heard:
            return {0: self._heard[topic]}
        if self._lost is not None:
            raise self._lost
        return {}

    def gone(self) -> Collection[int]:
        """Return nobody: that node rank 0 is gone is an error instead."""
        return ()

    async def close(self) -> None:
        """Leave, and let node rank 0 see it."""
        self._listening.cancel()
        self._link.close()

    async def _listen(self) -> None:
        try:
            while (message := await self._link.receive(_lines.LONGEST_FROM_HUB_BYTES)) is not None:
                topic = message.get("topic")
                if isinstance(topic, str) and topic in _TOPICS:
                    self._heard[topic] = message.get("value")
            self._lost = BoardLostError("it closed the connection")
        except OSError as exc:
            self._lost = BoardLostError(exc.strerror or str(exc))
        except _lines.StrangerError as exc:
            self._lost = BoardGarbledError(str(exc))
