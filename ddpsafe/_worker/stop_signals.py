"""The signals that ask a job to stop, as a rank and its helper processes receive them.

Schedulers send them to all processes of a job: to ranks, and to the processes that ranks have started
through `multiprocessing` (workers of a DataLoader, pools, managers), here called helpers. A helper that
died of the signal would take the rank with it before the rank has saved. So a helper does as its owner,
the process that started it: if the signal does not end the owner, it does not end the helper either.

The owner itself ends a helper by the same SIGTERM, as ``terminate()`` does, and a handler in Python does
not know who sent a signal. So the owner's `os.kill`, on which ``terminate()``, pools and psutil are built,
sends `END` as well. Programs that a rank starts in another way, such as with `subprocess`, are left alone.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import select
import signal
import sys
import threading
from multiprocessing import resource_tracker
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ddpsafe import _stdlib_private
from ddpsafe._host import act_by_default, end_by_signal, is_handled_in_c, read_stat
from ddpsafe._torch_private import WORKER_SIGNALS
from ddpsafe._wire.spec import HELPER

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from types import FrameType

STOP_SIGNALS: Final = (signal.SIGTERM, signal.SIGUSR1)
"""What schedulers send for preemption, a time limit or a drained node, and as a warning ahead of it."""

END: Final = int(signal.SIGRTMIN + 6 if hasattr(signal, "SIGRTMIN") else signal.SIGUSR2)
"""Sent to a helper after SIGTERM by its owner."""

_HELD_BACK: Final = frozenset({*map(int, STOP_SIGNALS), END})
# Without ddpsafe SIGTERM would end a helper at once. With it, Python code has to run in the helper. A signal
# that comes just before a call that blocks does not interrupt that call, so END is sent again; a helper that is
# locked up in a library since the fork never runs Python code, so at the end it is killed.
_END_WAITS_S: Final = (0.2, 0.8, 4.0)
_BY_SIGNAL: Final = 128
_ACTION_BYTES: Final = 512  # more than any platform's `struct sigaction`
_PR_SET_PDEATHSIG: Final = 1


class StopSignals:
    """Records stop signals between `open` and `close`.

    An ignored signal stays ignored. A handler of the user's is still called. A process that this one
    forks reacts to the signals as it would without ddpsafe.

    Attributes:
        noted: The first signal that arrived; ``None`` before.
    """

    def __init__(self) -> None:
        self.before: dict[signal.Signals, Any] = {}
        self._pid = os.getpid()
        self._is_open = False
        self.noted: signal.Signals | None = None

    def open(self) -> None:
        """Begin to record; only in the main thread, where Python allows handlers."""
        if threading.current_thread() is not threading.main_thread():
            return
        self._is_open = True
        for signum in STOP_SIGNALS:
            before = signal.getsignal(signum)
            if before not in (None, signal.SIG_IGN) and not is_handled_in_c(signum):
                self.before[signum] = before
                signal.signal(signum, self._note)

    def close(self) -> None:
        """Restore the previous handlers, except where the script has set another one."""
        if threading.current_thread() is not threading.main_thread():
            return
        self._is_open = False
        for signum, before in self.before.items():
            if signal.getsignal(signum) == self._note:
                signal.signal(signum, before)

    def raise_again(self) -> None:
        """Let the recorded signal have its default effect, if it has no handler of the user's."""
        if self.noted is not None and signal.getsignal(self.noted) == signal.SIG_DFL:
            end_by_signal(self.noted)

    def die_of_sigterm(self) -> None:
        """End this process by SIGTERM, from any thread, even while the main thread is in native code.

        If the user has a handler for SIGTERM, that one decides, as it does without ddpsafe.
        """
        if self.before.get(signal.SIGTERM) == signal.SIG_DFL and os.getpid() == self._pid:
            # Python's signal.signal works in the main thread only. None is SIG_DFL.
            ctypes.CDLL(None).signal(int(signal.SIGTERM), None)
            os.kill(self._pid, signal.SIGTERM)
            # The default action has no effect on the first process of a container. Nothing is flushed: the
            # main thread may hold the lock of a stream.
            os._exit(_BY_SIGNAL + signal.SIGTERM)

    def _note(self, signum: int, frame: FrameType | None) -> None:
        before = self.before[signal.Signals(signum)]
        is_noted = self._is_open and os.getpid() == self._pid
        if is_noted and self.noted is None:
            self.noted = signal.Signals(signum)
        if callable(before):
            before(signum, frame)
        elif not is_noted:  # in a fork, or called by a handler of the user's after `close`
            act_by_default(signum, frame)


