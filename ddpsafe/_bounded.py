"""Calls that may hang in the kernel or in libc, made so that the caller never does."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")


class BoundedCall(Generic[T]):
    """One call in a daemon thread of its own, waited for no longer than the caller likes.

    ``stat`` on a dead network mount and ``getaddrinfo`` without a name server cannot be
    interrupted. The thread stays with such a call; the caller goes on. It ends with the call, and
    a process does not wait for it at exit.
    """

    def __init__(self, function: Callable[[], T], *, name: str) -> None:
        """Start the call.

        Args:
            function: What to call; it must be harmless if nobody waits for it any more.
            name: Name of the thread, for stack dumps.
        """
        self._function = function
        self._outcome: list[T] = []
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._outcome.append(self._function())
        except BaseException as error:  # noqa: BLE001 - raised again where the result is asked for
            self._error = error

    def wait(self, limit_s: float) -> bool:
        """Wait for the end of the call, at most `limit_s` seconds; tell whether it came."""
        self._thread.join(min(limit_s, threading.TIMEOUT_MAX))
        return not self._thread.is_alive()

    def result(self) -> T:
        """Return what the call returned, or raise what it raised; only once it has ended."""
        if self._error is not None:
            raise self._error
        return self._outcome[0]
