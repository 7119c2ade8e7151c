"""How an error leaves the library: a traceback of one screen, and an exit status that tells."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from ddpsafe._errors import DDPSafeError, PreemptedError
from ddpsafe._launcher.streams import say

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType


def presentable(error: DDPSafeError) -> DDPSafeError:
    """Prepare an error for the user: the last thing before it leaves the library.

    The frames of ours and of tenacity would push the message off the screen; it says it all.

    Args:
        error: The error that is about to be raised.

    Returns:
        The same error.
    """
    if error.exit_code != 1 and not isinstance(sys.excepthook, _ExitWithCode):
        sys.excepthook = _ExitWithCode(sys.excepthook)
    return error.with_traceback(None)


class _ExitWithCode:
    """Ends the process with the exit code of an error of ours that nobody caught.

    Python ends with 1 after any traceback, which hides the rank's own code from a scheduler; a
    hook that raises SystemExit once it has shown the traceback sets the status.
    """

    def __init__(self, before: Callable[[type[BaseException], Any, Any], object]) -> None:
        self._before = before

    def __call__(
        self, kind: type[BaseException], raised: BaseException, traceback: TracebackType | None
    ) -> None:
        if isinstance(raised, PreemptedError):
            say(str(raised))  # no failure, so no traceback
        else:
            self._before(kind, raised, traceback)
        if isinstance(raised, DDPSafeError) and raised.exit_code != 1 and not _goes_on():
            raise SystemExit(raised.exit_code)


def _goes_on() -> bool:
    """Tell whether an error leads back to a prompt, with all that the session holds."""
    return hasattr(sys, "ps1") or bool(sys.flags.interactive)
