"""Find which ranks make the others wait, and for how long, while a run makes progress.

The times at which ranks entered collectives show it; `root_cause` finds a rank that hangs. torch's
flight recorder has these times anyway, so a step costs nothing more. A rank that enters a collective
last makes all others wait from the moment at which the last of them entered it.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from ddpsafe._text import ranks_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from ddpsafe._wire.messages import Arrival, RankOutcome

logger = logging.getLogger(__name__)

NOTABLE: Final = 0.1
"""The share of the time that others have to wait for a rank or a node before it is reported."""

_MIN_COLLECTIVES: Final = 12
_MIN_WINDOW_S: Final = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Straggler:
    """A rank, or all ranks of a node, that the others waited for.

    Attributes:
        node_rank: The node, if `ranks` are all of its ranks; else ``None``.
        waited_s: How long all others waited for it.
        window_s: The time in which they waited that long.
    """

    ranks: tuple[int, ...]
    node_rank: int | None
    waited_s: float
    window_s: float
    collectives: int

    @property
    def share(self) -> float:
        """The share of the time that the others waited for it."""
        return self.waited_s / self.window_s

    def __str__(self) -> str:
        who = ranks_text(self.ranks)
        if self.node_rank is not None:
            who = f"node {self.node_rank} ({who})"
        return (
            f"all others waited for {who} {100 * self.share:.0f} % of the time: "
            f"{self.waited_s:.1f} s of {self.window_s:.1f} s, the last {self.collectives} collectives"
        )

    def as_json(self) -> dict[str, object]:
        """Return what ``ddpsafe status --json`` prints about it."""
        return {
            "ranks": list(self.ranks),
            "node_rank": self.node_rank,
            "waited_s": round(self.waited_s, 3),
            "window_s": round(self.window_s, 3),
            "share": round(self.share, 3),
            "text": str(self),
        }


def find_stragglers(
    arrivals: Mapping[int, Sequence[Arrival]], nodes: Mapping[int, int]
) -> list[Straggler]:
    """Return the ranks and nodes for which others wait at least `NOTABLE` of the time, the worst first."""
    times = {rank: dict(entries) for rank, entries in arrivals.items()}
    if len(times) < 2 or len(times) < len(nodes):  # noqa: PLR2004 - one waits for another
        return []
    numbers = sorted(set.intersection(*(set(by_number) for by_number in times.values())))
    if len(numbers) < _MIN_COLLECTIVES:
        return []
    by_node: dict[int, list[int]] = {}
    for rank in sorted(times):
        by_node.setdefault(nodes.get(rank, 0), []).append(rank)
    stragglers = []
    for node, ranks in by_node.items():
        others = [rank for rank in times if rank not in ranks]
        if others:
            waits = [_wait(times, ranks, others, number) for number in numbers]
            # Clocks of nodes differ. The smallest delay counts as that difference, so a constant delay
            # of a node is not seen.
            offset = min(end - start for start, end in waits)
            waits = [(start, end - max(0, offset)) for start, end in waits]
            stragglers.append(_straggler(ranks, node, waits, times, numbers))
        for rank in ranks:
            # Only those of its node, which share its clock.
            others_of_node = [other for other in ranks if other != rank]
            if others_of_node:
                waits = [_wait(times, [rank], others_of_node, number) for number in numbers]
                stragglers.append(_straggler([rank], None, waits, times, numbers))
    notable = [
        straggler
        for straggler in stragglers
        if straggler.window_s >= _MIN_WINDOW_S and straggler.share >= NOTABLE
    ]
    return sorted(notable, key=lambda straggler: -straggler.share)


def _wait(
    times: Mapping[int, Mapping[int, int]], ranks: Iterable[int], others: Iterable[int], number: int
) -> tuple[int, int]:
    """Return the start and end of the others' wait for these ranks; the end is earlier if they had none."""
    return max(times[rank][number] for rank in others), max(times[rank][number] for rank in ranks)


def _straggler(
    ranks: Sequence[int],
    node: int | None,
    waits: Iterable[tuple[int, int]],
    times: Mapping[int, Mapping[int, int]],
    numbers: Sequence[int],
) -> Straggler:
    waited_ns, until_ns = 0, 0
    # Several collectives may be under way at once, like the buckets of DDP: their time counts once.
    for start, end in sorted(waits):
        waited_ns += max(0, end - max(start, until_ns))
        until_ns = max(until_ns, end)
    moments = [times[rank][number] for rank in ranks for number in (numbers[0], numbers[-1])]
    return Straggler(
        ranks=tuple(ranks),
        node_rank=node,
        waited_s=waited_ns / 1e9,
        window_s=(max(moments) - min(moments)) / 1e9,
        collectives=len(numbers),
    )


def find_stragglers_of(outcomes: Mapping[int, RankOutcome]) -> list[Straggler]:
    """Return the stragglers of an attempt from what its ranks reported at their end."""
    return find_stragglers(
        {
            rank: () if outcome.position is None else outcome.position.arrivals
            for rank, outcome in outcomes.items()
        },
        {rank: outcome.node_rank for rank, outcome in outcomes.items()},
    )


def log_stragglers(outcomes: Mapping[int, RankOutcome]) -> None:
    """Log the stragglers of a launch, at its end."""
    for straggler in find_stragglers_of(outcomes):
        logger.info("%s", straggler)
