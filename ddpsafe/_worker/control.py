"""Talk between ranks that is no collective: barriers and verdicts over the store.

A collective on a failing path waits for ranks that are dead, and its error names nobody. The
store answers at once who is there, and every rank can read it.
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch.distributed import Store

    from ddpsafe._clock import Deadline

# Waiting happens in C++, where signals are not handled: short slices let Ctrl-C through.
_SLICE_S: Final = 0.5
_FAILED: Final = "failed "
_WELL: Final = "well"


class Control:
    """One rank's line to the others through the store.

    Args:
        store: A store connection of its own: one client serialises its calls, so a long wait
            here must not block the process group's.
        rank: This rank.
        world_size: How many there are.
    """

    def __init__(self, store: Store, *, rank: int, world_size: int) -> None:
        """Keep the connection."""
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._turns: dict[str, int] = {}

    def meet(self, name: str, *, deadline: Deadline) -> list[int]:
        """Wait until every rank has come to the meeting of that name.

        Args:
            name: Ranks meet under one name; every use of it is a new meeting.
            deadline: When to stop waiting.

        Returns:
            The ranks that did not come in time: empty when all met.
        """
        keys = self.arrive(name)
        if self.wait_for(keys, deadline=deadline):
            return []
        return [rank for rank, key in enumerate(keys) if not self._store.check([key])]

    def arrive(self, name: str) -> list[str]:
        """Come to a meeting without waiting for the others; return everyone's keys, by rank."""
        prefix = self._turn(name)
        keys = [f"{prefix}/{rank}" for rank in range(self._world_size)]
        self._store.set(keys[self._rank], "here")
        return keys

    def publish(self, name: str, failure: str | None) -> None:
        """Tell the others how the step of that name ended here."""
        text = _WELL if failure is None else _FAILED + failure
        self._store.set(self._turn(name), text)

    def verdict(self, name: str, *, deadline: Deadline) -> tuple[bool, str | None]:
        """Wait for what `publish` told.

        Returns:
            Whether it came in time, and the failure's text if it was one.
        """
        key = self._turn(name)
        if not self.wait_for([key], deadline=deadline):
            return False, None
        text = self._store.get(key).decode()
        return True, text.removeprefix(_FAILED) if text.startswith(_FAILED) else None

    def wait_for(self, keys: Iterable[str], *, deadline: Deadline) -> bool:
        """Wait until all keys are set; tell whether they were before the deadline."""
        wanted = list(keys)
        while not deadline.expired():
            wait = timedelta(seconds=min(_SLICE_S, max(0.01, deadline.remaining_s())))
            try:
                self._store.wait(wanted, wait)
            except RuntimeError as exc:  # DistStoreError: the slice is over
                if not _is_wait_timeout(exc):
                    raise
            else:
                return True
        return bool(self._store.check(wanted))

    def is_set(self, key: str) -> bool:
        """Look at a key without waiting."""
        return bool(self._store.check([key]))

    def _turn(self, name: str) -> str:
        turn = self._turns.get(name, 0)
        self._turns[name] = turn + 1
        return f"control/{name}/{turn}"


def _is_wait_timeout(exc: RuntimeError) -> bool:
    import torch.distributed as dist

    return isinstance(exc, dist.DistStoreError) or "timeout" in str(exc).lower()
