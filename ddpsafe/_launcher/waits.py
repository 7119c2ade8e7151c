"""Who waits for whom, read from where the ranks are in the sequences of collectives."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddpsafe._wire.outcome import MAIN_GROUP, last_in_main

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from ddpsafe._wire.outcome import Collective, RankOutcome


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """A collective that a rank has entered and another one of its group has not.

    Attributes:
        waiting: The rank that has.
        awaited: The rank that has not.
        collective: Which one.
    """

    waiting: RankOutcome
    awaited: RankOutcome
    collective: Collective


def last_collective(outcome: RankOutcome) -> Collective | None:
    """Return the last collective the rank entered in the group of all ranks."""
    return last_in_main(outcome.position)


def newest_collective(outcome: RankOutcome) -> Collective | None:
    """Return the last collective the rank entered, in whichever group."""
    return None if outcome.position is None else outcome.position.newest()


def is_waiting(outcome: RankOutcome) -> bool:
    """Tell whether a rank waits for others, or did so until that failed."""
    if outcome.raised is not None:
        return outcome.raised.is_peer_error
    return bool(outcome.in_collective)


def find_waits(outcomes: Collection[RankOutcome]) -> list[Wait]:
    """Return who has entered what whom it needs has not, in every group of ranks."""
    known = [(out, each) for out in outcomes for each in _lasts(out)]
    return [
        Wait(waiting=out, awaited=other, collective=each)
        for out, each in known
        for other in outcomes
        if (number := _number(other, each.group)) is not None and number < each.number
    ]


def find_behind(outcomes: Collection[RankOutcome]) -> list[RankOutcome]:
    """Return the ranks that others wait for, the most likely cause of it first.

    That is one that waits for nobody itself, as a rank of a smaller group does for another one of
    it; then the furthest behind in the group of all ranks.
    """
    waits = find_waits(outcomes)
    awaited = {wait.awaited.rank: wait.awaited for wait in waits}
    waiting = {wait.waiting.rank for wait in waits}

    def likelihood(outcome: RankOutcome) -> tuple[bool, bool, int, int]:
        number = _number(outcome, MAIN_GROUP) or 0
        return (outcome.rank in waiting, is_waiting(outcome), number, outcome.rank)

    return sorted(awaited.values(), key=likelihood)


def find_who_waited(
    outcomes: Collection[RankOutcome], root: RankOutcome
) -> tuple[list[int], Collective | None]:
    """Return the ranks that waited for `root` in one collective, and which one that is.

    Where numbers tell nothing it is the one that ranks are in while `root` is in none.
    """
    waits = [wait for wait in find_waits(outcomes) if wait.awaited.rank == root.rank]
    pairs = [(wait.waiting.rank, wait.collective) for wait in waits]
    if not pairs and not is_waiting(root):
        pairs = [
            (out.rank, last)
            for out in outcomes
            if out.rank != root.rank and is_waiting(out) and (last := newest_collective(out))
        ]
        if len({each.group for _, each in pairs}) > 1:  # each waits in a group of its own
            pairs = []
    if not pairs:
        return [], None
    goal = max(
        (each for _, each in pairs), key=lambda each: (each.group == MAIN_GROUP, each.number)
    )
    there = (goal.group, goal.number)
    return sorted(rank for rank, each in pairs if (each.group, each.number) == there), goal


def find_mismatch(outcomes: Collection[RankOutcome]) -> list[RankOutcome]:
    """Return the ranks that entered another collective than most under one number.

    Where there is no majority, those are all of them.

    Looked at is the number that the hindmost rank is in: a rank that skips one pairs its next
    with the others' present one, and all go on until two do not fit. Sizes count only while a
    collective is under way, for gather and all-to-all may differ in them and end well.
    """
    positions = [
        (outcome, outcome.position, last)
        for outcome in outcomes
        if outcome.position is not None and (last := last_collective(outcome)) is not None
    ]
    hindmost = min((last.number for _, _, last in positions), default=0)
    entered = [
        (outcome, collective)
        for outcome, position, _ in positions
        if (collective := position.numbered(MAIN_GROUP, hindmost)) is not None
    ]
    under_way = not any(collective.done for _, collective in entered)
    calls = [
        (out, (each.name, each.sizes if under_way and each.has_one_size else ""))
        for out, each in entered
    ]
    counts = Counter(call for _, call in calls)
    if len(counts) < 2:  # noqa: PLR2004 - they all agree
        return []
    rarest = min(counts.values())
    return [out for out, call in reversed(calls) if counts[call] == rarest]


def _lasts(outcome: RankOutcome) -> Iterator[Collective]:
    """Yield the last collective of each group that the rank has entered one in."""
    if outcome.position is not None:
        for group in dict.fromkeys(each.group for each in outcome.position.collectives):
            last = outcome.position.in_group(group)
            if last is not None:
                yield last


def _number(outcome: RankOutcome, group: str) -> int | None:
    """Return how many collectives a rank has entered in a group; ``None`` where it may be no member."""
    if outcome.position is None:
        return None
    last = outcome.position.in_group(group)
    if last is None:
        return 0 if group == MAIN_GROUP else None
    return last.number
