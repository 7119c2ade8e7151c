"""Reports exceptions in flight: a rank handles one while it waits for the others.

``except: dist.barrier()`` and ``finally: dist.barrier()`` hide an error until a timeout: the
exception has not left the user's function, and the others are in another collective. So it is
reported before the wait, and withdrawn if the wait succeeds, since a barrier in an ``except`` block
may be intended.

After a destroy of the process group in an ``except`` block, the script may exit or start over. So
that report is withdrawn at the first sign that the script continues.

A whole script may run inside ``except ImportError:``. After a few waits there, its exception is not
reported again: each report costs the time to read torch's flight recorder.
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
    """Reports to the launcher."""

    def exception_in_flight(self) -> BaseException | None:
        """Report the exception that this thread is handling; return it."""

    def recovered(self) -> None:
        """Withdraw the report."""


_reporter: ExceptionReporter | None = None
# Thread and id of the exception. A reference to it would keep the tensors of its frames alive.
_open_report: tuple[int, int] | None = None


def report_to(reporter: ExceptionReporter) -> None:
    """Use this reporter from now on."""
    global _reporter  # noqa: PLW0603 - one process is one rank
    _reporter = reporter


@contextlib.contextmanager
def waiting() -> Iterator[None]:
    """Enclose a wait for other ranks: report an exception in flight before, withdraw it after."""
    exc = None
    handled = sys.exc_info()[1]
    # The rank may do its normal work inside an ``except`` block.
    if _reporter is not None and (handled is None or not has_continued(handled)):
        exc = _reporter.exception_in_flight()
    yield
    if _reporter is not None and exc is not None:
        note_wait(exc)
        _reporter.recovered()


def leaving_group() -> None:
    """Report the exception that the script handles while it destroys its process group."""
    global _open_report  # noqa: PLW0603 - one process is one rank
    exc = None if _reporter is None else _reporter.exception_in_flight()
    if exc is not None:
        _open_report = (threading.get_ident(), id(exc))


def withdraw_report() -> None:
    """Withdraw the report of `leaving_group`: the script continues."""
    global _open_report  # noqa: PLW0603 - one process is one rank
    if _reporter is not None and _open_report is not None:
        _open_report = None
        _reporter.recovered()


def after_step() -> None:
    """Withdraw the report of `leaving_group` if an optimizer steps outside of the ``except`` block."""
    if _open_report is not None:
        thread, exc = _open_report
        if threading.get_ident() == thread and id(sys.exc_info()[1]) != exc:
            withdraw_report()
