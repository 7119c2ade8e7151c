"""Messages between ranks that need no collective: barriers and results over a store.

A collective on a failing path waits for ranks that are dead, and its error names no rank. The
store answers at once who is there, and every rank can read it.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import itertools
import json
import os
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from ddpsafe._clock import Deadline

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from ddpsafe._errors import Origin

# How long the rank that serves the store stays for the others to read how a barrier ended.
_LINGER: Final = timedelta(seconds=10)
_DEPARTED: Final = "control/departed"


class Keys(Protocol):
    """What `Control` needs of a store: torch's have it, and `FolderStore`."""

    def set(self, key: str, value: str, /) -> None:
        """Set a key."""

    def get(self, key: str, /) -> bytes:
        """Return the value of a key that is set."""

    def check(self, keys: list[str], /) -> bool:
        """Tell whether all the keys are set."""

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes:
        """Set a key that has the expected value, empty for none; return what it has then."""

    def delete_key(self, key: str, /) -> bool:
        """Remove a key; tell whether it was set."""


class FolderStore:
    """A store whose keys are files in a folder of the ranks' host.

    It has no server that could be suspended or starved, and no lock: a rank that is stopped or
    killed at any instruction leaves every key either set or not. `FileStore` of torch appends to one
    file under a lock, so a rank stopped there would stop all others without a timeout.

    Args:
        folder: The folder; made where it does not exist. It has to be private to the user.
    """

    _numbers = itertools.count()

    def __init__(self, folder: Path) -> None:
        """Make the folder."""
        folder.mkdir(mode=0o700, exist_ok=True)
        self._folder = str(folder)

    def set(self, key: str, value: str | bytes, /) -> None:
        """Set a key, for all ranks at one instant."""
        os.replace(self._written(value), self._path(key))  # noqa: PTH105 - plain paths: it is called often

    def get(self, key: str, /) -> bytes:
        """Return the value of a key that is set."""
        with open(self._path(key), "rb") as file:  # noqa: PTH123 - as above
            return file.read()

    def check(self, keys: list[str], /) -> bool:
        """Tell whether all the keys are set."""
        return all(os.path.exists(self._path(key)) for key in keys)  # noqa: PTH110 - as above

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes:
        """Set a key unless it is set; return its value."""
        assert expected == "", "only a key that is not set can be compared"  # noqa: S101
        written = self._written(desired)
        with contextlib.suppress(FileExistsError):
            os.link(written, self._path(key))
        os.unlink(written)  # noqa: PTH108 - as above
        return self.get(key)

    def delete_key(self, key: str, /) -> bool:
        """Remove a key; tell whether it was set."""
        try:
            os.unlink(self._path(key))  # noqa: PTH108 - as above
        except FileNotFoundError:
            return False
        return True

    def _path(self, key: str) -> str:
        # Any text may be a key, a barrier's name of any length; not every file system tells "a" from "A".
        return f"{self._folder}/{hashlib.sha256(key.encode()).hexdigest()}"

    def _written(self, value: str | bytes) -> str:
        """Write a value to a file that only this call knows."""
        path = f"{self._folder}/.{os.getpid()}-{next(self._numbers)}"
        with open(path, "wb") as file:  # noqa: PTH123 - as above
            file.write(value.encode() if isinstance(value, str) else value)
        return path


