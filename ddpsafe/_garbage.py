"""Exempts what stays loaded, such as torch, from garbage collections."""

from __future__ import annotations

import contextlib
import gc
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextlib.contextmanager
def exempt_from_gc(*, after_script: bool = False) -> Iterator[None]:
    """Collect no garbage in the block, then freeze all objects of the process (`gc.freeze`).

    No later collection covers a frozen object, so one that becomes part of a garbage cycle is never
    freed.

    With `after_script` the user's code has run in this process before. Its objects may be or become garbage,
    so nothing is frozen: full collections after the block still cover everything.
    """
    was_enabled = gc.isenabled()
    # A full collection traverses all of torch, which takes 0.1 s, and the import of torch alone
    # triggers several.
    gc.disable()
    try:
        yield
    finally:
        if not after_script:
            gc.freeze()
        elif not gc.get_freeze_count():  # otherwise the fork server has frozen torch already
            gc.freeze()
            gc.unfreeze()  # moves all into the oldest generation, which only full collections cover
        if was_enabled:
            gc.enable()
