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
from typing import TYPE_CHECKING

from ddpsafe._wire.exception_facts import has_continued, note_wait
from ddpsafe._worker.rank import this_rank

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextlib.contextmanager
def waiting() -> Iterator[None]:
    """Enclose a wait for other ranks: report an exception in flight before, withdraw it after."""
    exc = None
    handled = sys.exc_info()[1]
    # The rank may do its normal work inside an ``except`` block.
    if this_rank.reporter is not None and (handled is None or not has_continued(handled)):
        exc = this_rank.reporter.exception_in_flight()
    yield
    if this_rank.reporter is not None and exc is not None:
        note_wait(exc)
        this_rank.reporter.recovered()


def leaving_group() -> None:
    """Report the exception that the script handles while it destroys its process group."""
    exc = None if this_rank.reporter is None else this_rank.reporter.exception_in_flight()
    if exc is not None:
        this_rank.reported = (threading.get_ident(), id(exc))


def withdraw_report() -> None:
    """Withdraw the report of `leaving_group`: the script continues."""
    if this_rank.reporter is not None and this_rank.reported is not None:
        this_rank.reported = None
        this_rank.reporter.recovered()


def after_step() -> None:
    """Withdraw the report of `leaving_group` if an optimizer steps outside of the ``except`` block."""
    if this_rank.reported is not None:
        thread, exc = this_rank.reported
        if threading.get_ident() == thread and id(sys.exc_info()[1]) != exc:
            withdraw_report()
