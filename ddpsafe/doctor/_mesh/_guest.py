"""Every other node's end of the board: a connection to node rank 0."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from ddpsafe.doctor._mesh import _lines
from ddpsafe.doctor._mesh._board import BoardLostError

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from ddpsafe.doctor._mesh._board import Json


class Guest:
    """The board as a node other than node rank 0 sees it.

    Args:
        reader: Of a connection on which node rank 0 has welcomed this node.
        writer: Of the same.
        hub_hostname: What the host of node rank 0 calls itself.
    """

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, hub_hostname: str
    ) -> None:
        """Start to listen."""
        self.hub_hostname = hub_hostname
        self.hub_address = str(writer.get_extra_info("peername")[0])
        self._writer = writer
        self._heard: dict[str, Json] = {}
        self._lost = ""
        self._listening = asyncio.ensure_future(self._listen(reader))

    async def put(self, topic: str, value: Json) -> None:
        """Say something to node rank 0."""
        if self._lost:
            raise BoardLostError(self._lost)
        self._writer.write(_lines.encode({"topic": topic, "value": value}))

    async def get(self, topic: str) -> Mapping[int, Json]:
        """Return what node rank 0 has said."""
        if topic in self._heard:
            return {0: self._heard[topic]}
        if self._lost:
            raise BoardLostError(self._lost)
        return {}

    def gone(self) -> Collection[int]:
        """Return nobody: that node rank 0 is gone is an error instead."""
        return ()

    async def close(self) -> None:
        """Leave, and let node rank 0 see it."""
        self._listening.cancel()
        self._writer.close()

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        try:
            while (message := await _lines.read(reader)) is not None:
                self._heard[str(message.get("topic"))] = message.get("value")
            self._lost = "it closed the connection"
        except (OSError, _lines.StrangerError) as exc:
            self._lost = str(getattr(exc, "strerror", None) or exc)