def set_death_signal(signum: int) -> None:
    """Have the kernel send this process a signal when its parent's thread ends; 0 turns that off."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signum))


# ---- in the owner ----


def prepare_helpers() -> None:
    """Make the helpers that this process starts from now on outlive a signal that it outlives itself."""
    # A helper reads there what the signal does to its owner.
    if not Path("/proc/self/status").exists():
        return
    _stdlib_private.pass_to_children(HELPER, mark=True)
    _prepare_children()


def hold_in_server() -> None:
    """Block the signals in this fork server, and in what it forks until that is ready for them."""
    _Held.by_server = _HELD_BACK - signal.pthread_sigmask(signal.SIG_BLOCK, _HELD_BACK)
    _stdlib_private.before_own_code(_enter)


def _prepare_children() -> None:
    _stdlib_private.before_own_code(_enter)
    _stdlib_private.around_start(_signals_blocked)
    os.kill = _kill


def protect_torchs_helper() -> None:
    """Make the process that manages torch's shared files outlive the signals; once torch is loaded."""
    from ddpsafe._worker.torch_hooks import around_shared_files

    around_shared_files(lambda: _blocked(*STOP_SIGNALS))


@contextlib.contextmanager
def _signals_blocked(start_method: str | None, marks: dict[str, Any]) -> Iterator[None]:
    """Block the signals while a child starts, which inherits that, until `_enter` runs in it."""
    if start_method != "fork":
        # Python's resource tracker starts with the first such child. It handles SIGTERM by itself, and to
        # start it unblocks SIGTERM.
        with _blocked(signal.SIGUSR1):
            resource_tracker.ensure_running()
    marks[_HELD] = _Held(_HELD_BACK - signal.pthread_sigmask(signal.SIG_BLOCK, []))
    with _blocked(*_HELD_BACK):
        yield


@contextlib.contextmanager
def _blocked(*signals: int) -> Iterator[None]:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


_stock_kill: Final = os.kill


def _kill(pid: int, signum: int, /) -> None:
    """Send a signal, as `os.kill`; by SIGTERM, a helper of this process ends at once."""
    _stock_kill(pid, signum)
    if signum == signal.SIGTERM and _is_below(pid):
        _end_helper(pid)


def _is_below(pid: int) -> bool:
    """Return whether a process descends from this one."""
    with contextlib.suppress(OSError):
        while pid > 1:
            pid = read_stat(pid).parent
            if pid == os.getpid():
                return True
    return False


def _end_helper(pid: int) -> None:
    """Tell a helper that has been sent SIGTERM that its owner meant to end it."""
    if not _reacts(pid, END, "SigCgt", "SigBlk"):
        return
    pidfd = None
    with contextlib.suppress(OSError, AttributeError):  # this system has no pidfds
        pidfd = os.pidfd_open(pid)
    with contextlib.suppress(OSError):  # it has ended
        _stock_kill(pid, END)
    if pidfd is None:
        return
    thread = threading.Thread(
        target=_kill_if_stuck, args=(pid, pidfd), name="ddpsafe-end", daemon=True
    )
    try:
        thread.start()
    except RuntimeError:
        # From Python 3.12 on, no thread starts while the interpreter ends; or the limit is reached.
        _kill_if_stuck(pid, pidfd)