class SignedKeys:
    """Keys of a store to which others than the ranks can write: a value that is not signed is not there.

    It keeps forged values out, not the store alive: who can write to it can still remove keys.

    Args:
        store: The store.
        secret: What only the ranks of the job know.
        scope: What these keys are for. A value that was signed for another scope or another key does
            not count, so a scope that is new for each start of the ranks admits no old ones.
    """

    _MAC: Final = 64
    _TRIES: Final = 8

    def __init__(self, store: Keys, secret: bytes, scope: str) -> None:
        """Derive the key of the scope."""
        self._store = store
        self._secret = hmac.digest(secret, f"ddpsafe {scope}".encode(), "sha256")

    def set(self, key: str, value: str | bytes, /) -> None:
        """Set a key to a signed value."""
        self._store.set(key, self._sign(key, value))  # type: ignore[arg-type]  # all take bytes too

    def get(self, key: str, /) -> bytes:
        """Return the value of a key that is set."""
        value = self._find(key)
        if value is None:
            raise RuntimeError(
                f"{key} is not set, or by another program"
            )  # as a store that is gone
        return value

    def check(self, keys: list[str], /) -> bool:
        """Tell whether all the keys are set, and signed."""
        return self._store.check(keys) and all(self._find(key) is not None for key in keys)

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes:
        """Set a key that has the expected value, empty for none; return what it has then."""
        signed = self._sign(key, desired)
        known = self._sign(key, expected) if expected else b""
        for _ in range(self._TRIES):  # each value of another program is taken for none
            found = self._store.compare_set(key, known, signed)  # type: ignore[arg-type]  # as above
            value = self._verified(key, found)
            if value is not None:
                return value
            known = found
        raise RuntimeError(f"{key} is written again and again by another program")

    def delete_key(self, key: str, /) -> bool:
        """Remove a key; tell whether it was set."""
        return self._store.delete_key(key)

    def _find(self, key: str) -> bytes | None:
        return self._verified(key, self._store.get(key)) if self._store.check([key]) else None

    def _sign(self, key: str, value: str | bytes) -> bytes:
        content = value.encode() if isinstance(value, str) else value
        message = len(key).to_bytes(4, "big") + key.encode() + content
        return hmac.new(self._secret, message, "sha256").hexdigest().encode() + content

    def _verified(self, key: str, signed: bytes) -> bytes | None:
        value = signed[self._MAC :]
        return value if hmac.compare_digest(signed, self._sign(key, value)) else None


class Departure(NamedTuple):
    """That a rank has failed, as it told the others.

    Attributes:
        rank: Which one.
        origin: Where its error comes from: the rank itself, or another one.
        error: Its error, in a line.
        is_failure: False for ``sys.exit(0)``, which leaves the others alone but fails nothing.
    """

    rank: int
    origin: Origin
    error: str
    is_failure: bool = True


