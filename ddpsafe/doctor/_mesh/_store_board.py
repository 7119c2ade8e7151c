"""The board over a store of torch, for ranks that torchrun or srun have started already.

torch itself is not imported: who hands over a store has it.
"""

from __future__ import annotations

import functools
import json
from datetime import timedelta
from typing import TYPE_CHECKING, Final, Protocol, TypeVar

from ddpsafe._clock import Deadline
from ddpsafe.doctor._mesh._board import BoardLostError, bounded

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from ddpsafe.doctor._mesh._board import Json

T = TypeVar("T")

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
        """Return nobody: a store does not tell."""
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
    """Return what was said; what is no JSON is no message of any kind either."""
    try:
        said: Json = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return said
