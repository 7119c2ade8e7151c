"""Objects that can, or cannot, be sent in test_pickling.py."""

from __future__ import annotations

import resource
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ddpsafe import RankContext


def double(x: int) -> int:
    """Return twice the number; importable by name."""
    return 2 * x


def call_each(ctx: RankContext, functions: list[Callable[[int], object]]) -> list[object]:
    """Call every function with the rank."""
    return [function(ctx.rank + 10) for function in functions]


class Trainer:
    """An object whose method is launched."""

    def __init__(self, offset: int) -> None:
        self.offset = offset

    def run(self, ctx: RankContext) -> int:
        """Return the number plus the rank."""
        return self.offset + ctx.rank

    def __call__(self, ctx: RankContext) -> int:
        """Do the same as `run`."""
        return self.run(ctx)


class Holder:
    """Holds an object in an attribute."""

    def __init__(self, held: object) -> None:
        self.held = held

    def method(self, _ctx: RankContext) -> object:
        """Return the object; as a bound method, it takes its instance along."""
        return self.held


class SlottedBase:
    """Holds an object in a slot."""

    __slots__ = ("base_slot",)


class Slotted(SlottedBase):
    """Holds an object in a slot, and another in an inherited one; one slot stays empty."""

    __slots__ = ("empty", "held")

    def __init__(self, held: object, base: object = None) -> None:
        self.held = held
        self.base_slot = base


@dataclass(frozen=True, slots=True)
class FrozenHolder:
    """Holds an object in a frozen dataclass."""

    held: object


@dataclass
class Options:
    """A configuration as users write it."""

    name: str = "run"
    file: object = None
    extra: dict[str, object] = field(default_factory=dict)


LOCK = threading.Lock()


def double_in_the_second_attempt(ctx: RankContext, array: Any) -> Any:
    """Write to a large argument, fail once, and return it."""
    array *= 2
    if ctx.attempt == 1:
        msg = "once"
        raise ConnectionError(msg)
    return array


def return_much_without_a_folder(_ctx: RankContext, count: int) -> Any:
    """Return a large array where the file for the result cannot be created."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 10, resource.RLIM_INFINITY))
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    return np.ones(count)
