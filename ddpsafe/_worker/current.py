"""The context of this process: one process is one rank."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from ddpsafe._world import World, find_world

if TYPE_CHECKING:
    from ddpsafe._worker.context import RankContext

_current: RankContext | None = None


def enter(context: RankContext | None) -> RankContext | None:
    """Make a context the current one; return the one before, to be restored."""
    global _current
    before, _current = _current, context
    return before


def find_current() -> RankContext | None:
    """Return the context of this rank, or ``None`` outside of one."""
    return _current


def current_world() -> World:
    """Return this process' place: of the context, else of the environment, else alone."""
    if _current is not None:
        return _current.world
    return find_world(os.environ) or World.alone()
