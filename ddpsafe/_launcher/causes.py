"""Which rank broke, and which ones only lost it.

Evidence is ranked by what it can mean, and by time only within one rank of it: a rank that lost a
peer often complains before the one that broke has said anything.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

import psutil

from ddpsafe._launcher.symptoms import find_symptom

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from ddpsafe._wire.outcome import Collective, RankOutcome

Sort = Literal["broke", "suspended", "left", "behind", "elsewhere", "mismatch", "unknown"]
"""``broke``: ended by its own fault. ``suspended``: SIGSTOP. ``left``: returned while others waited.
``behind``: fewer collectives than the others. ``elsewhere``: not in the collective the others wait
in. ``mismatch``: another collective than the others. ``unknown``: only echoes were seen."""

MAIN_GROUP: Final = "default_pg"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """What the evidence comes to.

    Attributes:
        sort: In a word.
        root: The rank that broke or that the others waited for.
        collateral: Other ranks that failed, by rank.
    """

    sort: Sort
    root: RankOutcome
    collateral: tuple[RankOutcome, ...]


def find_cause(outcomes: Mapping[int, RankOutcome]) -> Cause:
    """Weigh the evidence, strongest first.

    Args:
        outcomes: What is known of each rank, by rank.
    """
    everyone = sorted(outcomes.values(), key=lambda outcome: outcome.rank)
    failed = [outcome for outcome in everyone if outcome.status in ("raised", "killed", "exited")]
    sort, root = _accuse(everyone, failed)
    others = tuple(outcome for outcome in failed if outcome.rank != root.rank)
    return Cause(sort=sort, root=root, collateral=others)


def _accuse(everyone: list[RankOutcome], failed: list[RankOutcome]) -> tuple[Sort, RankOutcome]:
    """Return the first suspicion that the evidence supports, strongest first."""
    behind = find_behind(everyone)
    odd = _find_mismatch(everyone)
    suspicions: list[tuple[Sort, list[RankOutcome]]] = [
        ("broke", sorted(filter(is_own_fault, failed), key=_order)),
        ("suspended", [out for out in everyone if out.state == psutil.STATUS_STOPPED]),
        ("left", behind[:1] if behind and behind[0].status == "returned" else []),
        ("mismatch", [] if odd is None else [odd]),
        ("behind", behind),
        ("left", [out for out in everyone if out.status == "returned"]),
        ("elsewhere", _find_elsewhere(everyone)),
    ]
    for sort, suspects in suspicions:
        if suspects:
            return sort, suspects[0]
    return "unknown", min(failed or everyone, key=_order)


def _find_elsewhere(everyone: list[RankOutcome]) -> list[RankOutcome]:
    """Return ranks that are not in a collective, if others are or timed out in one."""
    waiting = [out for out in everyone if out.in_collective or out.raised is not None]
    return [out for out in everyone if out.in_collective is False] if waiting else []


def is_own_fault(outcome: RankOutcome) -> bool:
    """Tell whether a failed rank broke by itself, as far as its words say."""
    return outcome.raised is None or find_symptom(outcome.raised) is None


def _order(outcome: RankOutcome) -> tuple[bool, bool, int, int]:
    """Order ranks that failed.

    An error from inside a collective may be an echo after all, and one that was only seen in
    flight may have been caught. A crash there may be one too: ranks that meet in different
    collectives of gloo write into each other's buffers.
    """
    raised = outcome.raised
    if raised is None:
        inside = outcome.status == "killed" and bool(outcome.in_collective)
    else:
        inside = "distributed_c10d.py" in raised.traceback
    seen_ns = raised.at_ns if raised is not None else (outcome.ended_ns or 0)
    in_flight = raised is not None and not raised.final
    return (inside, in_flight, seen_ns, outcome.rank)


def last_collective(outcome: RankOutcome) -> Collective | None:
    """Return the last collective the rank entered in the group of all ranks."""
    return None if outcome.position is None else outcome.position.in_group(MAIN_GROUP)


def furthest_collective(outcomes: Iterable[RankOutcome]) -> Collective | None:
    """Return the collective that the rank which got furthest has entered."""
    known = [last for outcome in outcomes if (last := last_collective(outcome)) is not None]
    return max(known, key=lambda last: last.number, default=None)


def find_behind(outcomes: Iterable[RankOutcome]) -> list[RankOutcome]:
    """Return the ranks that entered fewer collectives than others, the furthest behind first."""
    numbers = {
        outcome.rank: (last.number, outcome)
        for outcome in outcomes
        if (last := last_collective(outcome)) is not None
    }
    if not numbers:
        return []
    furthest = max(number for number, _ in numbers.values())
    late = [pair for pair in numbers.values() if pair[0] < furthest]
    return [outcome for _, outcome in sorted(late, key=lambda pair: (pair[0], pair[1].rank))]


def _find_mismatch(outcomes: Iterable[RankOutcome]) -> RankOutcome | None:
    """Return a rank that entered another collective than most under one number.

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
    calls = [(out, (each.name, each.sizes if under_way else "")) for out, each in entered]
    kinds = [call for _, call in calls]
    if len(set(kinds)) < 2:  # noqa: PLR2004 - they all agree
        return None
    return min(calls, key=lambda pair: (kinds.count(pair[1]), -pair[0].rank))[0]
