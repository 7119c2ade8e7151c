"""Workers that die between two batches, and workers whose loader was dropped.

torch notices a death by SIGCHLD and raises from whatever line of the user's code runs then: an
optimizer step seems to fail with "DataLoader worker (pid 4711) is killed by signal". The same
error is raised there, but explained.
"""

from __future__ import annotations

import signal
import threading
import weakref
from multiprocessing import util
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

_watched: weakref.WeakSet[Any] = weakref.WeakSet()


class _Explaining:
    """A handler of SIGCHLD that words what torch's handler raises."""

    def __init__(self, theirs: Callable[[int, FrameType | None], object]) -> None:
        self._theirs = theirs

    def __call__(self, number: int, frame: FrameType | None) -> None:
        try:
            self._theirs(number, frame)
        except RuntimeError as error:
            for iterator in list(_watched):
                explanation = iterator.explain(error)
                if explanation is not None and iterator.is_told:
                    return  # torch would raise it again at the end of any child process
                if explanation is not None:
                    iterator.is_told = True
                    raise explanation from (explanation.__cause__ or error)
            raise


def watch_workers(iterator: Any, inner: Any) -> None:
    """Explain the deaths of an iterator's workers, and end them when the iterator is dropped.

    Args:
        iterator: Ours; its ``Explanation(error)`` words a death.
        inner: torch's, with the worker processes.
    """
    if not getattr(inner, "_workers", None):
        return
    _watched.add(iterator)
    if not getattr(inner, "_persistent_workers", False):
        # A traceback keeps the iterator in a cycle. The garbage collector would end the queues to
        # the workers before it ends the iterator, which then waits 5 s for each worker in vain.
        util.Finalize(iterator, inner._shutdown_workers)  # noqa: SLF001 - torch's own end of an iteration
    handler = signal.getsignal(signal.SIGCHLD)
    on_main_thread = threading.current_thread() is threading.main_thread()
    if on_main_thread and callable(handler) and not isinstance(handler, _Explaining):
        signal.signal(signal.SIGCHLD, _Explaining(handler))
