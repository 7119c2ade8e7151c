"""What makes `spawn` a drop-in for torch's: its handle, and errors that are also torch's."""

from __future__ import annotations

import atexit
import contextlib
import functools
import signal
import threading
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import TYPE_CHECKING, Any, Final, cast

from ddpsafe._errors import (
    DDPSafeError,
    RankExitedError,
    RankFailedError,
    RankKilledError,
    RankLeftEarlyError,
    RankRaisedError,
    portable,
    rebuild,
)
from ddpsafe._launcher.uncaught import cancel_if_uncaught, presentable, remove_cancel
from ddpsafe._launcher.watch.streams import write_message
from ddpsafe._logging import json_scope

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from multiprocessing.process import BaseProcess

    from ddpsafe._launcher.processes.rank_process import RankProcess
    from ddpsafe._launcher.watch.signals import SignalInbox

    OnStart = Callable[[Sequence[RankProcess], SignalInbox], None]
    GracePeriod = Callable[[], float | None]


__tracebackhide__ = True  # pytest shows the caller's line, not the frames of this file


def as_torchs(error: DDPSafeError) -> DDPSafeError:
    """Return an error of `spawn` as one that ``except torch.multiprocessing.Process…`` also catches.

    Its class inherits ddpsafe's and torch's, under ddpsafe's name. A timeout stays as it is.
    """
    # Python cannot combine `TimeoutError`, the base of a timeout, with torch's classes.
    if type(error) not in _TORCHS or not isinstance(error, RankFailedError):
        return error
    return _rebuild_as_torchs(type(error), error.args, dict(error.__dict__), error.__cause__)


_TORCHS: Final[dict[type[DDPSafeError], str]] = {
    RankRaisedError: "ProcessRaisedException",
    RankExitedError: "ProcessExitedException",
    RankKilledError: "ProcessExitedException",
    RankLeftEarlyError: "ProcessExitedException",
}


@functools.cache
def _combined(cls: type[RankFailedError]) -> type[RankFailedError]:
    """Make the class that inherits both; only here, since it needs torch, which ranks have loaded."""
    import torch.multiprocessing

    class Both(cls, getattr(torch.multiprocessing, _TORCHS[cls])):  # type: ignore[misc,valid-type]  # made for each pair
        def __str__(self) -> str:
            return f"{super().__str__()}\n\n{self.torchs_line}"

        def __reduce__(self) -> tuple[object, ...]:
            facts = dict(self.__dict__)
            return (_rebuild_as_torchs, (cls, self.args, facts, portable(self.__cause__)))

        @property
        def signal(self) -> int:
            return -int(self.exit_code)  # as `multiprocessing` counts, and torch

    Both.__name__, Both.__qualname__, Both.__module__ = cls.__name__, cls.__qualname__, "ddpsafe"
    Both.__doc__ = cls.__doc__
    return Both


def _rebuild_as_torchs(
    cls: type[RankFailedError],
    args: tuple[object, ...],
    facts: dict[str, Any],
    cause: BaseException | None,
) -> RankFailedError:
    error: Any = rebuild(_combined(cls), args, facts, cause)  # type: ignore[arg-type]  # a type is hashable
    error.error_index, error.error_pid = error.rank, error.pid
    outcome = error.outcomes.get(error.rank)
    if cls is RankRaisedError:
        raised = None if outcome is None else outcome.raised
        head = f"-- Process {error.rank} terminated with the following error:"
        what = ""
        if raised is not None:
            # An error of ddpsafe is shown in full above this line.
            text = raised.message if raised.explanation is None else raised.explanation.what
            what = ": ".join(filter(None, (raised.type_name, text)))
        error.torchs_line = f"{head}\n{what}"
        error.msg = f"\n\n{head}\n{'' if raised is None else raised.traceback}"
        return cast("RankFailedError", error)
    error.signal_name = None if outcome is None else outcome.signal_name
    if cls is RankKilledError:
        error.exit_code = min(error.exit_code, 128 - error.exit_code)  # -15 for 143, and for -15
        error.signal_name = error.signal_name or f"<Unknown signal {-error.exit_code}>"
    # A rank that left early has exited with 0. `exit_code` stays 1, so that the script fails.
    code = 0 if cls is RankLeftEarlyError else error.exit_code
    how = f"signal {error.signal_name}" if error.signal_name else f"exit code {code}"
    error.torchs_line = error.msg = f"process {error.rank} terminated with {how}"
    return cast("RankFailedError", error)


