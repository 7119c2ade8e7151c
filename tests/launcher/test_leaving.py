"""How long ranks that have returned may still run: the limits of what they do, as a table."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import Any, Final

import pytest

from ddpsafe import Timeouts
from ddpsafe._launcher.watch.supervisor import let_ranks_leave

NEVER: Final = 10**6


class Rank:
    """A rank that has left its process group at one time, and exits at another."""

    def __init__(self, rank: int, leaves_s: float, exits_s: float, clock: Any) -> None:
        """Begin with both times in the future."""
        self.rank, self.pid, self.living_threads = rank, 1, None
        self._leaves_s, self._exits_s, self._clock = leaves_s, exits_s, clock

    @property
    def alive(self) -> bool:
        """Whether it has not exited."""
        return bool(self._clock.now_s < self._exits_s)

    @property
    def is_finishing(self) -> bool:
        """Whether only the script's own code is still running."""
        return bool(self._clock.now_s >= self._leaves_s)

    def ask_threads(self) -> None:
        """Say nothing."""


@pytest.mark.parametrize(
    ("ranks", "finish_s", "unfinished", "ends_s"),
    [
        pytest.param([(1, 100)], None, set(), 100, id="what the script does has no limit"),
        pytest.param([(1, 100)], 5, {0}, 6, id="from when the group is left"),
        pytest.param([(8, 10)], 5, set(), 10, id="leaving the group takes longer than that"),
        pytest.param([(8, 100), (1, 3)], 5, {0}, 13, id="each rank has its own time"),
        pytest.param([(NEVER, NEVER)], 5, set(), 30, id="a group that is never left is cut"),
        pytest.param([(NEVER, NEVER), (1, 40)], 60, set(), 40, id="beside one that still works"),
    ],
)
def test_each_rank_has_the_time_it_needs(
    ranks: list[tuple[float, float]], finish_s: float | None, unfinished: set[int], ends_s: float
) -> None:
    """`timeouts.finish` counts from when a rank has left its group, which has 30 s."""
    clock = SimpleNamespace(now_s=0.0)
    finish = None if finish_s is None else timedelta(seconds=finish_s)
    timeouts = Timeouts(finish=finish)
    workers: Any = [Rank(rank, *times, clock) for rank, times in enumerate(ranks)]

    def wait(limit_s: float) -> None:
        clock.now_s += min(limit_s, 0.5)

    left = let_ranks_leave(
        workers, timeouts, wait=wait, is_over=lambda: False, clock=lambda: clock.now_s
    )
    assert left.keys() == unfinished
    assert clock.now_s == pytest.approx(ends_s, abs=1.0)
