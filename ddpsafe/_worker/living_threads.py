"""Which threads keep this process alive, for a launcher that waits for its end."""

from __future__ import annotations

import sys
import threading
import traceback
from typing import TYPE_CHECKING

from ddpsafe._wire.exceptions import is_library

if TYPE_CHECKING:
    from types import FrameType


def find_living_threads() -> tuple[str, ...]:
    """Name each thread that Python waits for at its end, with its place.

    Without one it is the main thread that has not come to the end, as in a function that is
    registered with `atexit`.
    """
    main = threading.main_thread()
    kept = [each for each in threading.enumerate() if each is not main and not each.daemon]
    frames = sys._current_frames()  # noqa: SLF001 - documented, in spite of its name
    return tuple(_describe(each, frames) for each in kept or [main])


def _describe(thread: threading.Thread, frames: dict[int, FrameType]) -> str:
    """Name a thread and the innermost line of the user's that it is at."""
    frame = frames.get(thread.ident or 0)
    stack = traceback.extract_stack(frame) if frame is not None else []
    own = [each for each in stack if not is_library(each.filename)] or stack
    at = f" at {own[-1].filename}:{own[-1].lineno} in {own[-1].name}" if own else ""
    return f"thread {thread.name!r}{at}"
