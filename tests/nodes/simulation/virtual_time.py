"""Virtual time: many launchers in one process, one of which runs at a time, until it waits.

`install` replaces the clocks and waits of the standard library, before anything of ddpsafe or torch is imported:
so the launchers that run here are those that users run, line by line. A wait ends at its moment in virtual time or
when something that it waits for happens; no time passes otherwise. What happens when is decided by one seed.
"""

from __future__ import annotations

import heapq
import itertools
import multiprocessing.connection
import random
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, Protocol

import greenlet

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

REAL_TIME_S: Final = time.monotonic
_EPOCH_S: Final = 1_800_000_000.0
NEVER_S: Final = 1e12
"""Longer than anything takes."""

_LEAST_S: Final = 1e-5
"""Every wait takes some time, so that a loop that polls ends."""


class Place(Protocol):
    """Where code runs: on a launcher's host, with that host's clocks."""

    name: str
    is_dead: bool
    is_paused: bool
    monotonic_ahead_s: float
    wall_ahead_s: float


class Task:
    """One thread of a launcher."""

    def __init__(self, kernel: Kernel, place: Place, function: Callable[[], Any]) -> None:
        """Begin at once, in the order of the events."""
        self._kernel, self.place = kernel, place
        self.is_done = False
        self.outcome: Any = None
        self.error: BaseException | None = None
        self._function = function
        self._greenlet = greenlet.greenlet(self._run, parent=kernel.hub)
        self._turn = 0
        self.wakes_for_news = False
        kernel.after(0, lambda: self._resume(0))

    def _run(self) -> None:
        try:
            self.outcome = self._function()
        except greenlet.GreenletExit:
            raise
        except BaseException as exc:  # noqa: BLE001 - judged later
            self.error = exc
        self.is_done = True
        self._kernel.notify(self)

    def pause(self, limit_s: float, *, wakes_for_news: bool = False) -> None:
        """Let others run, for so long or until `wake`."""
        self._turn += 1
        turn, self.wakes_for_news = self._turn, wakes_for_news
        if limit_s < NEVER_S / 2:
            self._kernel.after(max(limit_s, _LEAST_S), lambda: self._resume(turn))
        self._kernel.hub.switch()

    def wake(self) -> None:
        """End its wait soon; the launchers of two hosts are never in step."""
        turn = self._turn
        delay_s = self._kernel.random.uniform(_LEAST_S, 2e-3)
        self._kernel.after(delay_s, lambda: self._resume(turn))

    def _resume(self, turn: int) -> None:
        if self.is_done or self.place.is_dead or turn != self._turn:
            return
        if self.place.is_paused:
            self._kernel.deferred.append((self.place, lambda: self._resume(turn)))
            return
        self._turn += 1
        self._kernel.enter(self)

    def end(self) -> None:
        """Free what it holds, once nothing else is simulated."""
        if not self._greenlet.dead:
            self._kernel.is_over = True
            self._greenlet.throw()


class Kernel:
    """The events of one simulation, in their order.

    Attributes:
        now_s: The time since it began.
        place: Where the code that runs now runs; ``None`` outside.
        task: The task that runs now.
        random: Decides everything that a seed decides.
    """

    def __init__(self, seed: int) -> None:
        """Begin without any event."""
        self.now_s = 0.0
        self.random = random.Random(seed)
        self.place: Place | None = None
        self.task: Task | None = None
        self.hub = greenlet.getcurrent()
        self.tasks: list[Task] = []
        self.deferred: list[tuple[Place, Callable[[], None]]] = []
        self.is_over = False
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._waiting: dict[int, list[Task]] = {}

    def after(self, delay_s: float, act: Callable[[], None]) -> None:
        """Do something later."""
        heapq.heappush(self._events, (self.now_s + delay_s, next(self._numbers), act))

    def spawn(self, place: Place, function: Callable[[], Any]) -> Task:
        """Start a thread of a launcher."""
        task = Task(self, place, function)
        self.tasks.append(task)
        return task

    def enter(self, task: Task) -> None:
        """Run a task until it waits."""
        before, self.task, self.place = self.task, task, task.place
        task._greenlet.switch()
        self.task = before
        self.place = None if before is None else before.place

    @contextmanager
    def at(self, place: Place) -> Iterator[None]:
        """Run code in another thread of a launcher, which does not wait."""
        before, self.place = self.place, place
        yield
        self.place = before

    def news(self, place: Place) -> None:
        """Something happened that a wait of a launcher may be for."""
        for task in self.tasks:
            if task.place is place and task.wakes_for_news and not task.is_done:
                task.wake()

    def pause(self, limit_s: float) -> None:
        """Let time pass for the task that runs."""
        assert self.task is not None
        if self.is_over:
            raise greenlet.GreenletExit
        self.task.pause(limit_s)

    def wait_for(self, what: object, limit_s: float) -> None:
        """Wait until something is notified."""
        task = self.task
        assert task is not None
        waiting = self._waiting.setdefault(id(what), [])
        waiting.append(task)
        task.pause(limit_s)
        waiting.remove(task)

    def notify(self, what: object) -> None:
        """End the waits for something."""
        for task in self._waiting.get(id(what), ()):
            task.wake()

    def resume(self, place: Place) -> None:
        """Let the tasks of a place continue that was paused."""
        held = [act for where, act in self.deferred if where is place]
        self.deferred = [item for item in self.deferred if item[0] is not place]
        for act in held:
            self.after(0, act)

    def run(self, is_over: Callable[[], bool], until_s: float) -> bool:
        """Let things happen; return whether it was over in time."""
        while not is_over():
            if not self._events or self._events[0][0] > until_s:
                return False
            self.now_s, _, act = heapq.heappop(self._events)
            act()
        return True

    def close(self) -> None:
        """End all tasks."""
        for task in self.tasks:
            task.end()


