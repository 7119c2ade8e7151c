"""`SpawnHandle`: ranks that run while the caller does something else."""

from __future__ import annotations

import atexit
import contextlib
import signal
import threading
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import TYPE_CHECKING

from ddpsafe._errors import DDPSafeError
from ddpsafe._launcher.presentation import end_with_the_script, presentable, spare
from ddpsafe._launcher.streams import say

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from multiprocessing.process import BaseProcess

    from ddpsafe._launcher.signals import SignalInbox
    from ddpsafe._launcher.worker import Worker

    OnStart = Callable[[Sequence[Worker], SignalInbox], None]


__tracebackhide__ = True  # pytest shows the line of the caller, not these


class SpawnHandle:
    """What ``spawn(join=False)`` returns, with the methods of torch's ProcessContext.

    The ranks are watched all the time, in a thread of their own, not only while `join` waits.

    Attributes:
        processes: The ranks' processes, by rank.
    """

    def __init__(self, run: Callable[[OnStart, threading.Event], object], *, daemon: bool) -> None:
        """Start, and return once every rank's process exists or the start has failed."""
        self.processes: list[BaseProcess] = []
        self._pids: list[int] = []
        self._inbox: SignalInbox | None = None
        self._result: Future[None] = Future()
        self._started = threading.Event()
        self._cancelled = threading.Event()
        self._run = run
        self._thread = threading.Thread(target=self._watch, name="ddpsafe-spawn", daemon=daemon)
        self._thread.start()
        try:
            self._started.wait()
        except BaseException:
            self._cancel()
            raise
        if self._result.done() and not self._pids:
            self._result.result()
        if daemon:
            # A daemonic thread is frozen at the interpreter's end and could not clean up.
            atexit.register(self._cancel)
        end_with_the_script(self._cancel)
        atexit.register(self._tell_failure)

    def pids(self) -> list[int]:
        """Return the ranks' process ids, by rank."""
        return list(self._pids)

    def join(self, timeout: float | None = None, grace_period: float | None = None) -> bool:
        """Wait for the ranks.

        Args:
            timeout: How long, in seconds; ``None`` until they have ended.
            grace_period: Accepted for torch's signature; ``timeouts.grace`` of the launch applies.

        Returns:
            True when all have ended well, False when the timeout passed first.

        Raises:
            LaunchError: A rank failed.
            KeyboardInterrupt: After the ranks have been ended.
        """
        del grace_period
        try:
            self._result.exception(timeout)
        except FutureTimeoutError:
            return False
        except KeyboardInterrupt:
            self._cancel()
            raise
        self._thread.join()
        atexit.unregister(self._cancel)
        atexit.unregister(self._tell_failure)
        spare(self._cancel)
        error = self._result.exception()
        if isinstance(error, DDPSafeError):
            raise presentable(error)
        self._result.result()
        return True

    def _cancel(self) -> None:
        self._cancelled.set()
        if self._inbox is not None and not self._inbox.closed.is_set():
            with contextlib.suppress(OSError):
                self._inbox.put(signal.SIGINT, None)
        self._thread.join()
        spare(self._cancel)

    def _tell_failure(self) -> None:
        """Say at the script's end what nobody has joined to hear."""
        error = self._result.exception() if self._result.done() else None
        if isinstance(error, DDPSafeError):
            say(f"ranks that nobody joined have failed: {error}")

    def _note(self, workers: Sequence[Worker], inbox: SignalInbox) -> None:
        self.processes = [worker.lend_process() for worker in workers]
        self._pids = [worker.pid for worker in workers if worker.pid is not None]
        self._inbox = inbox
        if self._cancelled.is_set():
            inbox.put(signal.SIGINT, None)
        self._started.set()

    def _watch(self) -> None:
        try:
            self._run(self._note, self._cancelled)
        except BaseException as exc:  # noqa: BLE001 - carried to whoever joins
            self._result.set_exception(exc)
        else:
            self._result.set_result(None)
        finally:
            self._started.set()
