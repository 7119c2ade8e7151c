"""How an error leaves the library: with a short traceback, no live ranks, and its own exit code."""

from __future__ import annotations

import sys
import traceback
from typing import TYPE_CHECKING, Any, Final

from ddpsafe._errors import DDPSafeError, PreemptedError, causes_of
from ddpsafe._launcher.watch.streams import write_line, write_message
from ddpsafe._logging import json_of_error, json_scope
from ddpsafe._wire.exception_facts import is_internal

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

_cancels: Final[set[Callable[[], object]]] = set()


def presentable(error: DDPSafeError) -> DDPSafeError:
    """Prepare an error for the user, the last thing before it leaves the library, and return it."""
    if error.exit_code != 1 or error.shown_as_json:
        _hook().sets_exit_code = True
    return without_frames(error)


def without_frames(error: DDPSafeError) -> DDPSafeError:
    """Return an error without its frames, and those of its causes that cannot be the user's."""
    # The frames of ddpsafe and tenacity add nothing, and push the message off the screen: for a
    # host that does not resolve, they were 44 lines before its three.
    for cause in causes_of(error)[1:]:
        frames = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(cause.__traceback__)]
        if all(map(is_internal, frames)):
            cause.__traceback__ = None
    return error.with_traceback(None)


def cancel_if_uncaught(cancel: Callable[[], object]) -> None:
    """Call `cancel` when an uncaught exception ends the script, Ctrl-C included."""
    # Ranks have sessions of their own, which the terminal's Ctrl-C does not reach, and at exit the
    # interpreter waits for the threads that watch them.
    _hook()
    _cancels.add(cancel)


def remove_cancel(cancel: Callable[[], object]) -> None:
    """Undo `cancel_if_uncaught`; remove the hook if nothing else needs it."""
    _cancels.discard(cancel)
    hook = sys.excepthook
    if isinstance(hook, _Uncaught) and not _cancels and not hook.sets_exit_code:
        sys.excepthook = hook.before


def _hook() -> _Uncaught:
    if not isinstance(sys.excepthook, _Uncaught):
        sys.excepthook = _Uncaught(sys.excepthook)
    return sys.excepthook


class _Uncaught:
    """Hook for uncaught exceptions: shows the exception, cancels launches, sets the exit code.

    Attributes:
        before: The previous hook, which shows the traceback.
        sets_exit_code: Whether an error has left the library whose exit code Python would not use.
    """

    def __init__(self, before: Callable[[type[BaseException], Any, Any], object]) -> None:
        self.before = before
        self.sets_exit_code = False

    def __call__(
        self, kind: type[BaseException], raised: BaseException, traceback: TracebackType | None
    ) -> None:
        try:
            if isinstance(raised, PreemptedError):
                with json_scope(on=raised.shown_as_json):
                    write_message(str(raised))  # not a failure, so no traceback
            elif isinstance(raised, DDPSafeError) and raised.shown_as_json:
                write_line(json_of_error(raised))
            else:
                self.before(kind, raised, traceback)
        finally:  # the previous hook may raise SystemExit itself
            if not _has_prompt():
                for cancel in list(_cancels):
                    cancel()
        if isinstance(raised, DDPSafeError) and raised.exit_code != 1 and not _has_prompt():
            code = raised.exit_code
            # Python exits with 1 after any traceback, which hides the rank's own exit code from a
            # scheduler.
            raise SystemExit(code if code >= 0 else 128 - code)  # torch: -15 for SIGTERM


def _has_prompt() -> bool:
    """Return whether the interpreter continues at a prompt after an error."""
    return hasattr(sys, "ps1") or bool(sys.flags.interactive)
