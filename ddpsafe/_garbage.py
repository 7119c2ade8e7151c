"""Garbage collections, kept away from what a process of ddpsafe's own has loaded for good."""

from __future__ import annotations

import contextlib
import gc
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextlib.contextmanager
def out_of_collections() -> Iterator[None]:
    """Keep what is loaded by the end of the block out of garbage collections: it stays for good.

    Each full one would look through all of torch, 0.1 s; an import of torch alone leads to several.
    Not in a process of the user's: what is garbage by then stays, too.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()
