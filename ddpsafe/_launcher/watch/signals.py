"""Signals to the launcher while ranks run: they wake its wait, and take effect after the cleanup."""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import threading
import time
from typing import TYPE_CHECKING, Any, Final, NoReturn

from ddpsafe._host import act_by_default, end_by_signal, is_handled_in_c
from ddpsafe._launcher.processes.shutdown import remove_helpers_folder
from ddpsafe._launcher.watch.streams import write_message

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import TypeGuard

_TAKEN: Final = {
    signal.SIGINT: signal.default_int_handler,
    signal.SIGTERM: signal.SIG_DFL,
    signal.SIGHUP: signal.SIG_DFL,
    signal.SIGQUIT: signal.SIG_DFL,  # Ctrl-\, after which the kernel may write a core file, as without ddpsafe
    signal.SIGUSR1: signal.SIG_DFL,
}
# One request that is sent to a process group, and forwarded by a wrapper, arrives twice.
_ECHO_S: Final = 1.0
_LONGEST_CANCEL_S: Final = 60.0

NONE_LEFT: Final = "no rank is left running"
NONE_LEFT_HERE: Final = "no rank of this node is left running"


class SignalInbox:
    """The signal that arrived, and a descriptor that wakes a wait up.

    Attributes:
        received: The most urgent signal so far: SIGINT, else one that asks the process to end, else
            SIGUSR1, which only warns; ``None`` until one arrives.
        insists: Whether to end the ranks without waiting for them: Ctrl-C, or a second SIGTERM.
        where: The node whose launcher received the signal; empty in a job of one node.
        here: This node; empty in a job of one node.
        closed: Set when the ranks have ended.
    """

    def __init__(self, read_fd: int, write_fd: int) -> None:
        self._read_fd = read_fd
        self._write_fd = write_fd
        self.closed = threading.Event()
        self.received: signal.Signals | None = None
        self.insists = False
        self.where = self.here = ""
        self._first_order_s: float | None = None

    def fileno(self) -> int:
        """Return the descriptor to wait on."""
        return self._read_fd

    def cancel(self) -> None:
        """Ask a launch in another thread to end, and wait for that; called when the interpreter ends."""
        self.put(signal.SIGINT, None)
        self.closed.wait(_LONGEST_CANCEL_S)

    def put(self, signum: int, frame: object, where: str = "") -> None:
        """Record a signal: as the handler in this process, or one that another launcher received."""
        del frame
        before = self.received
        if signum == signal.SIGINT:
            self.received, self.insists = signal.SIGINT, True
        elif signum == signal.SIGUSR1:
            self.received = self.received or signal.SIGUSR1
        else:
            now_s = time.monotonic()
            if self._first_order_s is None:
                self._first_order_s = now_s
            # Slurm sends two by itself, so inside a Slurm job the second one has no meaning.
            elif now_s - self._first_order_s > _ECHO_S and "SLURM_JOB_ID" not in os.environ:
                self.insists = True
            if not is_order(self.received):
                self.received = signal.Signals(signum)
        if self.received != before:
            self.where = where or self.here
        with contextlib.suppress(BlockingIOError):
            os.write(self._write_fd, b"!")

    def note_answered(self) -> None:
        """Note that the user has been told what follows: only after that is another signal impatience.

        A launcher that is held up, by a disk for example, handles an echo of the first one late.
        """
        if self._first_order_s is not None:
            self._first_order_s = time.monotonic()


def is_order(received: signal.Signals | None) -> TypeGuard[signal.Signals]:
    """Return whether a signal asks the process to end; SIGUSR1 only warns that one may follow."""
    return received not in (None, signal.SIGUSR1)


@contextlib.contextmanager
def open_inbox(earlier: SignalInbox | None = None) -> Iterator[SignalInbox]:
    """Take over the signals that would end this process, unless the script handles them.

    An ignored signal stays ignored (nohup ignores SIGHUP), and the user's handlers stay in place.

    A signal that `earlier`, the previous inbox, received too late to act on is put in this one.
    """
    read_fd, write_fd = os.pipe()
    os.set_blocking(write_fd, False)
    inbox = SignalInbox(read_fd, write_fd)
    before: dict[signal.Signals, Any] = {}
    try:
        if threading.current_thread() is threading.main_thread():
            for signum, default in _TAKEN.items():
                # The handler of `asyncio.run` cancels its task on the first SIGINT. A task that is
                # blocked in a launch would not notice; the exception of `pass_on` ends it as well.
                handler = signal.getsignal(signum)
                function = getattr(handler, "func", None)  # of a functools.partial
                of_asyncio = getattr(function, "__module__", None) == "asyncio.runners"
                is_free = handler in (default, act_by_default) and not is_handled_in_c(signum)
                if is_free or of_asyncio:
                    before[signum] = signal.signal(signum, inbox.put)
            if signal.getsignal(signal.SIGCHLD) == signal.SIG_IGN:
                # The kernel would reap the ranks itself, and their exit status would be lost.
                before[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        else:
            # Python sets handlers in the main thread only. This thread may be a daemon, which is frozen
            # when the interpreter ends: it could not end the ranks, for which `multiprocessing` waits.
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
    """Make a write to a closed pipe or socket fail, even if the script has set SIGPIPE to its default.

    Else SIGPIPE would end this process silently when a rank, another node or ``ddpsafe status`` exits.
    """
    if signal.getsignal(signal.SIGPIPE) != signal.SIG_DFL:
        yield
    elif threading.current_thread() is threading.main_thread():
        # Not SIG_IGN, which programs that are started during the launch would inherit.
        signal.signal(signal.SIGPIPE, lambda *_: None)
        try:
            yield
        finally:
            signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    else:
        # Python sets handlers in the main thread only. Ranks inherit the mask; `run_rank` undoes it.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGPIPE])
        try:
            yield
        finally:
            if signal.SIGPIPE not in before and signal.SIGPIPE in signal.sigpending():
                signal.sigwait([signal.SIGPIPE])
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def interrupts_kept() -> Iterator[None]:
    """Hold a Ctrl-C back until the block ends: torch's import sometimes swallows it.

    Raises:
        KeyboardInterrupt: At the end, if Ctrl-C was pressed.
    """
    with open_inbox() as inbox:
        yield
    if inbox.received is not None:
        pass_on(Interrupted(inbox.received))


class Interrupted(BaseException):
    """A signal ended the launch; raised through the cleanup to where `pass_on` can act on it.

    Attributes:
        where: The node whose launcher received it; empty for this one, or if unknown.
        left: Which ranks are left running, as a sentence.
    """

    def __init__(self, signum: signal.Signals, where: str = "", left: str = "") -> None:
        super().__init__(signum)
        self.signum, self.where, self.left = signum, where, left or NONE_LEFT


def pass_on(interrupted: Interrupted) -> NoReturn:
    """Do what the signal does without ddpsafe, now that the launch has been cleaned up.

    Raises:
        KeyboardInterrupt: For SIGINT; any other signal ends the process.
        SystemExit: The script has a handler for the signal, and that has returned.
    """
    signum = interrupted.signum
    if threading.current_thread() is threading.main_thread():
        on = f" on {interrupted.where}" if interrupted.where else ""
        write_message(f"{signum.name}{on}; {interrupted.left}")
    if signum == signal.SIGINT:
        raise KeyboardInterrupt from None
    remove_helpers_folder()
    end_by_signal(signum)
