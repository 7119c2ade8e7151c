"""How an error leaves the library: a traceback of one screen, no live ranks, an exit status that tells."""

from __future__ import annotations

import sys
import traceback
from typing import TYPE_CHECKING, Any, Final

from ddpsafe._errors import DDPSafeError, PreemptedError, causes_of
from ddpsafe._launcher.watch.streams import say, write_line
from ddpsafe._logging import json_of_error, json_scope
from ddpsafe._wire.exception_facts import is_internal

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

_LIVE: Final[set[Callable[[], object]]] = set()


def presentable(error: DDPSafeError) -> DDPSafeError:
    """Prepare an error for the user: the last thing before it leaves the library.

    Args:
        error: The error that is about to be raised.

    Returns:
        The same error.
    """
    if error.exit_code != 1 or error.shown_as_json:
        _hook().sets_status = True
    return without_frames(error)


def without_frames(error: DDPSafeError) -> DDPSafeError:
    """Take its frames from an error, and from its causes where none of them can be the user's.

    Those of ddpsafe and tenacity would push the message off the screen, and add nothing to it.

    Args:
        error: The error that is about to be shown.

    Returns:
        The same error.
    """
    for cause in causes_of(error)[1:]:
        frames = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(cause.__traceback__)]
        if all(map(is_internal, frames)):
            cause.__traceback__ = None
    return error.with_traceback(None)


def end_with_the_script(cancel: Callable[[], object]) -> None:
    """Call `cancel` when the script dies of an exception, Ctrl-C included.

    Ranks have sessions of their own, which the terminal's Ctrl-C does not reach, and at its end
    the interpreter waits for the threads that watch them.
    """
    _hook()
    _LIVE.add(cancel)


def spare(cancel: Callable[[], object]) -> None:
    """Take back `end_with_the_script`; the last one takes the hook off where nothing else needs it."""
    _LIVE.discard(cancel)
    hook = sys.excepthook
    if isinstance(hook, _Uncaught) and not _LIVE and not hook.sets_status:
        sys.excepthook = hook.before


def _hook() -> _Uncaught:
    if not isinstance(sys.excepthook, _Uncaught):
        sys.excepthook = _Uncaught(sys.excepthook)
    return sys.excepthook


class _Uncaught:
    """What happens to an exception that was not caught: it is shown, and the process ends by it.

    Python ends with 1 after any traceback, which hides the rank's own code from a scheduler; a
    hook that raises SystemExit once it has shown the traceback sets the status.

    Attributes:
        before: The hook that was there, which shows the traceback.
        sets_status: An error has left the library whose exit code Python would not use.
    """

    def __init__(self, before: Callable[[type[BaseException], Any, Any], object]) -> None:
        self.before = before
        self.sets_status = False

    def __call__(
        self, kind: type[BaseException], raised: BaseException, traceback: TracebackType | None
    ) -> None:
        try:
            if isinstance(raised, PreemptedError):
                with json_scope(on=raised.shown_as_json):
                    say(str(raised))  # no failure, so no traceback
            elif isinstance(raised, DDPSafeError) and raised.shown_as_json:
                write_line(json_of_error(raised))
            else:
                self.before(kind, raised, traceback)
        finally:  # it may raise SystemExit itself
            if not _has_prompt():
                for cancel in list(_LIVE):
                    cancel()
        if isinstance(raised, DDPSafeError) and raised.exit_code != 1 and not _has_prompt():
            code = raised.exit_code
            raise SystemExit(code if code >= 0 else 128 - code)  # torch's is -15 for SIGTERM


def _has_prompt() -> bool:
    """Tell whether an error leads back to a prompt, with all that the session holds."""
    return hasattr(sys, "ps1") or bool(sys.flags.interactive)