class Control:
    """One rank's line to the others through the store.

    Attributes:
        store: The connection, for keys of others than `Control`.
        failed_peer: Who had failed when the last barrier ended, as far as that is known.

    Args:
        store: A store connection of its own: one client serialises its calls, so a long wait
            here must not block the process group's.
        rank: This rank.
        world_size: How many there are.
        served_by_rank_zero: Whether the store goes when rank 0 goes.
    """

    def __init__(
        self, store: Keys, *, rank: int, world_size: int, served_by_rank_zero: bool = False
    ) -> None:
        """Keep the connection."""
        self.store = store
        self._rank = rank
        self._world_size = world_size
        self._served_by_rank_zero = served_by_rank_zero
        self._turns: dict[str, int] = {}
        self.failed_peer: Departure | None = None

    def barrier(self, name: str, *, deadline: Deadline, is_last: bool = False) -> list[int]:
        """Wait until every rank has come to the barrier of that name.

        Args:
            name: Ranks wait for each other under one name; every use of it is a new barrier.
            deadline: When to stop waiting.
            is_last: Ranks may exit right after it.

        Returns:
            The ranks that did not come in time, the same on every rank: empty when all met.
        """
        try:
            barrier = self.arrive(name)
            # Failed ranks have come to the last barrier too: the others may work to their ends.
            doors = [f"{barrier}/missing"] if is_last else [f"{barrier}/missing", _DEPARTED]
            # The last to come, or to give up, writes the list of missing ranks.
            self.wait_for(*doors, deadline=deadline)
            if not self.is_set(doors[0]):
                departed = self.departure() if _DEPARTED in doors else None
                # Who has not come yet beside a rank that has failed may be on its way.
                absent = (
                    [departed.rank]
                    if departed
                    else [rank for rank in range(self._world_size) if not self._came(barrier, rank)]
                )
                self.store.compare_set(doors[0], "", json.dumps(absent))
            missing: list[int] = json.loads(self.store.get(doors[0]))
            if is_last:  # read before parting: the store may go right after it
                departure = self.departure()
                self.failed_peer = None
                if departure is not None and departure.rank != self._rank and departure.is_failure:
                    self.failed_peer = departure
            if missing or is_last:
                self._part(barrier)
        except RuntimeError:
            if not self._served_by_rank_zero or self._rank == 0:
                raise
            # The store went with rank 0, which stays at the last barrier until all have read its end.
            if not is_last:
                return [0]
            self.failed_peer = self.failed_peer or self.departure()
            return []
        return missing

    def arrive(self, name: str) -> str:
        """Come to a barrier without waiting for the others; return its name in the store."""
        barrier = self._turn(name)
        self.store.set(f"{barrier}/{self._rank}", "here")
        if self.store.check([f"{barrier}/{rank}" for rank in range(self._world_size)]):
            # Whoever gave up before has the last word: all ranks must read the same.
            self.store.compare_set(f"{barrier}/missing", "", "[]")
            # Who has come to this turn has read how the one before ended: its keys go, else a
            # barrier in each of a million steps would fill the store.
            turn = self._turns[name] - 2
            if turn >= 0:
                former = f"control/{name}/{turn}"
                for key in ("missing", *map(str, range(self._world_size))):
                    self.store.delete_key(f"{former}/{key}")
        return barrier

    def depart(self, error: str, origin: Origin, *, is_failure: bool = True) -> None:
        """Tell whoever waits for this rank, now or later, that it has failed and will not come."""
        told = json.dumps(Departure(self._rank, origin, error, is_failure))
        self.store.compare_set(_DEPARTED, "", told)

    def departure(self) -> Departure | None:
        """Return what the first rank that has failed said, if one has."""
        try:
            if not self.is_set(_DEPARTED):
                return None
            return Departure(*json.loads(self.store.get(_DEPARTED)))
        except RuntimeError:
            if not self._served_by_rank_zero or self._rank == 0:
                return None
            return Departure(0, "own", "its process ended, and with it the store of the ranks.")

    def raise_to(self, name: str, value: int) -> None:
        """Let the number of that name be at least `value` on all ranks."""
        known = ""
        while not known or int(known) < value:
            known = self.store.compare_set(f"control/{name}", known, str(value)).decode()

    def number(self, name: str) -> int:
        """Return what `raise_to` has come to, once all ranks have called it."""
        return int(self.store.get(f"control/{name}"))

    def _came(self, barrier: str, rank: int) -> bool:
        return bool(self.store.check([f"{barrier}/{rank}"]))

    def _part(self, barrier: str) -> None:
        """Let everyone who came read how it ended before the store goes with rank 0."""
        self.store.set(f"{barrier}/seen/{self._rank}", "yes")
        self._stay_for(
            barrier, (rank for rank in range(self._world_size) if self._came(barrier, rank))
        )

    def _stay_for(
        self,
        barrier: str,
        ranks: Iterable[int],
        is_lost: Callable[[int], bool] = lambda _: False,
    ) -> None:
        """Wait, where the store goes with this rank, until those ranks have read it, or have ended."""
        if self._served_by_rank_zero and self._rank == 0:
            linger = Deadline.after(_LINGER)
            for rank in ranks:
                for pause_s in linger.pauses_s():
                    if self.is_set(f"{barrier}/seen/{rank}") or is_lost(rank):
                        break
                    time.sleep(pause_s)

    def publish(self, name: str, error: str | None) -> None:
        """Tell the others how the step of that name ended here: with which error, if with one."""
        step = self._turn(name)
        failure = None if error is None else Departure(self._rank, "own", error)
        self.store.set(step, json.dumps(failure))
        if failure is not None:
            self._stay_for(step, range(1, self._world_size))

    def result_of(self, name: str, *, deadline: Deadline) -> tuple[bool, Departure | None]:
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
        self.store.set(f"control/{key}", data)  # type: ignore[arg-type]  # all take bytes too

    def take(self, key: str, *, deadline: Deadline) -> bytes | None:
        """Wait for what `put` left, or return ``None`` at the deadline."""
        if not self.wait_for(f"control/{key}", deadline=deadline):
            return None
        return bytes(self.store.get(f"control/{key}"))

    def acknowledge(self, key: str) -> None:
        """Say that this rank has taken what it was told under a key."""
        self.store.set(f"control/{key}/seen/{self._rank}", "yes")

    def stay(self, key: str, is_lost: Callable[[int], bool] = lambda _: False) -> None:
        """Wait, for a moment and only where the store goes with this rank, until all have.

        Args:
            key: What they were told under.
            is_lost: Tells whether a rank has ended, and is not waited for.
        """
        self._stay_for(f"control/{key}", range(1, self._world_size), is_lost)

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
