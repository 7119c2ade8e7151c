"""Find which ranks wait for each other, and prove that these waits never end.

A rank that waits in a collective continues only when the collective has ended, and most collectives
end only when every rank of their group has entered them. So a rank waits forever if a rank that it
needs has returned, is stopped, or waits forever itself. `find_deadlock` finds the largest set of
such ranks: it repeatedly removes every rank that may still continue, and what remains is a deadlock.
A rank about which too little is known may always continue.

The ranks have to be seen at one instant, so each is asked twice, the second time after all have
answered once. Numbers of collectives only grow. A rank that is in the same place in both answers was
there all the time between, so there is an instant at which all such ranks were; see `unchanged`.

This is pure logic: tests/launcher/test_wait_graph.py has the table, and runs random programs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

from ddpsafe._text import ranks_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from ddpsafe._wire.messages import Collective, Whereabouts

# Ranks may mix these variants of a collective with its plain form, and both end well.
_VARIANTS: Final = ("_base", "_into_tensor", "_tensor", "_coalesced", "_single")
_FROM_OR_TO_ONE: Final = ("broadcast", "reduce", "gather", "scatter", "send", "recv")

Reason = Literal["mismatch", "cycle", "left", "stopped"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankView:
    """What is known about one rank.

    Attributes:
        rank: The rank.
        at: Its answer; ``None`` if it has given none.
        is_asleep: Whether its main thread did not run between the two questions.
        has_left: Whether its function has returned, so that it enters no further collective.
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
        """Compute `entered` once, because each rank is compared with every other."""
        object.__setattr__(self, "entered", {} if self.at is None else _last_numbers(self.at))

    @property
    def blocked_in(self) -> Collective | None:
        """The collective that its main thread cannot leave before it ends."""
        if self.has_left or self.is_stopped or self.at is None or not self.is_asleep:
            return None
        return self.at.waits_in

    def incomplete(self) -> list[Collective]:
        """Return the collectives that have not ended, without those queued for a GPU."""
        if self.at is None:
            return []
        return [
            each
            for each in self.at.position.collectives
            if not each.done and not each.is_queued_ahead
        ]


class Wait(NamedTuple):
    """A rank that waits in a collective for ranks that will never enter it."""

    rank: int
    collective: Collective
    awaited: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadlock:
    """The proof that ranks wait forever.

    Attributes:
        reason: Why.
        ranks: The ranks that cause it: those whose collective differs, those in the cycle, or the
            one that has returned or is stopped.
        waits: Which ranks wait for which.
        calls: Which collective each rank is in, if they differ under one number.
    """

    reason: Reason
    ranks: tuple[int, ...]
    waits: tuple[Wait, ...] = ()
    calls: tuple[tuple[int, Collective], ...] = ()

    def lines(self) -> list[str]:
        """Return the proof, a line for each step."""
        if self.reason == "mismatch":
            return [
                *call_lines(self.calls),
                "waiting longer cannot resolve this: the ranks can never continue.",
            ]
        found = [
            f"rank {rank} waits in {collective} for {ranks_text(awaited)}"
            for rank, collective, awaited in self.waits
        ]
        last = {
            "cycle": "each waits for the next, and the last for the first: none of them can continue.",
            "left": f"{ranks_text(self.ranks)} has returned and enters no further collective.",
            "stopped": f"{ranks_text(self.ranks)} is stopped and does nothing until it is resumed.",
        }
        return [*found, last[self.reason]]


def call_lines(
    calls: Iterable[tuple[int, Collective]], *, verbs: tuple[str, str] | None = None
) -> list[str]:
    """Return a line for each collective that ranks have entered under one number, with the ranks.

    Args:
        calls: What each rank has entered.
        verbs: What one rank and what several ranks did; by default whether they are in it or have left it.
    """
    texts: dict[tuple[str, bool], list[int]] = {}
    for rank, collective in calls:
        has_left = collective.done and verbs is None
        texts.setdefault((str(collective), has_left), []).append(rank)
    words = {False: verbs or ("is in", "are in"), True: ("has left", "have left")}
    return [
        f"{ranks_text(ranks)} {words[has_left][len(ranks) > 1]} {text}"
        for (text, has_left), ranks in texts.items()
    ]


def unchanged(before: Whereabouts | None, now: Whereabouts | None) -> Whereabouts | None:
    """Return the later answer if the rank was in the same place all the time between the two."""
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
    """Return the proof that ranks wait forever, if there is one.

    Args:
        views: What is known about the ranks, all at one instant, by rank; a rank that is missing
            counts as busy.
    """
    members = _members(views)
    mismatch = _find_mismatch(views, members)
    if mismatch is not None:
        return mismatch
    # Repeatedly remove every rank that may still continue; the others are stuck.
    inactive = {view.rank for view in views.values() if view.has_left or view.is_stopped}
    stuck = {view.rank for view in views.values() if view.blocked_in is not None}
    while True:
        waits = _find_endless(views, members, stuck, inactive | stuck)
        free = {rank for rank, wait in waits.items() if wait is None}
        if not free:
            break
        stuck -= free
    found = {rank: wait for rank, wait in waits.items() if wait is not None}
    stopped = _find_stopped(views, members, found)
    if stopped is not None:
        return stopped
    return _find_cycle_or_left(views, found)


def _members(views: Mapping[int, RankView]) -> dict[str, tuple[int, ...]]:
    members: dict[str, tuple[int, ...]] = {}
    for view in views.values():
        if view.at is not None:
            members.update(view.at.groups)
    return members


