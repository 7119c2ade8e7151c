"""Keeps garbage collections away from modules that stay loaded."""

from __future__ import annotations

import contextlib
import gc
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextlib.contextmanager
def out_of_collections(*, after_script: bool = False) -> Iterator[None]:
    """Exclude everything that exists at the end of the block from garbage collections.

    A full collection traverses all of torch, which takes 0.1 s. The import of torch alone triggers
    several.

    Args:
        after_script: Whether the user's code has run in this process before. Its objects may be or
            become garbage, so full collections after the block still cover everything.
    """
    was_enabled = gc.isenabled()
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
