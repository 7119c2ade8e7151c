"""SIGTERM and SIGUSR1 to a rank, noted instead of obeyed once the rank asks whether to stop."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
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
        self.noted: signal.Signals | None = None

    def open(self) -> None:
        """Begin, where Python allows handlers: in the main thread."""
        if threading.current_thread() is not threading.main_thread():
            return
        for signum in _NOTED:
            before = signal.getsignal(signum)
            if before is not None and before != signal.SIG_IGN:
                self._before[signum] = before
                signal.signal(signum, self._note)

    def close(self) -> None:
        """Put back what was there, unless somebody else has a handler there by now."""
        if threading.current_thread() is not threading.main_thread():
            return
        for signum, before in self._before.items():
            if signal.getsignal(signum) == self._note:
                signal.signal(signum, before)
        self._before.clear()

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
        before = self._before.get(signal.Signals(signum))
        if os.getpid() != self._pid:
            signal.signal(signum, before)
            os.kill(os.getpid(), signum)
            return
        if self.noted is None:
            self.noted = signal.Signals(signum)
        if callable(before):
            before(signum, frame)
