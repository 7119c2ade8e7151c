"""The connections that nodes try to each other: their lines, their proofs, and how many may be unknown."""

from __future__ import annotations

import hashlib
import hmac
import json
from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Mapping

    from ddpsafe.doctor._mesh.transport import Json


def prove(challenge: str, secret: str) -> str:
    """Return the answer to a challenge, which takes knowledge of the secret."""
    key, text = f"ddpsafe {secret}", f"challenge {challenge}"
    return hmac.new(key.encode(), text.encode(), hashlib.sha256).hexdigest()


def encode(message: Mapping[str, Json]) -> bytes:
    """Return a message as a line."""
    return json.dumps(message, separators=(",", ":"), default=str).encode() + b"\n"


class UnknownPeers:
    """Connections whose other side has not identified itself yet.

    If there are too many, the oldest one of the address that has most of them is ended. Silent peers
    make room in this way, and one address cannot use up the places of the others.

    Args:
        most: How many there may be in total.
        per_address: How many one address may have.
    """

    def __init__(self, *, most: int, per_address: int) -> None:
        """Start without any connection."""
        self._most, self._per_address = most, per_address
        self._waiting: dict[asyncio.Task[None], str] = {}

    def admit(self, task: asyncio.Task[None], address: str) -> None:
        """Add a connection, and end another one if there are too many."""
        self._waiting[task] = address
        counts = Counter(self._waiting.values())
        crowded = len(self._waiting) > self._most
        if crowded or counts[address] > self._per_address:
            busiest = counts.most_common(1)[0][0] if crowded else address
            oldest = next(each for each, where in self._waiting.items() if where == busiest)
            self.forget(oldest)
            oldest.cancel()

    def forget(self, task: asyncio.Task[None]) -> None:
        """Remove a connection that is known now, or has ended."""
        self._waiting.pop(task, None)