def _kill_if_stuck(pid: int, pidfd: int) -> None:
    ended = select.poll()
    ended.register(pidfd, select.POLLIN)
    with contextlib.suppress(OSError):  # it has ended
        for wait_s in _END_WAITS_S:
            # A helper with a handler of the user's for SIGTERM ignores END by then, see `_end`.
            if ended.poll(wait_s * 1000) or _reacts(pid, END, "SigIgn"):
                break
            if _reacts(pid, END, "SigCgt"):
                signal.pidfd_send_signal(pidfd, END)
        else:
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    os.close(pidfd)


def _reacts(pid: int, signum: int, *fields: str) -> bool:
    """Return whether one of a process's sets of signals in ``/proc/PID/status`` has the signal."""
    with contextlib.suppress(OSError, ValueError):
        for line in Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines():
            name, _, value = line.partition(":")
            if name == "State" and value.split()[0] in {"Z", "X"}:  # ended, but not reaped yet
                return False
            if name in fields and int(value, 16) >> (signum - 1) & 1:
                return True
    return False


# ---- in a helper ----


class _Held:
    """The signals that were blocked for the start of a child, which gets this with its `Process` object.

    Those that its parent had blocked itself are not among them: they stay blocked.

    Attributes:
        by_server: In a fork server, those that it blocks for all that it forks.
    """

    by_server: frozenset[int] = frozenset()

    def __init__(self, signals: frozenset[int]) -> None:
        self.signals = signals

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickle, (self.signals,)


_HELD: Final = "ddpsafe-held-signals"


def _unpickle(signals: frozenset[int]) -> _Held:
    """Return it in a new interpreter, which thereby prepares itself."""
    _stdlib_private.before_own_code(_enter)
    return _Held(signals)


def _enter(marks: Mapping[str, Any]) -> None:
    """Prepare this process for the signals, then unblock them."""
    held, _Held.by_server = _Held.by_server, frozenset()
    if _HELD in marks:
        held = marks[_HELD].signals
    try:
        if HELPER in marks:
            for signum in STOP_SIGNALS:
                handler: Any = signal.getsignal(signum)
                replaced = getattr(handler, "__self__", None)
                if isinstance(replaced, StopSignals):  # the rank's, in a fork
                    handler = replaced.before[signum]
                if handler == signal.SIG_DFL:
                    signal.signal(signum, _do_as_owner)
            signal.signal(END, _end)
            if WORKER_SIGNALS in sys.modules:
                from ddpsafe._worker.torch_hooks import after_worker_signals

                after_worker_signals(_replace_torchs)
                protect_torchs_helper()
            _prepare_children()  # they are helpers too
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, held)


def _do_as_owner(signum: int, frame: FrameType | None) -> None:
    """Outlive the signal if the owner does, else die of it."""
    del frame
    # The signal does not come again if the owner ends without having ended this process. Set first: an
    # owner that ends before that has ended when it is looked at.
    set_death_signal(signum)
    owner = multiprocessing.parent_process()
    if owner is None or not _reacts(owner.pid or 0, signum, "SigCgt", "SigIgn", "SigBlk"):
        act_by_default(signum, None)


def _end(signum: int, frame: FrameType | None) -> None:
    """Die of the SIGTERM that came before this signal, unless the script has a handler for it."""
    del frame
    if signal.getsignal(signal.SIGTERM) == _do_as_owner:
        act_by_default(signal.SIGTERM, None)
    signal.signal(signum, signal.SIG_IGN)


def _replace_torchs() -> None:
    """Replace the handler that a worker of torch's DataLoader sets for SIGTERM.

    Torch's handler is C code, and compares the sender with the parent: if they differ, it ends the worker by
    the signal, else with exit code 0, which torch's own check of dead workers ignores. For END it is right.
    """
    libc = ctypes.CDLL(None)
    action = ctypes.create_string_buffer(_ACTION_BYTES)
    if libc.sigaction(int(signal.SIGTERM), None, action) == 0:
        libc.sigaction(END, action, None)
    signal.signal(signal.SIGTERM, _do_as_owner)
