"""All ranks stop at the same call of `stop_requested`: the signals, the count of calls, the agreement."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
from typing import TYPE_CHECKING, Any, Final, Protocol

from ddpsafe._clock import Deadline

if TYPE_CHECKING:
    from datetime import timedelta
    from types import FrameType


_NOTED: Final = (signal.SIGTERM, signal.SIGUSR1)
"""What schedulers send: preemption, time limits, drained nodes; and a warning ahead of them."""


class StopSignals:
    """Notes the signals between `open` and `close`.

    An ignored signal stays ignored. A handler that was there is called too. A process that is
    forked off meanwhile dies of the signal as it would without us.

    Attributes:
        noted: The first signal that came; ``None`` until then.
    """

    def __init__(self) -> None:
        """Touch nothing yet."""
        self._before: dict[signal.Signals, Any] = {}
        self._pid = os.getpid()
        self._is_open = False
        self.noted: signal.Signals | None = None

    def open(self) -> None:
        """Begin, where Python allows handlers: in the main thread."""
        if threading.current_thread() is not threading.main_thread():
            return
        self._is_open = True
        for signum in _NOTED:
            before = signal.getsignal(signum)
            if before is not None and before != signal.SIG_IGN:
                self._before[signum] = before
                signal.signal(signum, self._note)

    def close(self) -> None:
        """Put back what was there, unless another handler is there by now."""
        if threading.current_thread() is not threading.main_thread():
            return
        self._is_open = False
        for signum, before in self._before.items():
            if signal.getsignal(signum) == self._note:
                signal.signal(signum, before)

    def raise_again(self) -> None:
        """Let the signal do what it would have done without us."""
        if self.noted is not None and signal.getsignal(self.noted) == signal.SIG_DFL:
            signal.raise_signal(self.noted)

    def die_of_sigterm(self) -> None:
        """End by SIGTERM after all, from any thread, while the main one is in native code too.

        Where a handler of the user's stands behind ours, that one decides, as it does without us.
        """
        if self._before.get(signal.SIGTERM) == signal.SIG_DFL and os.getpid() == self._pid:
            ctypes.CDLL(None).signal(
                int(signal.SIGTERM), None
            )  # Python allows it in one thread only
            os.kill(self._pid, signal.SIGTERM)

    def _note(self, signum: int, frame: FrameType | None) -> None:
        before = self._before[signal.Signals(signum)]
        is_noted = self._is_open and os.getpid() == self._pid
        if is_noted and self.noted is None:
            self.noted = signal.Signals(signum)
        if callable(before):
            before(signum, frame)
        elif not is_noted:  # in a fork, or a handler of the user's calls this one after `close`
            signal.signal(signum, before)
            os.kill(os.getpid(), signum)


class NoAgreementError(Exception):
    """Other ranks have promised nothing in time.

    Attributes:
        deadline: How long it was waited for them.
    """

    def __init__(self, deadline: Deadline) -> None:
        """Keep the deadline."""
        super().__init__(deadline)
        self.deadline = deadline


class StopCalls:
    """Counts this rank's calls, and knows which one is the first to be answered with yes."""

    def __init__(self) -> None:
        """Start before the first call; no rank has been asked to stop."""
        self._lock = threading.Lock()
        self._count = 0
        self._promise: int | None = None
        self._agreed: int | None = None
        self._is_known = threading.Event()

    @property
    def count(self) -> int:
        """How many calls there have been."""
        return self._count

    def promise(self) -> int:
        """Return the number of the first call, from 1, that waits for `agree`; always the same."""
        with self._lock:
            if self._promise is None:
                self._promise = self._count + 1
            return self._promise

    def agree(self, call: int) -> None:
        """Say yes from that call on."""
        self._agreed = call
        self._is_known.set()

    def give_up(self) -> None:
        """Wait no more: there will be no agreement."""
        self._is_known.set()

    def answer(self, limit: timedelta | None) -> bool:
        """Count a call and answer it.

        Args:
            limit: How long to wait for the others' promises; ``None`` where the launcher ends
                this process if they do not come.

        Raises:
            NoAgreementError: The limit passed before the others had promised, or they cannot.
        """
        with self._lock:
            self._count += 1
            call, promise = self._count, self._promise
        if promise is None or call < promise:
            return False
        if self._agreed is None:
            deadline = Deadline.after(limit)
            self._is_known.wait(min(deadline.remaining_s(), threading.TIMEOUT_MAX))
            if self._agreed is None:
                raise NoAgreementError(deadline)
        assert self._agreed is not None  # noqa: S101 - known by now
        return call >= self._agreed


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


class Alone:
    """The others in a world of one."""

    def __init__(self, calls: StopCalls) -> None:
        """Agree with oneself."""
        self._calls = calls

    def heed(self) -> None:
        """Do nothing: there are no others."""

    def ask(self, signum: signal.Signals) -> None:
        """Stop at once."""
        del signum
        self._calls.agree(self._calls.promise())

    def confirm(self) -> None:
        """Do nothing: there are no others."""

    def missing(self) -> list[int]:
        """Return an empty list: there are no others."""
        return []

    def leave(self) -> None:
        """Do nothing: there are no others."""


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
        """Ask no more, so that the others do not wait for this rank."""
        self._others.leave()

    def close(self) -> None:
        """Give the signals back; one that was not answered ends the process after all.

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
