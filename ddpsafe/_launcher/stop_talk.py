"""What the launcher and one rank say to each other about stopping."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpsafe._wire.channel import ASK_STOP, CALL_NUMBER, END_NOW, STOP_AT
from ddpsafe._wire.stop_messages import AskedToStop, HeedsStop, StopMessage, StopPromise

if TYPE_CHECKING:
    from collections.abc import Callable


class StopTalk:
    """The launcher's side of it, for one rank.

    Attributes:
        heeds: Whether the rank's function asks now and then if it should stop.
        asked_by: The signal that asked the rank itself to stop.
        obeys: Whether its function has been told to stop.
        promise: The first call of `stop_requested` that it has not answered; ``None`` if unknown yet.
    """

    def __init__(self, say: Callable[[bytes], None]) -> None:
        """Talk through `say`, which drops the words if nobody listens."""
        self._say = say
        self._has_returned = False
        self.heeds = False
        self.asked_by: str | None = None
        self.obeys = False
        self.promise: int | None = None

    def note(self, message: StopMessage) -> None:
        """Take a message of the rank."""
        if isinstance(message, HeedsStop):
            self.heeds = True
        elif isinstance(message, AskedToStop):
            self.asked_by = message.signal_name
        elif not isinstance(message, StopPromise):
            self.obeys = True
        elif not self._has_returned:
            self.promise = message.call

    def note_return(self, calls: int) -> None:
        """Take note that its function has returned, after so many calls: there will be no more."""
        self._has_returned = True
        self.promise = calls + 1

    def ask(self) -> None:
        """Tell it that the job has been asked to stop; see `RankContext.stop_requested`."""
        self._say(ASK_STOP)

    def stop_at(self, call: int) -> None:
        """Tell it the call of `stop_requested` from which on the answer is yes."""
        self._say(STOP_AT + CALL_NUMBER.pack(call))

    def announce_end(self) -> None:
        """Tell it that the SIGTERM to come is no request."""
        self._say(END_NOW)
