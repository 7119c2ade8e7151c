"""Barriers and messages between ranks over a store, without a collective.

A collective on a failing path waits for dead ranks, and its error names no rank. The store shows at
once which ranks have arrived, and every rank can read it.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from ddpsafe._clock import Deadline
from ddpsafe._job.secret import Signer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from ddpsafe._errors import Origin

# How long the rank that serves the store waits until the others have read a result.
_LINGER: Final = timedelta(seconds=10)
_DEPARTED: Final = "control/departed"


class Keys(Protocol):
    """What `Control` needs of a store; torch's stores and `FolderStore` have it."""

    def set(self, key: str, value: str, /) -> None:
        """Set a key."""

    def get(self, key: str, /) -> bytes:
        """Return the value of a key that is set."""

    def check(self, keys: list[str], /) -> bool:
        """Return whether all the keys are set."""

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes:
        """Set a key if it has the expected value, empty for not set; return its value afterwards."""

    def delete_key(self, key: str, /) -> bool:
        """Remove a key; return whether it was set."""


class FolderStore:
    """A store for ranks of one host; each key is a file in a folder.

    It has no server that could be suspended or starved, and no lock: wherever a rank is stopped or
    killed, every key is either set or not. torch's `FileStore` appends to one file under a lock, so
    a rank stopped there would block all others without a timeout.

    Args:
        folder: The folder; made if it does not exist. It must be private to the user.
    """

    _numbers = itertools.count()

    def __init__(self, folder: Path) -> None:
        """Make the folder."""
        folder.mkdir(mode=0o700, exist_ok=True)
        self._folder = str(folder)

    def set(self, key: str, value: str | bytes, /) -> None:
        """Set a key atomically."""
        os.replace(self._written(value), self._path(key))  # noqa: PTH105 - plain paths: it is called often

    def get(self, key: str, /) -> bytes:
        """Return the value of a key that is set."""
        with open(self._path(key), "rb") as file:  # noqa: PTH123 - as above
            return file.read()

    def check(self, keys: list[str], /) -> bool:
        """Return whether all the keys are set."""
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
        """Remove a key; return whether it was set."""
        try:
            os.unlink(self._path(key))  # noqa: PTH108 - as above
        except FileNotFoundError:
            return False
        return True

    def _path(self, key: str) -> str:
        # Hashed: a key may be any text of any length, and some file systems do not tell "a" from "A".
        return f"{self._folder}/{hashlib.sha256(key.encode()).hexdigest()}"

    def _written(self, value: str | bytes) -> str:
        """Write a value to a file of its own; return the path."""
        path = f"{self._folder}/.{os.getpid()}-{next(self._numbers)}"
        with open(path, "wb") as file:  # noqa: PTH123 - as above
            file.write(value.encode() if isinstance(value, str) else value)
        return path


class SignedKeys:
    """Signed keys, for a store to which others can write: an unsigned value counts as not set.

    This rejects forged values. It does not protect the store itself: others can still remove keys.

    Args:
        store: The store.
        secret: Known only to the ranks of the job.
        scope: See `Signer`; new for each start of the ranks.
    """

    _MAX_TRIES: Final = 8

    def __init__(self, store: Keys, secret: bytes, scope: str) -> None:
        """Sign for that scope."""
        self._store = store
        self._signer = Signer(secret, scope)

    def set(self, key: str, value: str | bytes, /) -> None:
        """Set a key to a signed value."""
        self._store.set(key, self._sign(key, value))  # type: ignore[arg-type]  # all take bytes too

    def get(self, key: str, /) -> bytes:
        """Return the value of a key that is set."""
        value = self._find(key)
        if value is None:
            # RuntimeError, as torch's stores raise when their server has exited.
            raise RuntimeError(f"{key} is not set, or was set by another program")
        return value

    def check(self, keys: list[str], /) -> bool:
        """Return whether all the keys are set and signed."""
        return self._store.check(keys) and all(self._find(key) is not None for key in keys)

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes:
        """Set a key if it has the expected value, empty for not set; return its value afterwards."""
        signed = self._sign(key, desired)
        known = self._sign(key, expected) if expected else b""
        for _ in range(self._MAX_TRIES):  # an unsigned value counts as not set: replace it
            found = self._store.compare_set(key, known, signed)  # type: ignore[arg-type]  # as above
            value = self._signer.verified(key, found)
            if value is not None:
                return value
            known = found
        raise RuntimeError(f"another program keeps writing to {key}")

    def delete_key(self, key: str, /) -> bool:
        """Remove a key; return whether it was set."""
        return self._store.delete_key(key)

    def _find(self, key: str) -> bytes | None:
        if not self._store.check([key]):
            return None
        return self._signer.verified(key, self._store.get(key))

    def _sign(self, key: str, value: str | bytes) -> bytes:
        return self._signer.sign(key, value.encode() if isinstance(value, str) else value)


