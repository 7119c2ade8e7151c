"""The launcher's request to stop: it has been asked to go, and leaves its ranks time to save."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

_requested = threading.Event()
_tell_launcher: Callable[[], None] | None = None


def request() -> None:
    """Note the request."""
    _requested.set()


def announce_with(tell_launcher: Callable[[], None]) -> None:
    """Tell the launcher this way that requests are heeded, once the user's function asks."""
    global _tell_launcher  # noqa: PLW0603 - one process is one rank
    _tell_launcher = tell_launcher


def is_requested() -> bool:
    """Tell whether the launcher has asked this rank to stop."""
    global _tell_launcher
    tell, _tell_launcher = _tell_launcher, None
    if tell is not None:
        tell()
    return _requested.is_set()
