"""How all ranks agree on the call of `stop_requested` at which they stop.

Each rank promises its first open call, and all stop at the highest promise. Requests and promises
travel through the launcher's pipes, or through the ranks' store.
"""

from __future__ import annotations

import atexit
import contextlib
import signal
import threading
from typing import TYPE_CHECKING, Final

from ddpsafe._clock import BoundedCall, Deadline
from ddpsafe._wire.messages import AcceptsStop, AskedToStop, StopPromise, Stops
from ddpsafe._worker.stop_signals import StopSignals

if TYPE_CHECKING:
    from datetime import timedelta

    from ddpsafe._job.store_keys import Keys
    from ddpsafe._wire.rank_pipe import Sender


_REQUEST_POLL_S: Final = 0.5
_AGREEMENT_POLL_S: Final = 0.01  # shorter: a rank may be waiting in a call by now
_LEAVE_LIMIT_S: Final = 2.0
_ASKED: Final = "stop/asked"
_AGREED: Final = "stop/agreed"


class NoAgreementError(Exception):
    """Some ranks sent no promise in time."""

    def __init__(self, deadline: Deadline) -> None:
        super().__init__(deadline)
        self.deadline = deadline


class StopCalls:
    """Counts this rank's calls of `stop_requested`, and returns yes from the agreed call on."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.count = 0
        self._promise: int | None = None
        self._agreed: int | None = None
        self._is_known = threading.Event()

    def promise(self) -> int:
        """Return the number, from 1, of the first call that waits for `agree`; always the same one."""
        with self._lock:
            if self._promise is None:
                self._promise = self.count + 1
            return self._promise

    def agree(self, call: int) -> None:
        """Answer yes from that call on."""
        self._agreed = call
        self._is_known.set()

    def give_up(self) -> None:
        """Stop waiting: there will be no agreement."""
        self._is_known.set()

    def answer(self, limit: timedelta | None) -> bool:
        """Count a call and answer it.

        `limit` is how long to wait for the others' promises; ``None`` if a launcher ends this process should
        they not arrive.

        Raises:
            NoAgreementError: The others did not promise within the limit, or cannot any more.
        """
        with self._lock:
            self.count += 1
            call, promise = self.count, self._promise
        if promise is None or call < promise:
            return False
        if self._agreed is None:
            deadline = Deadline.after(limit)
            self._is_known.wait(min(deadline.remaining_s(), threading.TIMEOUT_MAX))
            if self._agreed is None:
                raise NoAgreementError(deadline)
        assert self._agreed is not None  # noqa: S101 - known by now
        return call >= self._agreed


class Others:
    """How a rank agrees with the others on stopping: through its launcher, or a store.

    This class itself is for a world of one, which has no others to tell.
    """

    def __init__(self, calls: StopCalls) -> None:
        self.calls = calls

    def accept(self) -> None:
        """Report that this rank calls `stop_requested`; called once, at its first call."""

    def ask(self, signum: signal.Signals) -> None:  # noqa: ARG002 - others need it
        """Report that this rank received that signal, and so is asked to stop."""
        self.calls.agree(self.calls.promise())

    def confirm(self) -> None:
        """Report that `stop_requested` returned true on this rank for the first time."""

    def missing(self) -> list[int]:
        """Return the ranks that have not promised yet, as far as this rank knows."""
        return []

    def leave(self) -> None:
        """Report that this rank does not call `stop_requested` any more."""


class StopKeys(Others):
    """Requests and promises in the ranks' store, and a thread that polls for them.

    A request may reach one rank only: one pod is evicted, one process is signalled. From the rank's first
    call on, the thread polls for it twice a second, so that a call itself does not access the store. The
    store may be shared: the thread never waits in it.
    """

    def __init__(self, store: Keys, *, rank: int, world_size: int, calls: StopCalls) -> None:
        super().__init__(calls)
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._has_promised = threading.Lock()
        self._is_over = threading.Event()
        self._reader: threading.Thread | None = None

    def accept(self) -> None:
        self._reader = threading.Thread(target=self._read, name="ddpsafe-stop", daemon=True)
        self._reader.start()
        # The thread must not be inside the store's client while the interpreter shuts down.
        atexit.register(self._end_reading)

    def ask(self, signum: signal.Signals) -> None:
        with contextlib.suppress(RuntimeError):  # the store exited with rank 0
            self._store.set(_ASKED, signum.name)

    # It need not confirm: every rank reads the agreement from the store.

    def missing(self) -> list[int]:
        ranks = range(self._world_size)
        try:
            return [rank for rank in ranks if not self._store.check([_promise_of(rank)])]
        except RuntimeError:  # the store exited with rank 0
            return [0]

    def leave(self) -> None:
        """Stop polling, and promise now if not done, so that the others do not wait for this rank."""
        self._end_reading()
        # Bounded: if the store's host is down, the client would wait for it.
        BoundedCall(self._promise, name="ddpsafe-stop").wait(_LEAVE_LIMIT_S)

    def _end_reading(self) -> None:
        self._is_over.set()
        if self._reader is not None:
            self._reader.join(_REQUEST_POLL_S)
        atexit.unregister(self._end_reading)

    def _read(self) -> None:
        try:
            while not self._store.check([_ASKED]):
                if self._is_over.wait(_REQUEST_POLL_S):
                    return
            self._promise()
            while not self._store.check([_AGREED]):
                if self._is_over.wait(_AGREEMENT_POLL_S):
                    return
            self.calls.agree(int(self._store.get(_AGREED)))
        except (RuntimeError, ValueError):
            # The store exited with rank 0, or another user wrote to it.
            self.calls.give_up()

    def _promise(self) -> None:
        """Set this rank's promise, once; the last rank to do so sets the agreed call."""
        if not self._has_promised.acquire(blocking=False):
            return
        self._store.set(_promise_of(self._rank), str(self.calls.promise()))
        keys = [_promise_of(rank) for rank in range(self._world_size)]
        if self._store.check(keys):
            self._store.set(_AGREED, str(max(int(self._store.get(key)) for key in keys)))


