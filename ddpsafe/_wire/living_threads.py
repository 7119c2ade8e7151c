"""What a rank that has returned and does not end says about why."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class LivingThreads:
    """The answer to `ASK_THREADS`.

    Attributes:
        places: Each thread that keeps the process alive, and where it is.
    """

    places: tuple[str, ...]
