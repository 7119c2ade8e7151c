"""Who makes the others wait, and for how long, as long as a run makes progress.

Known from the times at which ranks entered collectives; a rank that hangs is found by `root_cause`.
torch's flight recorder notes those anyway, so a step costs nothing more. A rank that comes last to a
collective makes all others wait from the moment at which the last of them came. Of collectives that
are under way at the same time, as the buckets of DDP are, the time is counted once.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from ddpsafe._errors import ranks_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from ddpsafe._wire.messages import Arrival, RankOutcome

logger = logging.getLogger(__name__)

NOTABLE: Final = 0.1
"""A share of the time from which a rank or a node is worth a line."""

_FEWEST: Final = 12
_LEAST_WINDOW_S: Final = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Straggler:
    """A rank, or all ranks of a node, that the others waited for.

    Attributes:
        ranks: The ranks.
        node_rank: The node, where it is all of it; else ``None``.
        waited_s: How long all others waited for it.
        window_s: In which time.
        collectives: In how many collectives.
    """

    ranks: tuple[int, ...]
    node_rank: int | None
    waited_s: float
    window_s: float
    collectives: int

    @property
    def share(self) -> float:
        """The part of the time that the others waited for it."""
        return self.waited_s / self.window_s

    def __str__(self) -> str:
        """Say it in a sentence."""
        who = ranks_text(self.ranks)
        if self.node_rank is not None:
            who = f"node {self.node_rank} ({who})"
        return (
            f"all others waited for {who} {100 * self.share:.0f} % of the time: "
            f"{self.waited_s:.1f} s of {self.window_s:.1f} s, the last {self.collectives} collectives"
        )

    def as_json(self) -> dict[str, object]:
        """Return what ``ddpsafe status --json`` prints of it."""
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
    """Return the ranks and nodes that cost the others a tenth of the time, the worst first.

    Args:
        arrivals: When each rank entered its last collectives.
        nodes: The node of each rank. Clocks of nodes differ: of what a node is late by, the least
            over all collectives is taken for that, so a constant delay of a node is not seen.
    """
    times = {rank: dict(each) for rank, each in arrivals.items()}
    if len(times) < 2 or len(times) < len(nodes):  # noqa: PLR2004 - one waits for another
        return []
    numbers = sorted(set.intersection(*(set(each) for each in times.values())))
    if len(numbers) < _FEWEST:
        return []
    by_node: dict[int, list[int]] = {}
    for rank in sorted(times):
        by_node.setdefault(nodes.get(rank, 0), []).append(rank)
    found = []
    for node, ranks in by_node.items():
        others = [rank for rank in times if rank not in ranks]
        if others:
            waits = [_late(times, ranks, others, number) for number in numbers]
            offset = min(end - start for start, end in waits)
            late = [(start, end - max(0, offset)) for start, end in waits]
            found.append(_straggler(ranks, node, late, times, numbers))
        for rank in ranks:
            near = [other for other in ranks if other != rank]
            if near:
                late = [_late(times, [rank], near, number) for number in numbers]
                found.append(_straggler([rank], None, late, times, numbers))
    notable = [each for each in found if each.window_s >= _LEAST_WINDOW_S and each.share >= NOTABLE]
    return sorted(notable, key=lambda each: -each.share)


def _late(
    times: Mapping[int, Mapping[int, int]], ranks: Iterable[int], others: Iterable[int], number: int
) -> tuple[int, int]:
    """Return from when to when the others waited for these ranks; the end is first if they did not."""
    return max(times[rank][number] for rank in others), max(times[rank][number] for rank in ranks)


def _straggler(
    ranks: Sequence[int],
    node: int | None,
    waits: Iterable[tuple[int, int]],
    times: Mapping[int, Mapping[int, int]],
    numbers: Sequence[int],
) -> Straggler:
    waited_ns, until_ns = 0, 0
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
    """Return them from what the ranks reported at their end."""
    return find_stragglers(
        {
            rank: () if outcome.position is None else outcome.position.arrivals
            for rank, outcome in outcomes.items()
        },
        {rank: outcome.node_rank for rank, outcome in outcomes.items()},
    )


def log_stragglers(outcomes: Mapping[int, RankOutcome]) -> None:
    """Say at the end of a launch who cost the others more than a tenth of the time."""
    for each in find_stragglers_of(outcomes):
        logger.info("%s", each)
