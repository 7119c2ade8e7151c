"""What a rank that has returned and does not end says about why."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class LivingThreads:
    """The answer to `ASK_THREADS`.

    Attributes:
        places: Each thread that keeps the process alive, and where it is; none where only the main
            thread is left, at what is registered with `atexit`.
        main: The line of the user's that the main thread is at then, if it is at one.
    """

    places: tuple[str, ...]
    main: str = ""
