"""Exceptions on their way while their rank waits for others, who may wait for it elsewhere.

``except: dist.barrier()`` and ``finally: dist.barrier()`` hide an error until a timeout: the
exception has not left the user's function, and the others are in another collective. So it is
reported before the wait, and withdrawn when the wait ends well, since a barrier in an ``except``
block may be meant.

Nothing tells when a destroy in an ``except`` block "ends well": the script may be leaving, or about
to begin again. So what is reported there is withdrawn at the first sign that the script goes on.

A script may run as a whole inside ``except ImportError:``. Once it has met the others there a few
times, it is not told again: each report costs the time to read torch's flight recorder.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from typing import TYPE_CHECKING, Protocol

from ddpsafe._wire.exception_facts import has_continued, note_wait

if TYPE_CHECKING:
    from collections.abc import Iterator


class ExceptionReporter(Protocol):
    """What reports to the launcher."""

    def exception_in_flight(self) -> BaseException | None:
        """Report the exception that this thread is handling; return it."""

    def recovered(self) -> None:
        """Take back what was reported."""


_reporter: ExceptionReporter | None = None
# Thread and id of the exception: holding it would hold the tensors of its frames.
_open_report: tuple[int, int] | None = None


def tell(reporter: ExceptionReporter) -> None:
    """Report to `reporter` from now on."""
    global _reporter  # noqa: PLW0603 - one process is one rank
    _reporter = reporter


@contextlib.contextmanager
def waiting() -> Iterator[None]:
    """Be around a wait for other ranks."""
    exc = None
    handled = sys.exc_info()[1]
    # The rank may have continued its work in the ``except`` block that it is in.
    if _reporter is not None and (handled is None or not has_continued(handled)):
        exc = _reporter.exception_in_flight()
    yield
    if _reporter is not None and exc is not None:
        note_wait(exc)
        _reporter.recovered()


def leaving_group() -> None:
    """Report an exception at whose handling the script destroys its process group."""
    global _open_report  # noqa: PLW0603 - one process is one rank
    exc = None if _reporter is None else _reporter.exception_in_flight()
    if exc is not None:
        _open_report = (threading.get_ident(), id(exc))


def going_on() -> None:
    """Withdraw that report: the ranks have met for another group."""
    global _open_report  # noqa: PLW0603 - one process is one rank
    if _reporter is not None and _open_report is not None:
        _open_report = None
        _reporter.recovered()


def after_step() -> None:
    """Withdraw it where an optimizer steps after the exception was handled, not while it is."""
    if _open_report is not None:
        thread, exc = _open_report
        if threading.get_ident() == thread and id(sys.exc_info()[1]) != exc:
            going_on()
