"""How a rank learns that the job is to stop: over its launcher's pipe, or over the store."""

from __future__ import annotations

import atexit
import contextlib
import threading
from typing import TYPE_CHECKING, Final

from ddpsafe._clock import BoundedCall
from ddpsafe._wire.messages import AskedToStop, HeedsStop, StopPromise, Stops

if TYPE_CHECKING:
    import signal

    from ddpsafe._wire.channel import Sender
    from ddpsafe._worker.stop.agreement import StopCalls
    from ddpsafe._worker.store_sync import Keys


_LOOK_EVERY_S: Final = 0.5
_AGREE_EVERY_S: Final = 0.01
_LEAVE_S: Final = 2.0
_ASKED: Final = "stop/asked"
_AGREED: Final = "stop/agreed"


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

    def heed(self) -> None:
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
        except (RuntimeError, ValueError):  # the store went with rank 0, or a stranger wrote there
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
        """Return an empty list: the launcher knows, and ends the ranks if it takes too long."""
        return []

    def leave(self) -> None:
        """Tell nothing: the report of the rank's end says it."""