def _promise_of(rank: int) -> str:
    return f"stop/promise/{rank}"


class LauncherLine(Others):
    """Reports about stopping to this rank's launcher, which finds the agreement.

    The launcher knows which ranks are missing, and ends the ranks if they take too long. That a rank leaves
    is implied by the report of its outcome.
    """

    def __init__(self, sender: Sender, calls: StopCalls) -> None:
        super().__init__(calls)
        self._sender = sender

    def accept(self) -> None:
        self._sender.send(AcceptsStop())

    def ask(self, signum: signal.Signals) -> None:
        self._sender.send(AskedToStop(signal_name=signum.name))

    def promise(self) -> None:
        """Report the first call that is still open."""
        self._sender.send(StopPromise(call=self.calls.promise()))

    def confirm(self) -> None:
        self._sender.send(Stops())


class Stopping:
    """One rank's state for `stop_requested`.

    Nothing changes in a rank that never calls it: signals keep their effect, and no thread starts. `limit` is
    that of `StopCalls.answer`.

    Attributes:
        signals: The stop signals that this process received.
        answered: Whether a call has returned true.
    """

    def __init__(self, others: Others, *, limit: timedelta | None = None) -> None:
        self.others = others
        self._limit = limit
        self.signals = StopSignals()
        self.answered = False
        self._is_open = False
        self._has_asked = False

    def answer(self) -> bool:
        """Answer a call; see `StopCalls.answer`."""
        if not self._is_open:
            self._is_open = True
            self.signals.open()
            self.others.accept()
        if self.signals.noted is not None and not self._has_asked:
            self._has_asked = True
            self.others.ask(self.signals.noted)
        answer = self.others.calls.answer(self._limit)
        if answer and not self.answered:
            self.answered = True
            self.others.confirm()
        return answer

    def close(self) -> None:
        """Restore the signal handlers; a SIGTERM that no call has answered ends the process now."""
        self.signals.close()
        # SIGUSR1 is only a warning, which a rank at its end does not need.
        if self.signals.noted == signal.SIGTERM and not self.answered:
            self.signals.raise_again()
