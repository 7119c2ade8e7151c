"""Objects that can be pickled, or cannot; used by test_pickling.py."""

from __future__ import annotations

import resource
import signal
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from ddpsafe import RankContext


def double(x: int) -> int:
    """Be importable by name."""
    return 2 * x


def call_each(ctx: RankContext, functions: list[Callable[[int], object]]) -> list[object]:
    """Call every function with the rank."""
    return [function(ctx.rank + 10) for function in functions]


def summary(_ctx: RankContext, data: Any, tensor: Any) -> tuple[int, int, float]:
    """Return a summary of large arguments."""
    return len(data), data[-1], float(tensor.double().sum())


class Trainer:
    """An object whose method is launched."""

    def __init__(self, offset: int) -> None:
        """Keep a number."""
        self.offset = offset

    def run(self, ctx: RankContext) -> int:
        """Use it."""
        return self.offset + ctx.rank

    def __call__(self, ctx: RankContext) -> int:
        """Be a function, too."""
        return self.run(ctx)


class Holder:
    """Holds something in an attribute."""

    def __init__(self, held: object) -> None:
        """Hold it."""
        self.held = held

    def method(self, _ctx: RankContext) -> object:
        """Be a bound method that drags the rest along."""
        return self.held


class SlottedBase:
    """Holds something in a slot."""

    __slots__ = ("base_slot",)


class Slotted(SlottedBase):
    """Holds something in a slot, and in one it inherits; one slot stays empty."""

    __slots__ = ("empty", "held")

    def __init__(self, held: object, base: object = None) -> None:
        """Hold them."""
        self.held = held
        self.base_slot = base


@dataclass(frozen=True, slots=True)
class FrozenHolder:
    """Holds something in a frozen dataclass."""

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
    """Return a large array although the file for the result cannot be created."""
    import numpy as np

    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 10, resource.RLIM_INFINITY))
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    return np.ones(count)
