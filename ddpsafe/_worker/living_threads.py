"""Which threads keep this process alive, for a launcher that waits for its end."""

from __future__ import annotations

import sys
import threading
import traceback
from typing import TYPE_CHECKING

from ddpsafe._wire.exceptions import is_library
from ddpsafe._wire.living_threads import LivingThreads

if TYPE_CHECKING:
    from types import FrameType


def find_living_threads() -> LivingThreads:
    """Name each thread that Python waits for at its end, with its place.

    Without one it is the main thread that has not come to the end, as in a function that is
    registered with `atexit`.
    """
    main = threading.main_thread()
    kept = [each for each in threading.enumerate() if each is not main and not each.daemon]
    frames = sys._current_frames()  # noqa: SLF001 - documented, in spite of its name
    if not kept:
        return LivingThreads(places=(), main=_place_of(main, frames, is_main=True))
    places = [(each.name, _place_of(each, frames, is_main=False)) for each in kept]
    return LivingThreads(
        places=tuple(
            f"thread {name!r}" + (f" at {place}" if place else "") for name, place in places
        )
    )


def _place_of(thread: threading.Thread, frames: dict[int, FrameType], *, is_main: bool) -> str:
    """Return the innermost line that a thread is at: one of the user's, of the main thread only such."""
    frame = frames.get(thread.ident or 0)
    stack = traceback.extract_stack(frame) if frame is not None else []
    own = [each for each in stack if not is_library(each.filename)]
    shown = own or ([] if is_main else stack)
    return f"{shown[-1].filename}:{shown[-1].lineno} in {shown[-1].name}" if shown else ""
