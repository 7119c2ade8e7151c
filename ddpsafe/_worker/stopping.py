"""The request to stop: from whoever was asked first to an answer that all ranks give at one call."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Protocol

from ddpsafe._worker.stop_signals import StopSignals

if TYPE_CHECKING:
    from datetime import timedelta

    from ddpsafe._worker.stop_calls import StopCalls


class Others(Protocol):
    """How a rank's part in stopping reaches the other ranks: through its launcher, or a store."""

    def heed(self) -> None:
        """Say that this rank asks whether it should stop; called at its first call."""

    def ask(self, signum: signal.Signals) -> None:
        """Say that this rank has been asked to stop, by that signal."""

    def confirm(self) -> None:
        """Say that this rank has answered yes for the first time."""

    def missing(self) -> list[int]:
        """Return the ranks that have promised nothing yet."""

    def leave(self) -> None:
        """Say that this rank asks no more."""


class Nobody:
    """The others in a world of one."""

    def __init__(self, calls: StopCalls) -> None:
        """Agree with oneself."""
        self._calls = calls

    def heed(self) -> None:
        """Tell nobody."""

    def ask(self, signum: signal.Signals) -> None:
        """Stop at once."""
        del signum
        self._calls.agree(self._calls.promise())

    def confirm(self) -> None:
        """Tell nobody."""

    def missing(self) -> list[int]:
        """Return nobody."""
        return []

    def leave(self) -> None:
        """Tell nobody."""


class Stopping:
    """One rank's part in stopping together.

    A rank that never asks is not touched: its signals keep their meaning, and it has no thread.

    Attributes:
        calls: The agreement.
        signals: What this process was sent.
        answered: Whether a call has been answered with yes.
    """

    def __init__(self, calls: StopCalls, others: Others, *, limit: timedelta | None = None) -> None:
        """Wait for the first call.

        Args:
            calls: The agreement.
            others: How to reach the other ranks.
            limit: See `StopCalls.answer`.
        """
        self.calls = calls
        self._limit = limit
        self.signals = StopSignals()
        self.answered = False
        self._others = others
        self._is_open = False
        self._has_asked = False

    def answer(self) -> bool:
        """Answer a call; see `StopCalls.answer`."""
        if not self._is_open:
            self._is_open = True
            self.signals.open()
            self._others.heed()
        if self.signals.noted is not None and not self._has_asked:
            self._has_asked = True
            self._others.ask(self.signals.noted)
        answer = self.calls.answer(self._limit)
        if answer and not self.answered:
            self.answered = True
            self._others.confirm()
        return answer

    def missing(self) -> list[int]:
        """Return the ranks on which the answer waits."""
        return self._others.missing()

    def leave(self) -> None:
        """Ask no more, so that nobody waits for this rank."""
        self._others.leave()

    def close(self) -> None:
        """Give the signals back; one that nobody has answered ends the process after all.

        SIGUSR1 is only a warning, and a rank that has come to its end needs none.
        """
        self.signals.close()
        if self.signals.noted == signal.SIGTERM and not self.answered:
            self.signals.raise_again()


_current: Stopping | None = None


def enter(stopping: Stopping | None) -> Stopping | None:
    """Make it this process'; return the one before."""
    global _current
    before, _current = _current, stopping
    return before


def find_current() -> Stopping | None:
    """Return this process' part, or ``None`` outside of any rank."""
    return _current
