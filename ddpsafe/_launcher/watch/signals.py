"""Signals to the launcher while ranks run: noticed in the wait, handed back afterwards."""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import threading
import time
from typing import TYPE_CHECKING, Any, Final

from ddpsafe._launcher.processes.shutdown import remove_helpers_folder
from ddpsafe._launcher.watch.streams import say

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import TypeGuard

_TAKEN: Final = {
    signal.SIGINT: signal.default_int_handler,
    signal.SIGTERM: signal.SIG_DFL,
    signal.SIGHUP: signal.SIG_DFL,
    signal.SIGUSR1: signal.SIG_DFL,
}
# A request that is sent to a process group, or forwarded by a wrapper, may arrive twice.
_ECHO_S: Final = 1.0
_LONGEST_END_S: Final = 60.0


class SignalInbox:
    """The signal that arrived, and a descriptor that wakes a wait up.

    Attributes:
        received: The signal that says most: SIGINT, else one that wants the process to go, else
            SIGUSR1, which is a warning; ``None`` until one arrives.
        insists: Whether the ranks are not to be waited for: Ctrl-C, or a second SIGTERM.
            Slurm sends two by itself, so inside a Slurm job the second one says nothing.
        where: The node whose launcher `received` came to; empty for this one.
        closed: Set when the ranks have ended.
    """

    def __init__(self, read_fd: int, write_fd: int) -> None:
        """Own nothing: `open_inbox` closes the pipe."""
        self._read_fd = read_fd
        self._write_fd = write_fd
        self.closed = threading.Event()
        self.received: signal.Signals | None = None
        self.insists = False
        self.where = ""
        self._told_to_go_s: float | None = None

    def fileno(self) -> int:
        """Return the descriptor to wait on."""
        return self._read_fd

    def cancel(self) -> None:
        """Ask the launch of another thread to end, and wait until it has: the interpreter ends."""
        self.put(signal.SIGINT, None)
        self.closed.wait(_LONGEST_END_S)

    def put(self, signum: int, frame: object, where: str = "") -> None:
        """Be the handler; or take what came to another launcher."""
        del frame
        before = self.received
        if signum == signal.SIGINT:
            self.received, self.insists = signal.SIGINT, True
        elif signum == signal.SIGUSR1:
            self.received = self.received or signal.SIGUSR1
        else:
            now_s = time.monotonic()
            if self._told_to_go_s is None:
                self._told_to_go_s = now_s
            elif now_s - self._told_to_go_s > _ECHO_S and "SLURM_JOB_ID" not in os.environ:
                self.insists = True
            if not is_order(self.received):
                self.received = signal.Signals(signum)
        if self.received != before:
            self.where = where
        with contextlib.suppress(BlockingIOError):
            os.write(self._write_fd, b"!")


def is_order(received: signal.Signals | None) -> TypeGuard[signal.Signals]:
    """Tell whether a signal wants the process to go; SIGUSR1 only warns that one may come."""
    return received not in (None, signal.SIGUSR1)


@contextlib.contextmanager
def open_inbox(earlier: SignalInbox | None = None) -> Iterator[SignalInbox]:
    """Take over the signals that would end this process, where the script has not.

    An ignored signal stays ignored (nohup ignores SIGHUP), a handler of the user's stays in place.
    Outside the main thread Python allows no handlers; the main thread's own apply then. But when the
    interpreter ends before the launch, in a daemon thread, it is ended too: the ranks would be waited
    for by `multiprocessing`, and the frozen thread could not end them.

    Args:
        earlier: The inbox before. A signal that came there too late to be acted on is in this one, too.
    """
    read_fd, write_fd = os.pipe()
    os.set_blocking(write_fd, False)
    inbox = SignalInbox(read_fd, write_fd)
    before: dict[signal.Signals, Any] = {}
    try:
        if threading.current_thread() is threading.main_thread():
            for signum, default in _TAKEN.items():
                # A handler of `asyncio.run` cancels its task on the first SIGINT, which a task that
                # is blocked in a launch would not notice; what `pass_on` raises ends it as well.
                handler = signal.getsignal(signum)
                function = getattr(handler, "func", None)  # of a functools.partial
                of_asyncio = getattr(function, "__module__", None) == "asyncio.runners"
                if handler == default or of_asyncio:
                    before[signum] = signal.signal(signum, inbox.put)
            if signal.getsignal(signal.SIGCHLD) == signal.SIG_IGN:
                # The kernel would reap the ranks itself, and how they ended would be lost.
                before[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        else:
            atexit.register(inbox.cancel)
        if earlier is not None and earlier.received is not None:
            inbox.put(earlier.received, None, earlier.where)
        yield inbox
    finally:
        atexit.unregister(inbox.cancel)
        inbox.closed.set()
        for signum, handler in before.items():
            signal.signal(signum, handler)
        os.close(read_fd)
        os.close(write_fd)


@contextlib.contextmanager
def broken_pipes_raise() -> Iterator[None]:
    """Let a write whose reader has gone fail, also where a command line script has reset SIGPIPE.

    A rank, another node or ``ddpsafe status`` that goes would end this process without a word. Outside
    the main thread Python sets no handlers: there it is blocked, and `run_rank` unblocks it in ranks.
    """
    if signal.getsignal(signal.SIGPIPE) != signal.SIG_DFL:
        yield
    elif threading.current_thread() is threading.main_thread():
        # A handler, for programs that are started meanwhile would inherit that it is ignored.
        signal.signal(signal.SIGPIPE, lambda *_: None)
        try:
            yield
        finally:
            signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    else:
        before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGPIPE])
        try:
            yield
        finally:
            if signal.SIGPIPE not in before and signal.SIGPIPE in signal.sigpending():
                signal.sigwait([signal.SIGPIPE])
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def interrupts_kept() -> Iterator[None]:
    """Keep a Ctrl-C that arrives meanwhile: torch's import sometimes swallows it.

    Raises:
        KeyboardInterrupt: At the end, if one came.
    """
    with open_inbox() as inbox:
        yield
    if inbox.received is not None:
        pass_on(Interrupted(inbox.received))


class Interrupted(BaseException):
    """A signal ended the launch; on its way to where everything of the launch is gone.

    Attributes:
        signum: The signal.
        where: The node whose launcher received it; empty where that is not told.
        is_alone: Whether this node has ended without the others, whose ranks may go on.
    """

    def __init__(self, signum: signal.Signals, where: str = "", *, is_alone: bool = False) -> None:
        """Keep the signal."""
        super().__init__(signum)
        self.signum, self.where, self.is_alone = signum, where, is_alone


def pass_on(interrupted: Interrupted) -> None:
    """Do what the signal would have done without us, now that nothing of the launch is left here.

    Raises:
        KeyboardInterrupt: For SIGINT; any other signal ends the process.
    """
    signum = interrupted.signum
    if threading.current_thread() is threading.main_thread():
        on = f" on {interrupted.where}" if interrupted.where else ""
        rank = "rank of this node" if interrupted.is_alone else "rank"
        say(f"{signum.name}{on}; no {rank} is left running")
    if signum == signal.SIGINT:
        raise KeyboardInterrupt from None
    remove_helpers_folder()
    signal.raise_signal(signum)