class SpawnHandle:
    """What ``spawn(join=False)`` returns, with the methods of torch's ProcessContext.

    A thread watches the ranks all the time, not only while `join` waits.

    Attributes:
        processes: The ranks' processes, by rank.
        sentinels: The rank of each `BaseProcess.sentinel`, until `join` has seen the ranks end.
        error_files: The path of each rank's stderr with its traceback, by rank.
    """

    def __init__(
        self, run: Callable[[OnStart, threading.Event, GracePeriod], object], *, daemon: bool
    ) -> None:
        """Start the ranks; return once every process exists, or raise if the start has failed."""
        self.processes: list[BaseProcess] = []
        self.sentinels: dict[int, int] = {}
        self.error_files: list[str] = []
        self._grace_period: float | None = None
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
            # A daemon thread is frozen when the interpreter ends, and could not clean up.
            atexit.register(self._cancel)
        cancel_if_uncaught(self._cancel)
        atexit.register(self._report_failure)

    def pids(self) -> list[int]:
        """Return the ranks' process ids, by rank."""
        return list(self._pids)

    def join(self, timeout: float | None = None, grace_period: float | None = None) -> bool:
        """Wait for the ranks.

        Args:
            timeout: How long, in seconds; with ``None`` until they have ended.
            grace_period: How many seconds the other ranks may keep running once one has failed, and
                again after SIGTERM; ``None`` ends them at once, with ``timeouts.grace``. With several
                nodes, the longest of all their calls counts on each of them.

        Returns:
            True when all have succeeded, False when the timeout passed first.

        Raises:
            LaunchError: A rank failed.
            KeyboardInterrupt: After the ranks have been ended.
        """
        self._grace_period = grace_period
        try:
            self._result.exception(timeout)
        except FutureTimeoutError:
            return False
        except KeyboardInterrupt:
            self._cancel()
            raise
        self._thread.join()
        atexit.unregister(self._cancel)
        atexit.unregister(self._report_failure)
        remove_cancel(self._cancel)
        self.sentinels.clear()
        error = self._result.exception()
        if isinstance(error, DDPSafeError):
            raise presentable(as_torchs(error))
        self._result.result()
        return True

    def _cancel(self) -> None:
        self._cancelled.set()
        if self._inbox is not None and not self._inbox.closed.is_set():
            with contextlib.suppress(OSError):
                self._inbox.put(signal.SIGINT, None)
        self._thread.join()
        remove_cancel(self._cancel)

    def _report_failure(self) -> None:
        """Report, when the script ends, a failure of ranks that were never joined."""
        error = self._result.exception() if self._result.done() else None
        if isinstance(error, DDPSafeError):
            with json_scope(on=error.shown_as_json):
                write_message(f"ranks that were never joined have failed: {error}")

    def _note(self, processes: Sequence[RankProcess], inbox: SignalInbox) -> None:
        self.processes = [process.lend_process() for process in processes]
        self.sentinels = {process.sentinel: rank for rank, process in enumerate(self.processes)}
        self.error_files = [process.spec.logs.stderr for process in processes]
        self._pids = [process.pid for process in processes if process.pid is not None]
        self._inbox = inbox
        if self._cancelled.is_set():  # before there was an inbox
            inbox.put(signal.SIGINT, None)
        self._started.set()

    def _watch(self) -> None:
        try:
            self._run(self._note, self._cancelled, lambda: self._grace_period)
        except BaseException as exc:  # noqa: BLE001 - raised again by `join`
            self._result.set_exception(exc)
        else:
            self._result.set_result(None)
        finally:
            self._started.set()