running: Kernel | None = None
"""The simulation; outside of one, all clocks are real."""


def monotonic_s() -> float:
    """Return the monotonic clock of the host where the code that asks runs."""
    if running is None:
        return REAL_TIME_S()
    return 1000.0 + running.now_s + (running.place.monotonic_ahead_s if running.place else 0.0)


def wall_s() -> float:
    """Return its wall clock."""
    if running is None:
        return _REAL_WALL()
    return _EPOCH_S + running.now_s + (running.place.wall_ahead_s if running.place else 0.0)


_REAL_WALL = time.time
_REAL_SLEEP = time.sleep


def _sleep(seconds: float) -> None:
    if running is None or running.task is None:
        _REAL_SLEEP(seconds)
    else:
        running.pause(seconds)


ready_handles: dict[int, Callable[[], bool]] = {}
"""What a launcher waits for: whether each handle is ready."""


def _wait(handles: Iterable[Any], timeout: float | None = None) -> list[Any]:
    kernel = running
    assert kernel is not None
    assert kernel.task is not None
    if kernel.is_over:
        raise greenlet.GreenletExit
    ends_s = kernel.now_s + (NEVER_S if timeout is None else timeout)
    handles = list(handles)
    while True:
        ready = [handle for handle in handles if ready_handles[handle]()]
        left_s = ends_s - kernel.now_s
        if ready or left_s <= 0:
            kernel.task.pause(0)
            return ready
        kernel.task.pause(left_s, wakes_for_news=True)


class Condition:
    """`threading.Condition` for tasks."""

    def __enter__(self) -> None:
        """Nothing else runs meanwhile."""

    def __exit__(self, *_: object) -> None:
        """Nothing else ran."""

    def wait(self, timeout: float | None = None) -> None:
        """Wait for `notify_all`."""
        assert running is not None
        if running.is_over:
            raise greenlet.GreenletExit
        running.wait_for(self, NEVER_S if timeout is None else timeout)

    def notify_all(self) -> None:
        """End the waits."""
        if running is not None:
            running.notify(self)


class Event:
    """`threading.Event` for tasks."""

    def __init__(self) -> None:
        """Begin unset."""
        self._is_set, self._news = False, Condition()

    def set(self) -> None:
        """Set it."""
        self._is_set = True
        self._news.notify_all()

    def clear(self) -> None:
        """Unset it."""
        self._is_set = False

    def is_set(self) -> bool:
        """Return whether it is set."""
        return self._is_set

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it is set."""
        if not self._is_set:
            self._news.wait(timeout)
        return self._is_set


class Threading:
    """What the launchers use of `threading`."""

    Condition, Event, Lock = Condition, Event, threading.Lock
    TIMEOUT_MAX = threading.TIMEOUT_MAX


def install() -> None:
    """Replace the clocks and waits of the standard library."""
    time.monotonic, time.time, time.sleep = monotonic_s, wall_s, _sleep
    time.monotonic_ns = lambda: int(monotonic_s() * 1e9)
    time.time_ns = lambda: int(wall_s() * 1e9)
    multiprocessing.connection.wait = _wait
