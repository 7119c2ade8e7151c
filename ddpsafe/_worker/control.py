"""Talk between ranks that is no collective: barriers and verdicts over the store.

A collective on a failing path waits for ranks that are dead, and its error names nobody. The
store answers at once who is there, and every rank can read it.
"""

from __future__ import annotations

import json
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Final, NamedTuple

from ddpsafe._clock import Deadline

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch.distributed import Store

    from ddpsafe._errors import Origin

# How long the rank that serves the store stays for the others to read how a meeting ended.
_LINGER: Final = timedelta(seconds=2)
_DEPARTED: Final = "control/departed"


class Departure(NamedTuple):
    """That a rank has failed, as it told the others.

    Attributes:
        rank: Which one.
        origin: Where its error comes from: the rank itself, or another one.
        error: Its error, in a line.
    """

    rank: int
    origin: Origin
    error: str


class Control:
    """One rank's line to the others through the store.

    Attributes:
        store: The connection, for keys of others than `Control`.

    Args:
        store: A store connection of its own: one client serialises its calls, so a long wait
            here must not block the process group's.
        rank: This rank.
        world_size: How many there are.
        served_by_rank_zero: Whether the store goes when rank 0 goes.
    """

    def __init__(
        self, store: Store, *, rank: int, world_size: int, served_by_rank_zero: bool = False
    ) -> None:
        """Keep the connection."""
        self.store = store
        self._rank = rank
        self._world_size = world_size
        self._served_by_rank_zero = served_by_rank_zero
        self._turns: dict[str, int] = {}

    def meet(self, name: str, *, deadline: Deadline, is_last: bool = False) -> list[int]:
        """Wait until every rank has come to the meeting of that name.

        Args:
            name: Ranks meet under one name; every use of it is a new meeting.
            deadline: When to stop waiting.
            is_last: Ranks may exit right after it.

        Returns:
            The ranks that did not come in time, the same on every rank: empty when all met.
        """
        try:
            meeting = self.arrive(name)
            # Failed ranks have come to the last meeting too: the others may work to their ends.
            doors = [f"{meeting}/missing"] if is_last else [f"{meeting}/missing", _DEPARTED]
            missing = self._await_all(meeting, doors, deadline)
            if missing or is_last:
                self._part(meeting)
        except RuntimeError:
            if not self._served_by_rank_zero or self._rank == 0:
                raise
            # The store went with rank 0: it has failed, or left the last meeting since all had come.
            return [] if is_last else [0]
        return missing

    def arrive(self, name: str) -> str:
        """Come to a meeting without waiting for the others; return its name in the store."""
        meeting = self._turn(name)
        self.store.set(f"{meeting}/{self._rank}", "here")
        if self.store.add(f"{meeting}/count", 1) == self._world_size:
            # Whoever gave up before has the last word: all ranks must read the same.
            self.store.compare_set(f"{meeting}/missing", "", "[]")
        return meeting

    def depart(self, error: str, origin: Origin) -> None:
        """Tell whoever waits for this rank, now or later, that it has failed and will not come."""
        told = json.dumps(Departure(self._rank, origin, error))
        self.store.compare_set(_DEPARTED, "", told)

    def departure(self) -> Departure | None:
        """Return what the first rank that has failed said, if one has."""
        try:
            if not self.is_set(_DEPARTED):
                return None
            return Departure(*json.loads(self.store.get(_DEPARTED)))
        except RuntimeError:  # the store went with rank 0
            return None

    def _await_all(self, meeting: str, doors: list[str], deadline: Deadline) -> list[int]:
        """Wait for the list of missing ranks, which the last to come or to give up writes.

        Args:
            meeting: The meeting.
            doors: Keys one of which ends the wait: the list, or that a rank has failed, which
                then never comes.
            deadline: When to give up.
        """
        self.wait_for(*doors, deadline=deadline)
        if not self.is_set(doors[0]):
            departed = self.departure() if _DEPARTED in doors else None
            # Who has not come yet beside a rank that has failed may be on its way.
            missing = [departed.rank] if departed else self._not_here(meeting)
            self.store.compare_set(doors[0], "", json.dumps(missing))
        known: list[int] = json.loads(self.store.get(doors[0]))
        return known

    def _not_here(self, meeting: str) -> list[int]:
        return [rank for rank in range(self._world_size) if not self._came(meeting, rank)]

    def _came(self, meeting: str, rank: int) -> bool:
        return bool(self.store.check([f"{meeting}/{rank}"]))

    def _part(self, meeting: str) -> None:
        """Let everyone who came read how it ended before the store goes with rank 0."""
        self.store.set(f"{meeting}/seen/{self._rank}", "yes")
        self._stay_for(
            meeting, (rank for rank in range(self._world_size) if self._came(meeting, rank))
        )

    def _stay_for(self, meeting: str, ranks: Iterable[int]) -> None:
        """Wait, where the store goes with this rank, until those ranks have read it."""
        if self._served_by_rank_zero and self._rank == 0:
            linger = Deadline.after(_LINGER)
            for rank in ranks:
                self.wait_for(f"{meeting}/seen/{rank}", deadline=linger)

    def publish(self, name: str, error: str | None) -> None:
        """Tell the others how the step of that name ended here: with which error, if with one."""
        step = self._turn(name)
        failure = None if error is None else Departure(self._rank, "own", error)
        self.store.set(step, json.dumps(failure))
        if failure is not None:
            self._stay_for(step, range(1, self._world_size))

    def verdict(self, name: str, *, deadline: Deadline) -> tuple[bool, Departure | None]:
        """Wait for what `publish` told.

        Returns:
            Whether it came in time, and who failed how if the step did.
        """
        key = self._turn(name)
        if not self.wait_for(key, deadline=deadline):
            return False, None
        failure = json.loads(self.store.get(key))
        self.store.set(f"{key}/seen/{self._rank}", "yes")
        return True, None if failure is None else Departure(*failure)

    def put(self, key: str, data: bytes) -> None:
        """Leave bytes for another rank under a key that is used once."""
        self.store.set(f"control/{key}", data)  # type: ignore[arg-type]  # takes bytes too

    def take(self, key: str, *, deadline: Deadline) -> bytes | None:
        """Wait for what `put` left, or return ``None`` at the deadline."""
        if not self.wait_for(f"control/{key}", deadline=deadline):
            return None
        return bytes(self.store.get(f"control/{key}"))

    def acknowledge(self, key: str) -> None:
        """Say that this rank has taken what it was told under a key."""
        self.store.set(f"control/{key}/seen/{self._rank}", "yes")

    def stay(self, key: str) -> None:
        """Wait, for a moment and only where the store goes with this rank, until all have."""
        self._stay_for(f"control/{key}", range(1, self._world_size))

    def drop(self, key: str) -> None:
        """Remove what `put` left, once everyone has taken it."""
        self.store.delete_key(f"control/{key}")

    def wait_for(self, *keys: str, deadline: Deadline) -> bool:
        """Wait until one of the keys is set; tell whether it was before the deadline.

        It looks again and again with growing pauses: torch's own wait handles no Ctrl-C and writes
        warnings to stderr whenever a slice of it ends.
        """
        for pause_s in deadline.pauses_s():
            if any(map(self.is_set, keys)):
                return True
            time.sleep(pause_s)
        return False

    def is_set(self, key: str) -> bool:
        """Look at a key without waiting."""
        return bool(self.store.check([key]))

    def _turn(self, name: str) -> str:
        turn = self._turns.get(name, 0)
        self._turns[name] = turn + 1
        return f"control/{name}/{turn}"
