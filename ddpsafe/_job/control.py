"""Barriers and messages between ranks over a store, without a collective.

A collective on a failing path waits for dead ranks, and its error names no rank. The store shows at
once which ranks have arrived, and every rank can read it.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import threading
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Final, NamedTuple

from ddpsafe._clock import Deadline

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from contextlib import AbstractContextManager

    from ddpsafe._errors import Origin
    from ddpsafe._job.store_keys import Keys

# How long the rank that serves the store waits until the others have read a result.
_LINGER: Final = timedelta(seconds=10)
_DEPARTED: Final = "control/departed"

_ALONE: Final = timedelta(seconds=3)
"""How long a rank that has done its part keeps its connections for others that may still read from them."""


class Departure(NamedTuple):
    """A rank's message to the others that it ends and will reach no more barriers.

    Attributes:
        origin: Where its error comes from: the rank itself, or another one.
        error: Its error, in one line.
        is_failure: False for ``sys.exit(0)``: the rank leaves the others, but has not failed.
    """

    rank: int
    origin: Origin
    error: str
    is_failure: bool = True


class StoreWait(NamedTuple):
    """A wait of a thread for what other ranks do in one call.

    Attributes:
        key: What they do, equal on all ranks; see `Waits.done`.
        number: How often they have done it once the wait ends.
        text: The call, for messages.
        ranks: For whom it waits. At a barrier that is every rank, this one too: each may give up for all.
        since_ns: When it began (monotonic), which makes it different from every other wait of this rank.
        entered_ns: The same on the wall clock.
    """

    key: str
    number: int
    text: str
    ranks: tuple[int, ...]
    since_ns: int
    entered_ns: int


class Waits:
    """What this rank does for others that wait in the store, and in which such waits its threads are.

    The launcher puts both in one graph with the waits in collectives, which finds ranks that wait for
    each other. `done` counts before the others can notice it, so that a rank never looks awaited for what
    it has done.

    Attributes:
        done: How often this rank has done what others wait for, by key.
        now: The wait that each thread is in, by the thread's ident.
        callers: The idents of the threads that have taken part in any of it.
        on_change: Called when the main thread begins a wait, with the time (monotonic), and with 0 at its end.
    """

    _MAX_KEYS: Final = 1_000  # a script may name a barrier after its step

    def __init__(self) -> None:
        self.done: dict[str, int] = {}
        self.now: dict[int, StoreWait] = {}
        self.callers: set[int] = set()
        self.on_change: Callable[[int], object] = lambda _: None

    @property
    def known(self) -> dict[str, int] | None:
        """What this rank has done; ``None`` if that is too much to be sent."""
        return dict(self.done) if len(self.done) <= self._MAX_KEYS else None

    def do(self, key: str, number: int) -> None:
        """Note that this rank now does what others wait for."""
        self.callers.add(threading.get_ident())
        self.done[key] = max(number, self.done.get(key, 0))

    @contextlib.contextmanager
    def inside(self, key: str, number: int, text: str, ranks: Sequence[int]) -> Iterator[None]:
        """Enclose a wait of this thread until all these ranks have done that so often."""
        thread = threading.get_ident()
        self.callers.add(thread)
        outer = self.now.get(thread)  # a signal handler may wait while the main thread does
        began_ns = time.monotonic_ns(), time.time_ns()
        self._note(thread, StoreWait(key, number, text, tuple(ranks), *began_ns))
        try:
            yield
        finally:
            self._note(thread, outer)

    def _note(self, thread: int, wait: StoreWait | None) -> None:
        if wait is None:
            self.now.pop(thread, None)
        else:
            self.now[thread] = wait
        if thread == threading.main_thread().ident:
            self.on_change(0 if wait is None else wait.since_ns)


class Control:
    """One rank's barriers and messages through the store.

    Attributes:
        store: The store, also for keys that are not `Control`'s.
        has_introduced_itself: Whether the others can know which process this rank is; see `PeerWatch`.
        failed_peer: The rank that had failed when the last barrier (`is_last`) ended, if known.

    Args:
        store: A store connection that nothing else uses: a client serialises its calls, so a long
            wait here would block the process group's.
        served_by_rank_zero: Whether the store's server exits with rank 0.
    """

    def __init__(
        self, store: Keys, *, rank: int, world_size: int, served_by_rank_zero: bool = False
    ) -> None:
        self.store = store
        self._rank = rank
        self._world_size = world_size
        self._served_by_rank_zero = served_by_rank_zero
        self._uses: dict[str, int] = {}
        self.has_introduced_itself = False
        self.failed_peer: Departure | None = None
        self.waits = Waits()

    def barrier(
        self,
        name: str,
        *,
        deadline: Deadline,
        is_last: bool = False,
        text: str = "",
        may_go: Callable[[], bool] | None = None,
    ) -> list[int]:
        """Wait until every rank has reached the barrier of that name; every use of it is a new barrier.

        Ranks may exit right after it if `is_last`. `text` is the call, if a wait in it is one for all ranks,
        without a limit that the caller has set for it alone. `may_go` is asked every `_ALONE` whether this
        rank stops waiting; the others go on then.

        Returns:
            The ranks that did not arrive in time, the same list on every rank that has not gone.
        """
        ranks = range(self._world_size)
        try:
            use = self.arrive(name)
            # The last rank to arrive, or the first to give up, sets the list of missing ranks.
            result = f"control/{use}/missing"
            # The last barrier does not end when a rank fails: failed ranks arrive there too, and the
            # others may finish their work.
            ends = [result] if is_last else [result, _DEPARTED]
            departed: Departure | None = None
            enclosing: AbstractContextManager[None] = contextlib.nullcontext()
            if text:
                enclosing = self.waits.inside(name, self._uses[name], text, ranks)
            while (
                may_go is not None
                and not deadline.expired()
                and not self.wait_for(*ends, deadline=deadline.earlier(Deadline.after(_ALONE)))
            ):
                if may_go():  # one of them: asking for each takes long in a large job
                    absent_now = (
                        rank for rank in ranks if not self.is_set(f"control/{use}/{rank}")
                    )
                    return [*itertools.islice(absent_now, 1)]
            with enclosing:
                # Again if what was found is gone: the store was removed, and its ranks put back their keys.
                while (
                    departed is None
                    and self.wait_for(*ends, deadline=deadline)
                    and not self.is_set(result)
                ):
                    departed = None if is_last else self.departure()
            if not self.is_set(result):
                if departed is None:
                    absent = [rank for rank in ranks if not self.is_set(f"control/{use}/{rank}")]
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
                self.acknowledge(use)
                self.stay(use, (rank for rank in ranks if self.is_set(f"control/{use}/{rank}")))
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
        """Arrive at a barrier without waiting for the others; return the name of this use of it."""
        use = self.next_use(name)
        barrier = f"control/{use}"
        self.waits.do(name, self._uses[name])
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
        return use

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
            # Rank 0 serves the store, so that has ended with it.
            return Departure(0, "own", "its process ended, and with it the ranks' store.")

    def raise_to(self, name: str, value: int) -> None:
        """Raise the shared number of that name to at least `value`."""
        known = ""
        while not known or int(known) < value:
            known = self.store.compare_set(f"control/{name}", known, str(value)).decode()

    def number(self, name: str) -> int:
        """Return the shared number that `raise_to` raised, once all ranks have called that."""
        return int(self.store.get(f"control/{name}"))

    def put(self, key: str, data: bytes) -> None:
        """Store bytes for other ranks under a key that is used once."""
        self.store.set(f"control/{key}", data)  # type: ignore[arg-type]  # all take bytes too

    def acknowledge(self, key: str) -> None:
        """Confirm that this rank has read the bytes of a key."""
        self.store.set(f"control/{key}/seen/{self._rank}", "yes")

    def stay(
        self,
        key: str,
        ranks: Iterable[int] | None = None,
        is_lost: Callable[[int], bool] = lambda _: False,
    ) -> None:
        """If the store's server exits with this rank, wait a while until others have read a key's bytes.

        By default all others; not those that `is_lost` says have ended.
        """
        if self._served_by_rank_zero and self._rank == 0:
            linger = Deadline.after(_LINGER)
            for rank in range(1, self._world_size) if ranks is None else ranks:
                for pause_s in linger.pauses_s():
                    if self.is_set(f"control/{key}/seen/{rank}") or is_lost(rank):
                        break
                    time.sleep(pause_s)

    def find(self, key: str) -> bytes | None:
        """Return the bytes that `put` has stored, or ``None``; without waiting."""
        return bytes(self.store.get(f"control/{key}")) if self.is_set(f"control/{key}") else None

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

    def next_use(self, name: str) -> str:
        """Return a name for the next use of a name: ranks use it equally often, so they agree on it."""
        use = self._uses.get(name, 0)
        self._uses[name] = use + 1
        return f"{name}/{use}"
