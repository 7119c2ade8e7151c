"""All ranks stop at the same call of `stop_requested`.

The signals, the count of calls and the agreement; and how the request travels: over the launcher's
pipe, or over the ranks' store.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import signal
import threading
from typing import TYPE_CHECKING, Any, Final, Protocol

from ddpsafe._clock import BoundedCall, Deadline
from ddpsafe._wire.messages import AcceptsStop, AskedToStop, StopPromise, Stops

if TYPE_CHECKING:
    from datetime import timedelta
    from types import FrameType

    from ddpsafe._wire.rank_pipe import Sender
    from ddpsafe._worker.store_sync import Keys


_NOTED: Final = (signal.SIGTERM, signal.SIGUSR1)
"""What schedulers send: preemption, time limits, drained nodes; and a warning ahead of them."""
_LOOK_EVERY_S: Final = 0.5
_AGREE_EVERY_S: Final = 0.01
_LEAVE_S: Final = 2.0
_ASKED: Final = "stop/asked"
_AGREED: Final = "stop/agreed"


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

    def accept(self) -> None:
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

    def accept(self) -> None:
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


class StopBoard:
    """The board on which ranks write requests and promises, and a thread that reads it.

    A request may come to one rank only: one pod is evicted, one process is signalled. The thread
    looks for it twice a second, from the rank's first call on, so a call itself costs no word with
    the store.

    Args:
        store: The ranks' store; one look at a time, so it may be shared.
        rank: This rank.
        world_size: How many there are.
        calls: This rank's part of the agreement.
    """

    def __init__(self, store: Keys, *, rank: int, world_size: int, calls: StopCalls) -> None:
        """Read nothing yet."""
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._calls = calls
        self._has_promised = threading.Lock()
        self._is_over = threading.Event()
        self._reader: threading.Thread | None = None

    def accept(self) -> None:
        """Begin to read."""
        self._reader = threading.Thread(target=self._read, name="ddpsafe-stop", daemon=True)
        self._reader.start()
        # A thread inside the store's client must not be there when the interpreter goes.
        atexit.register(self._end_reading)

    def ask(self, signum: signal.Signals) -> None:
        """Write the request."""
        with contextlib.suppress(RuntimeError):  # the store went with rank 0
            self._store.set(_ASKED, signum.name)

    def confirm(self) -> None:
        """Say nothing: whoever reads the board knows."""

    def missing(self) -> list[int]:
        """Return the ranks that have promised nothing yet."""
        ranks = range(self._world_size)
        try:
            return [rank for rank in ranks if not self._store.check([_promise_of(rank)])]
        except RuntimeError:  # the store went with rank 0
            return [0]

    def leave(self) -> None:
        """Stop reading; promise whatever is still open, so that the others do not wait for this rank."""
        self._end_reading()
        # The host of the store may be gone, and its client would wait for it.
        BoundedCall(self._promise, name="ddpsafe-stop").wait(_LEAVE_S)

    def _end_reading(self) -> None:
        self._is_over.set()
        if self._reader is not None:
            self._reader.join(_LOOK_EVERY_S)
        atexit.unregister(self._end_reading)

    def _read(self) -> None:
        try:
            while not self._store.check([_ASKED]):
                if self._is_over.wait(_LOOK_EVERY_S):
                    return
            self._promise()
            while not self._store.check([_AGREED]):
                if self._is_over.wait(_AGREE_EVERY_S):
                    return
            self._calls.agree(int(self._store.get(_AGREED)))
        except (
            RuntimeError,
            ValueError,
        ):  # the store went with rank 0, or another user wrote there
            self._calls.give_up()

    def _promise(self) -> None:
        """Write this rank's promise, once; the last one to do so writes what all agree on."""
        if not self._has_promised.acquire(blocking=False):
            return
        self._store.set(_promise_of(self._rank), str(self._calls.promise()))
        keys = [_promise_of(each) for each in range(self._world_size)]
        if self._store.check(keys):
            self._store.set(_AGREED, str(max(int(self._store.get(key)) for key in keys)))


def _promise_of(rank: int) -> str:
    return f"stop/promise/{rank}"


class LauncherLine:
    """What this rank tells its launcher about stopping; the launcher finds the agreement.

    Attributes:
        calls: This rank's part of it.
    """

    def __init__(self, sender: Sender, calls: StopCalls) -> None:
        """Keep the pipe."""
        self._sender = sender
        self.calls = calls

    def accept(self) -> None:
        """Say that asking this rank to stop has a point."""
        self._sender.send(AcceptsStop())

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
        """Return an empty list: the launcher knows, and ends the ranks if it takes too long."""
        return []

    def leave(self) -> None:
        """Tell nothing: the report of the rank's end says it."""


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
            self._others.accept()
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
