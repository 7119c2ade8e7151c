"""Garbage collections, kept away from what a process has loaded for good."""

from __future__ import annotations

import contextlib
import gc
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextlib.contextmanager
def out_of_collections(*, after_script: bool = False) -> Iterator[None]:
    """Keep what is loaded by the end of the block out of garbage collections: it stays for good.

    Each full one would look through all of torch, 0.1 s; an import of torch alone leads to several.

    Args:
        after_script: Whether code of the user's has run in this process before. What that has made
            may be garbage, or become it, so full collections after the block look at everything.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if not after_script:
            gc.freeze()
        elif not gc.get_freeze_count():  # else the fork server has frozen torch
            gc.freeze()
            gc.unfreeze()  # into the oldest generation: only full ones look there
        if was_enabled:
            gc.enable()
