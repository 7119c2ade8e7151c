"""Stopping together through the launcher, in ranks that it has started."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpsafe._wire.stop_messages import AskedToStop, HeedsStop, StopPromise, Stops

if TYPE_CHECKING:
    import signal

    from ddpsafe._wire.channel import Sender
    from ddpsafe._worker.stop_calls import StopCalls


class LauncherLine:
    """What this rank tells its launcher about stopping; the launcher finds the agreement.

    Attributes:
        calls: This rank's part of it.
    """

    def __init__(self, sender: Sender, calls: StopCalls) -> None:
        """Keep the pipe."""
        self._sender = sender
        self.calls = calls

    def heed(self) -> None:
        """Say that asking this rank to stop has a point."""
        self._sender.send(HeedsStop())

    def ask(self, signum: signal.Signals) -> None:
        """Pass on that this rank has been asked."""
        self._sender.send(AskedToStop(signal_name=signum.name))

    def promise(self) -> None:
        """Tell which call is still open."""
        self._sender.send(StopPromise(call=self.calls.promise()))

    def confirm(self) -> None:
        """Tell that the answer was yes."""
        self._sender.send(Stops())

    def missing(self) -> list[int]:
        """Return nobody: the launcher knows, and ends the ranks if it takes too long."""
        return []

    def leave(self) -> None:
        """Tell nothing: the report of the rank's end says it."""
