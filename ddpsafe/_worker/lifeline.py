"""A rank never outlives its launcher: three ways to notice, because each has a blind spot.

The kernel's parent-death signal reaches a rank that holds the GIL or hangs in C++, but it is bound
to the thread that started the rank, and forked bystanders do not matter to it. The pipe is seen
wherever Python still runs, also under the forkserver. The parent check covers the moment between
the start and both. (The launcher's guard process covers what descends from the rank.)
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
from typing import TYPE_CHECKING, Final

from ddpsafe._wire.channel import ALL_STARTED, CALL_NUMBER, STOP_AT, Claim

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_PR_SET_PDEATHSIG: Final = 1


def tie_to_launcher(
    pipe_fd: int,
    *,
    launcher_pid: int,
    is_child: bool,
    on_words: Mapping[bytes, Callable[[], None]],
    on_agreement: Callable[[int], None],
) -> None:
    """End this process, and what it started, when the launcher is gone.

    Args:
        pipe_fd: Read end of a pipe that only the launcher can write to.
        launcher_pid: The launcher.
        is_child: Whether it is our direct parent (not so under the forkserver).
        on_words: What to call, in a thread, when the launcher says a word such as `ASK_POSITION`.
            `ALL_STARTED` is taken as said, too, once no word can come any more.
        on_agreement: Called in that thread with the call of `stop_requested` that says so.
    """
    listeners = {
        **on_words,
        STOP_AT: lambda: on_agreement(*CALL_NUMBER.unpack(os.read(pipe_fd, CALL_NUMBER.size))),
    }
    # A session of its own: the launcher can end all of it, and the terminal's Ctrl-C goes to the
    # launcher alone, which then ends the ranks in order.
    with contextlib.suppress(PermissionError):
        os.setsid()
    _ask_kernel()
    if is_child and os.getppid() != launcher_pid:
        _end_session()
    threading.Thread(
        target=_listen, args=(pipe_fd, listeners), name="ddpsafe-lifeline", daemon=True
    ).start()


def _ask_kernel() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))


def _listen(pipe_fd: int, listeners: Mapping[bytes, Callable[[], None]]) -> None:
    """Obey until the launcher is gone, or the script has closed the pipe.

    The number may be a file of the script's by then; the end of the launcher is left to the kernel.
    """
    claim = Claim(pipe_fd)
    while claim.holds():
        try:
            word = os.read(pipe_fd, 1)
        except OSError:  # closed just now
            break
        if not word:
            _end_session()
        with contextlib.suppress(Exception):  # no answer is an answer too
            listeners[word]()
    listeners[ALL_STARTED]()


def _end_session() -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(128 + signal.SIGKILL)
