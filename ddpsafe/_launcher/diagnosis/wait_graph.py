"""Which ranks wait for each other, and whether that can still end: a proof, or nothing.

A rank that waits in a collective goes on only when the collective has ended, and most collectives
end only when every rank of their group has entered them. So a rank waits for ever if a rank that it
needs has left, is stopped, or waits for ever itself. `find_deadlock` looks for the largest set of
ranks of which that is true, by leaving out, again and again, every rank that may still go on; what
remains is a deadlock. Ranks of which too little is known may always go on.

The ranks have to be seen at one instant. Each is asked twice, all of them a second time after all
have answered the first time. Numbers of collectives only grow: a rank that is where it was has been
there all the while, and so at one instant together with all others; see `unchanged`.

Pure logic: tests/launcher/test_wait_graph.py has the table, and runs random programs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

from ddpsafe._errors import ranks_text

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ddpsafe._wire.messages import Collective, Whereabouts

# What one rank may call where another one calls the plain form, and both end well.
_VARIANTS: Final = ("_base", "_into_tensor", "_tensor", "_coalesced", "_single")
_FROM_OR_TO_ONE: Final = ("broadcast", "reduce", "gather", "scatter", "send", "recv")

Reason = Literal["mismatch", "cycle", "left", "stopped"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankView:
    """What is known of one rank.

    Attributes:
        rank: The rank.
        at: Its answer; ``None`` where it has given none.
        is_asleep: Whether its main thread has not run between the two questions.
        has_left: Whether its function has returned: it enters no further collective.
        is_stopped: Whether its process is stopped (SIGSTOP).
        entered: The number of the last collective that it has entered, by group.
    """

    rank: int
    at: Whereabouts | None = None
    is_asleep: bool = False
    has_left: bool = False
    is_stopped: bool = False
    entered: Mapping[str, int] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        """Look through its collectives once: each rank is compared with every other."""
        object.__setattr__(self, "entered", {} if self.at is None else _last_numbers(self.at))

    @property
    def blocked_in(self) -> Collective | None:
        """The collective that its main thread cannot leave before that has ended."""
        if self.has_left or self.is_stopped or self.at is None or not self.is_asleep:
            return None
        return self.at.waits_in

    def incomplete(self) -> list[Collective]:
        """Return the collectives that have not ended, of backends that do not run ahead."""
        if self.at is None:
            return []
        return [
            each
            for each in self.at.position.collectives
            if not each.done and not each.is_queued_ahead
        ]


class Wait(NamedTuple):
    """That a rank waits in a collective for others, of which none will come."""

    rank: int
    collective: Collective
    awaited: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadlock:
    """The proof that ranks wait for ever.

    Attributes:
        reason: Why.
        ranks: Those that are the reason: the ones in different collectives, in the cycle, or the
            one that has left or is stopped.
        waits: Who waits for whom.
        calls: Which collective each rank is in, where they differ under one number.
    """

    reason: Reason
    ranks: tuple[int, ...]
    waits: tuple[Wait, ...] = ()
    calls: tuple[tuple[int, Collective], ...] = ()

    def lines(self) -> list[str]:
        """Say it, a line for each step."""
        if self.reason == "mismatch":
            texts: dict[str, list[int]] = {}
            for rank, collective in self.calls:
                texts.setdefault(str(collective), []).append(rank)
            return [
                *[
                    f"{ranks_text(ranks)} {'is' if len(ranks) == 1 else 'are'} in {text}"
                    for text, ranks in texts.items()
                ],
                "waiting longer cannot resolve this: the ranks can never go on.",
            ]
        found = [
            f"rank {rank} waits in {collective} for {ranks_text(awaited)}"
            for rank, collective, awaited in self.waits
        ]
        last = {
            "cycle": "each waits for the next, and the last for the first: none of them can go on.",
            "left": f"{ranks_text(self.ranks)} has returned and enters no further collective.",
            "stopped": f"{ranks_text(self.ranks)} is stopped and does nothing until it is continued.",
        }
        return [*found, last[self.reason]]


def unchanged(before: Whereabouts | None, now: Whereabouts | None) -> Whereabouts | None:
    """Return the later answer if the rank has been in the same place all the time between the two."""
    if before is None or now is None or before is now:
        return None
    if before.waits_in is None or now.waits_in is None:
        is_same = before.waits_in is now.waits_in
    else:
        is_same = _place(before.waits_in) == _place(now.waits_in)
    moved = _last_numbers(before) != _last_numbers(now)
    return now if is_same and not moved else None


def _place(collective: Collective) -> tuple[str, int]:
    return (collective.group, collective.number)


def _last_numbers(at: Whereabouts) -> dict[str, int]:
    numbers: dict[str, int] = {}
    for each in at.position.collectives:
        numbers[each.group] = max(each.number, numbers.get(each.group, 0))
    return numbers


def find_deadlock(views: Mapping[int, RankView]) -> Deadlock | None:
    """Return the proof that ranks wait for ever, if there is one.

    Args:
        views: What is known of the ranks, all at one instant, by rank; one that is not in it is
            taken for one that works.
    """
    members = _members(views)
    mismatch = _find_mismatch(views, members)
    if mismatch is not None:
        return mismatch
    # Leave out, again and again, every rank that may still go on.
    gone = {view.rank for view in views.values() if view.has_left or view.is_stopped}
    stuck = {view.rank for view in views.values() if view.blocked_in is not None}
    stuck -= gone
    while True:
        waits = {rank: _endless(views, members, rank, gone | stuck) for rank in stuck}
        freed = {rank for rank, wait in waits.items() if wait is None}
        if not freed:
            break
        stuck -= freed
    found = {rank: wait for rank, wait in waits.items() if wait is not None}
    stopped = _find_stopped(views, members, found)
    if stopped is not None:
        return stopped
    return _follow(views, found) if found else None


def _members(views: Mapping[int, RankView]) -> dict[str, tuple[int, ...]]:
    members: dict[str, tuple[int, ...]] = {}
    for view in views.values():
        if view.at is not None:
            members.update(view.at.groups)
    return members


def _find_mismatch(
    views: Mapping[int, RankView], members: Mapping[str, tuple[int, ...]]
) -> Deadlock | None:
    """Look at the hindmost collective of each group: whether all its ranks are in it, in different ones."""
    for group, ranks in members.items():
        known = [
            views[rank].entered[group]
            for rank in ranks
            if rank in views and group in views[rank].entered
        ]
        if len(known) < len(ranks):  # one has not come, or nothing is known of it
            continue
        calls = [
            (rank, at.position.numbered(group, min(known)))
            for rank in ranks
            if (at := views[rank].at) is not None
        ]
        there = [(rank, each) for rank, each in calls if each is not None]
        if len(there) < len(ranks) or any(each.is_queued_ahead for _, each in there):
            continue
        # Those whose rank stays in them, or has left them under way and sleeps elsewhere.
        held = [
            each
            for rank, each in there
            if not each.done
            and not _is_for_one(each)
            and (inside := views[rank].blocked_in) is not None
            and _place(inside) == _place(each)
        ]
        # Whether one of them cannot be what another rank is in; where unsure, it may.
        families = {_family(each) for _, each in there}
        sized = {_comparable_size(each) for _, each in there} - {0}
        is_other_size = any(sized - {size} for each in held if (size := _comparable_size(each)))
        if held and (len(families) > 1 or is_other_size):
            groups: dict[tuple[str, int], list[int]] = {}
            for rank, each in there:
                groups.setdefault(
                    (_family(each), each.numel if each.has_one_size else 0), []
                ).append(rank)
            fewest = min(len(ranks) for ranks in groups.values())
            rarest = tuple(
                rank for ranks in groups.values() if len(ranks) == fewest for rank in ranks
            )
            return Deadlock(reason="mismatch", ranks=rarest, calls=tuple(there))
    return None


def _comparable_size(collective: Collective) -> int:
    """Return the size that all ranks have to bring, 0 where that is not known or has been done."""
    is_known = not collective.done and collective.has_one_size
    return collective.numel if is_known else 0


def _family(collective: Collective) -> str:
    name = collective.name.partition(":")[2].lstrip("_")
    for ending in _VARIANTS:
        name = name.removesuffix(ending)
    return name


def _is_for_one(collective: Collective) -> bool:
    """Tell whether one rank gives or takes all, so that a wait in it may need that one only."""
    return _family(collective) in _FROM_OR_TO_ONE


def _endless(
    views: Mapping[int, RankView],
    members: Mapping[str, tuple[int, ...]],
    rank: int,
    dead: set[int],
) -> Wait | None:
    """Return the wait of a blocked rank if ranks that never come are needed for its end."""
    collective = views[rank].blocked_in
    assert collective is not None  # noqa: S101 - only such ranks are looked at
    others = [each for each in members.get(collective.group, ()) if each != rank]
    # Who has not entered it, or cannot take part because it is stopped.
    awaited = [
        each
        for each in others
        if (view := views.get(each)) is not None
        and (
            view.is_stopped
            or (view.at is not None and view.entered.get(collective.group, 0) < collective.number)
        )
    ]
    never = tuple(each for each in awaited if each in dead)
    if not never or (_is_for_one(collective) and len(never) < len(others)):
        return None
    return Wait(rank, collective, never)


def _find_stopped(
    views: Mapping[int, RankView],
    members: Mapping[str, tuple[int, ...]],
    found: Mapping[int, Wait],
) -> Deadlock | None:
    """Tell whether a rank is stopped and all others wait for it.

    Who sleeps with a collective under way that needs it counts too, wherever its Python is.
    """
    for culprit in views.values():
        if not culprit.is_stopped:
            continue
        waits = []
        for view in views.values():
            if view is culprit or view.has_left or view.is_stopped:
                continue
            if view.rank in found and culprit.rank in found[view.rank].awaited:
                waits.append(found[view.rank])
                continue
            needed = [
                each
                for each in view.incomplete()
                if culprit.rank in members.get(each.group, ()) and view.is_asleep
            ]
            if not needed:
                break
            waits.append(Wait(view.rank, needed[0], (culprit.rank,)))
        else:
            if waits:
                return Deadlock(reason="stopped", ranks=(culprit.rank,), waits=tuple(waits))
    return None


def _follow(views: Mapping[int, RankView], waits: Mapping[int, Wait]) -> Deadlock | None:
    """Go from wait to wait until a rank has left, or one is met again."""
    for first in sorted(waits):
        path: list[int] = []
        rank = first
        while rank in waits and rank not in path:
            path.append(rank)
            awaited = waits[rank].awaited
            rank = next((each for each in awaited if each not in waits), awaited[0])
        if rank in path:
            cycle = path[path.index(rank) :]
            pairs = zip(cycle, [*cycle[1:], cycle[0]], strict=True)
            narrowed = [Wait(each, waits[each].collective, (after,)) for each, after in pairs]
            return Deadlock(reason="cycle", ranks=tuple(cycle), waits=tuple(narrowed))
        if views[rank].has_left:
            return Deadlock(reason="left", ranks=(rank,), waits=tuple(waits[each] for each in path))
    return None  # all wait for a rank that is stopped, and may be continued, beside one at work