def _find_mismatch(
    views: Mapping[int, RankView], members: Mapping[str, tuple[int, ...]]
) -> Deadlock | None:
    """Find a group whose ranks have all entered its lowest current number, in different collectives."""
    for group, ranks in members.items():
        known = [
            views[rank].entered[group]
            for rank in ranks
            if rank in views and group in views[rank].entered
        ]
        if len(known) < len(ranks):  # a rank has entered nothing, or is unknown
            continue
        numbered = [
            (rank, at.position.numbered(group, min(known)))
            for rank in ranks
            if (at := views[rank].at) is not None
        ]
        entered = [(rank, each) for rank, each in numbered if each is not None]
        if len(entered) < len(ranks) or any(each.is_queued_ahead for _, each in entered):
            continue
        # Those that a rank cannot leave before they end, with what only its stack shows.
        blocking = {
            rank: inside
            for rank, each in entered
            if not each.done
            and (inside := views[rank].blocked_in) is not None
            and _place(inside) == _place(each)
        }
        calls = [(rank, blocking.get(rank, each)) for rank, each in entered]
        if any(_never_ends(each, calls) for each in blocking.values()):
            # Where roots differ, only ranks that still wait show theirs.
            has_roots = len({each.root for each in blocking.values()}) > 1
            ranks_of: dict[tuple[str, int | None, int | None], list[int]] = {}
            for rank, each in calls:
                if rank in blocking or not has_roots:
                    call = (family(each), each.required_size, each.root if has_roots else None)
                    ranks_of.setdefault(call, []).append(rank)
            fewest = min(len(callers) for callers in ranks_of.values())
            rarest = tuple(
                rank for callers in ranks_of.values() if len(callers) == fewest for rank in callers
            )
            return Deadlock(reason="mismatch", ranks=rarest, calls=tuple(calls))
    return None


def _never_ends(blocking: Collective, calls: Sequence[tuple[int, Collective]]) -> bool:
    """Return whether what all ranks have entered under one number shows that a rank's wait never ends.

    Sizes count on a rank whose collective has ended, too: of gloo ranks that pass different sizes, the one
    that passes fewer elements, or none, often has all that it needs, and leaves the other ones alone.

    A wait for one rank only, such as that of a broadcast, may end while another rank is in a different
    collective. It does not if the ranks name different roots, or pass different sizes to it.
    """
    same = [each for _, each in calls if family(each) == family(blocking)]
    if len(same) < len(calls) and not _is_for_one(blocking):
        return True
    sizes = {each.required_size for each in same} - {None}
    is_other_size = blocking.required_size is not None and len(sizes) > 1
    roots = {each.root for each in same} - {None}
    return is_other_size or (blocking.root is not None and len(roots) > 1)


def family(collective: Collective) -> str:
    name = collective.name.partition(":")[2].lstrip("_")
    for ending in _VARIANTS:
        name = name.removesuffix(ending)
    return name


def _is_for_one(collective: Collective) -> bool:
    """Return whether one rank sends to or receives from all, so that a wait may need that one only."""
    return family(collective) in _FROM_OR_TO_ONE


def _find_endless(
    views: Mapping[int, RankView],
    members: Mapping[str, tuple[int, ...]],
    blocked: Iterable[int],
    inactive: set[int],
) -> dict[int, Wait | None]:
    """Return the wait of each blocked rank if it needs ranks that never enter its collective.

    Most of thousands of ranks wait in the same collective, and for the same ranks.
    """
    never: dict[tuple[str, int], tuple[int, ...]] = {}
    waits: dict[int, Wait | None] = {}
    for rank in blocked:
        collective = views[rank].blocked_in
        assert collective is not None  # noqa: S101 - the caller passes only such ranks
        place, group = _place(collective), members.get(collective.group, ())
        if place not in never:
            # Ranks that have not entered it, or are stopped and so take no part in it.
            awaited = (
                view
                for each in group
                if (view := views.get(each)) is not None
                and (
                    view.is_stopped
                    or (
                        view.at is not None
                        and view.entered.get(collective.group, 0) < collective.number
                    )
                )
            )
            never[place] = tuple(view.rank for view in awaited if view.rank in inactive)
        is_enough = _is_for_one(collective) and len(never[place]) < len(group) - 1
        waits[rank] = (
            None if is_enough or not never[place] else Wait(rank, collective, never[place])
        )
    return waits


def _find_stopped(
    views: Mapping[int, RankView],
    members: Mapping[str, tuple[int, ...]],
    found: Mapping[int, Wait],
) -> Deadlock | None:
    """Find a stopped rank that all others wait for."""
    sets = {group: frozenset(ranks) for group, ranks in members.items()}
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
            # A rank that sleeps elsewhere waits too, if a collective that it has under way needs the culprit.
            unfinished = [
                each
                for each in view.incomplete()
                if culprit.rank in sets.get(each.group, ()) and view.is_asleep
            ]
            if not unfinished:
                break
            waits.append(Wait(view.rank, unfinished[0], (culprit.rank,)))
        else:
            if waits:
                return Deadlock(reason="stopped", ranks=(culprit.rank,), waits=tuple(waits))
    return None


def _find_cycle_or_left(
    views: Mapping[int, RankView], waits: Mapping[int, Wait]
) -> Deadlock | None:
    """Follow the waits until they reach a rank that has returned, or a rank for the second time."""
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
    return None  # they wait for a stopped rank, which may be resumed while another rank is busy