class Departure(NamedTuple):
    """A rank's message to the others that it ends and will reach no more barriers.

    Attributes:
        rank: The rank that ends.
        origin: Where its error comes from: the rank itself, or another one.
        error: Its error, in one line.
        is_failure: False for ``sys.exit(0)``: the rank leaves the others, but has not failed.
    """

    rank: int
    origin: Origin
    error: str
    is_failure: bool = True


class Control:
    """One rank's barriers and messages through the store.

    Attributes:
        store: The store, also for keys that are not `Control`'s.
        failed_peer: The rank that had failed when the last barrier (`is_last`) ended, if known.

    Args:
        store: A store connection that nothing else uses: a client serialises its calls, so a long
            wait here would block the process group's.
        rank: This rank.
        world_size: Number of ranks.
        served_by_rank_zero: Whether the store's server exits with rank 0.
    """

    def __init__(
        self, store: Keys, *, rank: int, world_size: int, served_by_rank_zero: bool = False
    ) -> None:
        """Keep the connection."""
        self.store = store
        self._rank = rank
        self._world_size = world_size
        self._served_by_rank_zero = served_by_rank_zero
        self._uses: dict[str, int] = {}
        self.failed_peer: Departure | None = None

    def barrier(self, name: str, *, deadline: Deadline, is_last: bool = False) -> list[int]:
        """Wait until every rank has reached the barrier of that name.

        Args:
            name: Name of the barrier; every use of it is a new barrier.
            deadline: When to stop waiting.
            is_last: Whether ranks may exit right after it.

        Returns:
            The ranks that did not arrive in time, the same list on every rank.
        """
        ranks = range(self._world_size)
        try:
            barrier = self.arrive(name)
            # The last rank to arrive, or the first to give up, sets the list of missing ranks.
            result = f"{barrier}/missing"
            # The last barrier does not end when a rank fails: failed ranks arrive there too, and the
            # others may finish their work.
            self.wait_for(*([result] if is_last else [result, _DEPARTED]), deadline=deadline)
            if not self.is_set(result):
                departed = None if is_last else self.departure()
                if departed is None:
                    absent = [rank for rank in ranks if not self._has_arrived(barrier, rank)]
                else:  # only the rank that failed: others may still be on their way
                    absent = [departed.rank]
                self.store.compare_set(result, "", json.dumps(absent))
            missing: list[int] = json.loads(self.store.get(result))
            if is_last:  # read now: the store's server may exit once all have read the result
                departure = self.departure()
                self.failed_peer = None
                if departure is not None and departure.rank != self._rank and departure.is_failure:
                    self.failed_peer = departure
            if missing or is_last:
                self.store.set(f"{barrier}/seen/{self._rank}", "yes")
                arrived = (rank for rank in ranks if self._has_arrived(barrier, rank))
                self._wait_until_seen(barrier, arrived)
        except RuntimeError:
            if not self._served_by_rank_zero or self._rank == 0:
                raise
            # Rank 0 has exited, and with it the store. From the last barrier it does not exit before
            # the others have read the result.
            if not is_last:
                return [0]
            self.failed_peer = self.failed_peer or self.departure()
            return []
        return missing

    def arrive(self, name: str) -> str:
        """Arrive at a barrier without waiting for the others; return its name in the store."""
        barrier = self._next_use(name)
        self.store.set(f"{barrier}/{self._rank}", "here")
        if self.store.check([f"{barrier}/{rank}" for rank in range(self._world_size)]):
            # A list that a rank set when it gave up stays: all ranks must read the same one.
            self.store.compare_set(f"{barrier}/missing", "", "[]")
            # All ranks are here, so they have read the result of the previous use: delete its keys.
            # Otherwise a barrier in each of a million steps would fill the store.
            previous = self._uses[name] - 2
            if previous >= 0:
                for key in ("missing", *map(str, range(self._world_size))):
                    self.store.delete_key(f"control/{name}/{previous}/{key}")
        return barrier

    def depart(self, error: str, origin: Origin, *, is_failure: bool = True) -> None:
        """Tell ranks that wait for this one, now or later, that it ends and will not arrive."""
        departure = json.dumps(Departure(self._rank, origin, error, is_failure))
        self.store.compare_set(_DEPARTED, "", departure)

    def departure(self) -> Departure | None:
        """Return the message of the first rank that failed, if one has."""
        try:
            if not self.is_set(_DEPARTED):
                return None
            return Departure(*json.loads(self.store.get(_DEPARTED)))
        except RuntimeError:
            if not self._served_by_rank_zero or self._rank == 0:
                return None
            return Departure(0, "own", "its process ended, and with it the ranks' store.")

    def raise_to(self, name: str, value: int) -> None:
        """Raise the shared number of that name to at least `value`."""
        known = ""
        while not known or int(known) < value:
            known = self.store.compare_set(f"control/{name}", known, str(value)).decode()

    def number(self, name: str) -> int:
        """Return the shared number that `raise_to` raised, once all ranks have called that."""
        return int(self.store.get(f"control/{name}"))

    def _has_arrived(self, barrier: str, rank: int) -> bool:
        return self.is_set(f"{barrier}/{rank}")

    def _wait_until_seen(
        self,
        key: str,
        ranks: Iterable[int],
        is_lost: Callable[[int], bool] = lambda _: False,
    ) -> None:
        """If the store's server exits with this rank, wait until those ranks have read, or are lost."""
        if self._served_by_rank_zero and self._rank == 0:
            linger = Deadline.after(_LINGER)
            for rank in ranks:
                for pause_s in linger.pauses_s():
                    if self.is_set(f"{key}/seen/{rank}") or is_lost(rank):
                        break
                    time.sleep(pause_s)

    def publish(self, name: str, error: str | None) -> None:
        """Publish how the step of that name ended on this rank: with an error, or ``None``."""
        step = self._next_use(name)
        failure = None if error is None else Departure(self._rank, "own", error)
        self.store.set(step, json.dumps(failure))
        if failure is not None:
            self._wait_until_seen(step, range(1, self._world_size))

    def result_of(self, name: str, *, deadline: Deadline) -> tuple[bool, Departure | None]:
        """Wait for the result that another rank publishes with `publish`.

        Returns:
            Whether it was published in time, and the failure if the step failed.
        """
        key = self._next_use(name)
        if not self.wait_for(key, deadline=deadline):
            return False, None
        failure = json.loads(self.store.get(key))
        self.store.set(f"{key}/seen/{self._rank}", "yes")
        return True, None if failure is None else Departure(*failure)

    def put(self, key: str, data: bytes) -> None:
        """Store bytes for other ranks under a key that is used once."""
        self.store.set(f"control/{key}", data)  # type: ignore[arg-type]  # all take bytes too

    def take(self, key: str, *, deadline: Deadline) -> bytes | None:
        """Wait for the bytes that `put` stores; return ``None`` at the deadline."""
        if not self.wait_for(f"control/{key}", deadline=deadline):
            return None
        return bytes(self.store.get(f"control/{key}"))

    def acknowledge(self, key: str) -> None:
        """Confirm that this rank has read the bytes of a key."""
        self.store.set(f"control/{key}/seen/{self._rank}", "yes")

    def stay(self, key: str, is_lost: Callable[[int], bool] = lambda _: False) -> None:
        """If the store's server exits with this rank, wait a while until all have read a key's bytes.

        Args:
            key: The key.
            is_lost: Returns whether a rank has ended, and need not be waited for.
        """
        self._wait_until_seen(f"control/{key}", range(1, self._world_size), is_lost)

    def drop(self, key: str) -> None:
        """Remove the bytes that `put` stored, once every rank has read them."""
        self.store.delete_key(f"control/{key}")

    def wait_for(self, *keys: str, deadline: Deadline) -> bool:
        """Wait until one of the keys is set; return whether it was set before the deadline."""
        # Polled: the wait of torch's stores ignores Ctrl-C and writes warnings to stderr.
        for pause_s in deadline.pauses_s():
            if any(map(self.is_set, keys)):
                return True
            time.sleep(pause_s)
        return False

    def is_set(self, key: str) -> bool:
        """Return whether a key is set, without waiting."""
        return bool(self.store.check([key]))

    def _next_use(self, name: str) -> str:
        """Return the key of the next use of a name: ranks use it equally often, so keys agree."""
        use = self._uses.get(name, 0)
        self._uses[name] = use + 1
        return f"control/{name}/{use}"
