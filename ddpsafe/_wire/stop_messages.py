"""What a rank tells its launcher about stopping."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class HeedsStop:
    """The user's function has called `stop_requested`, so asking it to stop has a point."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedToStop:
    """The rank itself has been sent a signal that asks it to stop."""

    signal_name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StopPromise:
    """The rank answers no call of `stop_requested` from that number on before it knows more."""

    call: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Stops:
    """A call of `stop_requested` has been answered with yes."""


StopMessage = HeedsStop | AskedToStop | StopPromise | Stops
