"""How an error leaves the library: a traceback of one screen, and an exit status that tells."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import TracebackType

    from ddpsafe._errors import DDPSafeError


def presentable(error: DDPSafeError) -> DDPSafeError:
    """Prepare an error for the user: the last thing before it leaves the library.

    The frames of ours and of tenacity would push the message off the screen; it says it all.
    Python ends with 1 after any traceback, which hides the rank's own code from a scheduler; a
    hook that raises SystemExit after it has shown the traceback sets the status. Every other
    exception passes through to the hook that was there before.

    Args:
        error: The error that is about to be raised.

    Returns:
        The same error.
    """
    if error.exit_code != 1:
        _exit_with_code_of(error)
    return error.with_traceback(None)


def _exit_with_code_of(error: DDPSafeError) -> None:
    before = sys.excepthook

    def hook(
        kind: type[BaseException], raised: BaseException, traceback: TracebackType | None
    ) -> None:
        sys.excepthook = before
        before(kind, raised, traceback)
        if raised is error:
            raise SystemExit(error.exit_code)

    sys.excepthook = hook
